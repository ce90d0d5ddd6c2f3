"""Recordings of runs whose costs are known."""
