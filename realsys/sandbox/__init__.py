"""Runs programs that nobody has read: isolation, limits, tests (docs/sandbox.md)."""
