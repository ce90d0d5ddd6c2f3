"""Waits for a process, a file or a program that sends no event. Wait for an event where there is one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from realsys.errors import WaitTimeout

_PAUSE_S = 0.05


def poll(condition: Callable[[], Any], what: str, timeout_s: float, report: Callable[[], str] = str) -> Any:
    """Return the value of ``condition()`` once it is true.

    Raises what ``condition`` raises, and WaitTimeout, which names ``what`` and ends with ``report()``.
    """
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise WaitTimeout(f"not within {timeout_s:g} s: {what}\n{report()}".rstrip())
        time.sleep(_PAUSE_S)
    return value
