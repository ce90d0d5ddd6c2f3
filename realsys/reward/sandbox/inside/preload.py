"""Imports what programs import, once for all of them. The zygote does this first.

Modules may register functions that run after a fork, such as the one of ``threading``, which makes its locks anew.
Between the zygote and a child these would only cost time: the zygote has one thread and holds no lock. So they are
kept, and ``in_child`` registers them for the forks of the program.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import Any

#: modules that programs import most
_COMMON = (
    "ast bisect collections copy datetime decimal fractions functools heapq io itertools json math operator os random "
    "re statistics string sys threading time traceback typing"
)
_hooks: list[dict[str, Any]] = []


def preload() -> None:
    """Import the modules, and keep their hooks."""
    register = os.register_at_fork
    os.register_at_fork = lambda **hooks: _hooks.append(hooks)
    try:
        for name in _COMMON.split():
            __import__(name)
    finally:
        os.register_at_fork = register


def freeze() -> None:
    """Make the modules final: a child that collects garbage does not touch, and so not copy, their memory."""
    sys.path[:] = [path for path in sys.path if path != "/realsys"]
    gc.collect()
    gc.freeze()


def in_child() -> None:
    """Prepare a child for its program."""
    reseed()
    for hooks in _hooks:
        os.register_at_fork(**hooks)


def reseed() -> None:
    """Seed the random numbers; else all programs would draw the same ones."""
    sys.modules["random"].seed()
