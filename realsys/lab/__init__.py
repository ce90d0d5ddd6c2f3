"""Planner: throughput of other splits, batch sizes, bounds on staleness and lengths, from one recorded run."""
