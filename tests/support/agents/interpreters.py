"""Interpreters in which the tests of agents run other packages: virtual environments that the Makefile makes."""

from tests.support.agents.trained import ROOT
from tests.support.needs import lacks


def interpreter_of(venv: str) -> str:
    """Return the interpreter of a virtual environment of this checkout; skip or fail the running test without it."""
    python = ROOT / venv / "bin" / "python"
    if not python.exists():
        lacks(f"{venv}: run `make agents-test`", "REALSYS_PACKAGES")
    return str(python)
