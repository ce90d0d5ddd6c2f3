"""What the trainer and the interpreters of the engines both import: these have no realsys, only this folder."""

from pathlib import Path

INSIDE = Path(__file__).parent
UNDONE = "its earlier weights are back"  # as in realsys_group, which needs torch
