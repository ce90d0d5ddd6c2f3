"""Layouts of published data sets: base.py is the contract, detect.py finds the layout of a source."""
