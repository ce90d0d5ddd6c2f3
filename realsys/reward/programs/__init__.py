"""Judges programs: finds the program in a completion, runs its tests in the sandbox, compares results."""
