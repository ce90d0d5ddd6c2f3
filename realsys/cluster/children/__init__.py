"""Servers of other packages as child processes of a worker. None of their processes outlives the worker."""
