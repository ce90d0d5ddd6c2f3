"""Waits for a process, a file or a program that sends no event. Wait for an event where there is one."""

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

from realsys.errors import WaitTimeout

_PAUSE_S = 0.05
_ENDED_S = 60.0


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


def ended(pid: int) -> bool:
    """Wait for the end of a process that is not our child; return False if it does not end in time."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], _ENDED_S)[0])
    finally:
        os.close(pidfd)


def suspend(process: subprocess.Popen[Any]) -> None:
    """Send SIGSTOP to a child, and return when it has stopped: on a busy machine it may go on for a while."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
