"""Layouts of published data sets: ``contract`` has the contract, and finds the layout of a source."""
