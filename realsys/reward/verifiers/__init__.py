"""Verifiers judge completions: one file for each. Contract: ``base.py``; names: ``realsys.config.doors``."""
