"""The kernel's help against orphans: die with the parent, inherit orphaned descendants. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(signum: int, parent: int | None) -> bool:
    """Have the kernel send ``signum`` to this process when the parent *thread* that started it ends.

    Returns False if process ``parent`` ended before this call: no signal will come. Raises OSError.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)
    return parent is None or os.getppid() == parent


def become_subreaper() -> None:
    """Make orphaned descendants children of this process, so that it can find and kill them. Raises OSError."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


@contextlib.contextmanager
def subreaper() -> Iterator[None]:
    """Be the subreaper inside the block only."""
    become_subreaper()
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, int(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")
