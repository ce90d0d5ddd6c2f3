"""Prediction of the memory of a trial, per device and per host. No torch: every number is computed from the sizes.

    shard ────────┐
    activations ──┼──> devices ──┬──> memory_check, changes    what does not fit is refused
    models ───────┘    hosts ────┤    layouts                  allocation=auto
                                 └──> table                    realsys run --dry-run

docs/memory.md has the formulas in one table.
"""
