"""Engines of other packages, each a server in a child process: requests, updates, restarts. No torch."""
