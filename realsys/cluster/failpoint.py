"""Hook for tests: named moments of a run at which a test may make something go wrong.

    REALSYS_FAILPOINTS   module with ``install(worker) -> Action``; unset in production

Without the variable a failpoint costs one comparison. The faults live in ``tests/support/faults``.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path

MODULE = "REALSYS_FAILPOINTS"
#: (point, path, at) -> "", or "drop", "duplicate", "garbage": what the caller must do to its message
Action = Callable[[str, Path | None, int], str]


class _Process:
    """Action of this process; None outside of tests."""

    action: Action | None = None


def arm(worker: str) -> None:
    """Install the action for ``worker``, such as ``rollout_worker/0``, before its first failpoint."""
    if module := os.environ.get(MODULE):
        _Process.action = importlib.import_module(module).install(worker)


def failpoint(point: str, path: Path | None = None, at: int = 0) -> str:
    """Pass ``point``: run the action, if one is installed, and return what the caller must do to its message.

    ``path``: file or folder that is complete at this point. ``at``: step or version. Raises what the action raises.
    """
    return "" if _Process.action is None else _Process.action(point, path, at)
