"""Faults that tests inject at the failpoints of a run: what can go wrong, where, and the plan of one run."""
