"""Simulation of a trial: the production state machines on a virtual clock, with cost models around them."""
