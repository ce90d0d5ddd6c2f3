"""Programs and packages that a test needs of its machine. Without them it is skipped by name, or fails:

REALSYS_NO_SKIPS=1   programs and network namespaces are promised: a test that lacks one fails
REALSYS_PACKAGES=1   the same for optional packages: set by the targets of the Makefile that install some
"""

import functools
import os
import shutil
from importlib.util import find_spec
from typing import NoReturn

import pytest

from tests.support.processes import netns


def need_program(name: str) -> None:
    """Skip or fail the running test without this program; ``netns`` stands for several hosts on this machine."""
    if problem := _missing(name):
        lacks(problem, "REALSYS_NO_SKIPS")


def need_package(name: str) -> None:
    """Skip or fail the running test if this package is not installed."""
    if find_spec(name) is None:
        lacks(f"the package {name}, which is not installed", "REALSYS_PACKAGES")


def lacks(what: str, promise: str) -> NoReturn:
    """Skip the running test, or fail it if the variable ``promise`` is 1."""
    if os.environ.get(promise) == "1":
        pytest.fail(f"needs {what} ({promise}=1)", pytrace=False)
    pytest.skip(f"needs {what}")


@functools.cache
def _missing(name: str) -> str:
    if name == "netns":
        problem = netns.missing()
        return f"network namespaces: {problem}" if problem else ""
    return "" if shutil.which(name) else f"{name}, which is not installed"
