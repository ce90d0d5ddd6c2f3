"""What the master does on the disk, beside its event loop and for no longer than a bound."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from realsys.errors import WaitTimeout

Result = TypeVar("Result")


async def on_disk(what: str, timeout_s: float, work: Callable[[], Result]) -> Result:
    """The result of ``work``, run in a thread. Raises WaitTimeout naming ``what`` if it is not done in time, and what
    ``work`` raises.

    Not in the event loop's own threads: those are waited for at the end of the loop, and one that hangs in the kernel
    never ends. This one is left alone, and ends with the process.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def settle(set_outcome: Callable[[], None]) -> None:
        def unless_given_up() -> None:
            if not done.done():
                set_outcome()

        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(unless_given_up)

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # raised where it is waited for
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
            return done.result()  # it came with the timeout, or raised one of its own
        problem = f"not done within {timeout_s:g} s; the disk hangs, or is too slow for cluster.request_timeout_s"
        raise WaitTimeout(f"master_worker: {what}: {problem}") from None
