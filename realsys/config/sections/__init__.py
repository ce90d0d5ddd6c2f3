"""Sections of the configuration that have many fields; realsys/config/schema.py has the others."""
