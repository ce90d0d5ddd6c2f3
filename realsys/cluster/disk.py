"""Disks that are slow or full. Disk work of the master is done in a thread, so that its event loop runs on, and with a
time limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from realsys.errors import WaitTimeout

Result = TypeVar("Result")

FULL = "No space left on device"
_FULL_BELOW = 1 << 16  # bytes


async def on_disk(what: str, timeout_s: float, work: Callable[[], Result]) -> Result:
    """Run ``work`` in a thread, and return its result.

    Raises WaitTimeout, which names ``what``, if ``work`` takes longer than ``timeout_s``; the thread is then
    abandoned. Raises whatever ``work`` raises.
    """
    # Not asyncio.to_thread: the loop joins those threads at its end, and a thread that hangs in the
    # kernel (a dead NFS server) never ends. This one is a daemon, and ends with the process.
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def settle(set_outcome: Callable[[], None]) -> None:
        def unless_cancelled() -> None:
            if not done.done():
                set_outcome()

        with contextlib.suppress(RuntimeError):  # the loop is closed: the result has no reader
            loop.call_soon_threadsafe(unless_cancelled)

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # the caller raises it
            failure = error
            settle(lambda: done.set_exception(failure))
        else:
            settle(lambda: done.set_result(result))

    threading.Thread(target=run, name=what, daemon=True).start()
    try:
        async with asyncio.timeout(timeout_s):
            return await done
    except TimeoutError:
        if done.done() and not done.cancelled():
            return done.result()  # it was ready when the time was up, or ``work`` raised a TimeoutError
        problem = f"not done within {timeout_s:g} s; the disk hangs, or is too slow for cluster.request_timeout_s"
        raise WaitTimeout(f"master_worker: {what}: {problem}") from None


def full_disk(folder: Path) -> str:
    """Return that the disk of ``folder`` is full; "" if it is not. A full disk may have kept its victim from saying so.

    The margin is less than what any process writes at a time.
    """
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return ""
    return f"{FULL}: {folder}: free space on this disk" if free < _FULL_BELOW else ""
