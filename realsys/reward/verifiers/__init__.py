"""Verifiers judge completions: one file for each. Contract: ``contract.py``; names: ``realsys.config.doors``."""
