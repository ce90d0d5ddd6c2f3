"""Runs programs of a model: isolation, limits, tests (docs/sandbox.md)."""
