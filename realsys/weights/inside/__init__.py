"""Modules for the trainer and for the interpreters of the engines, which have this folder and no realsys."""

from pathlib import Path

INSIDE = Path(__file__).parent
UNDONE = "its earlier weights are back"  # as in realsys_group, which needs torch
