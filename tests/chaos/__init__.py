"""Whole jobs under faults that are injected by name: ``python -m tests.chaos``; docs/chaos.md."""
