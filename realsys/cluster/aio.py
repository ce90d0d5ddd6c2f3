"""Helpers of event loops: coroutines that end early, and disk work with a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar

from realsys.cluster.worker import WorkerContext
from realsys.errors import WaitTimeout

log = logging.getLogger(__name__)

Result = TypeVar("Result")
_LOOK_S = 1.0  # seconds between two looks whether a loop has ended


def stop_event(ctx: WorkerContext) -> asyncio.Event:
    """Return an event that the request to stop sets on the running event loop."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def request_stop() -> None:  # called on the signal thread
        with contextlib.suppress(RuntimeError):  # the loop has closed, perhaps just now
            loop.call_soon_threadsafe(stop.set)

    ctx.on_stop(request_stop)
    return stop


async def run_until_stopped(
    ctx: WorkerContext,
    work: Coroutine[Any, Any, None],
    grace_s: float = 0.0,
    progress: Callable[[], object] = lambda: None,
    progress_s: float = 0.0,
) -> bool:
    """Run ``work`` until it ends or a request to stop comes; in that case cancel it after ``grace_s``.

    The grace is for work that also learns of the stop elsewhere. If ``progress`` returns something else after it than
    before it, it begins again, with ``progress_s``. Returns True if ``work`` was not cancelled. Raises its exception.
    """
    async with _racing(work, stop_event(ctx).wait()) as (task, _):
        if not task.done():
            log.info("asked to stop")
            if not grace_s or not await _ends(task, grace_s, progress, progress_s):
                return False
        task.result()
        return True


async def _ends(task: asyncio.Task[Any], grace_s: float, progress: Callable[[], object], progress_s: float) -> bool:
    """Return True when ``task`` has ended, False after a time without progress: ``grace_s``, then ``progress_s``."""
    before = progress()
    while not (await asyncio.wait({task}, timeout=grace_s))[0]:
        if (now := progress()) == before:
            return False
        before, grace_s = now, progress_s
    return True


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, Result]) -> Result | None:
    """Return the result of ``work``; or cancel it and return None if ``stop`` is set before it ends."""
    if stop.is_set():
        work.close()
        return None
    async with _racing(work, stop.wait()) as (task, _):
        return task.result() if task.done() else None


async def first_completed(futures: Iterable[asyncio.Future[Any]]) -> set[asyncio.Future[Any]]:
    """Wait until at least one of ``futures`` is done; return all that are done. It cancels none."""
    done, _ = await asyncio.wait(list(futures), return_when=asyncio.FIRST_COMPLETED)
    return done


async def run_beside(work: Coroutine[Any, Any, Result], service: Coroutine[Any, Any, None]) -> Result:
    """Run ``work`` to its end while ``service``, which normally does not end, runs at the same time.

    If either raises, the other is cancelled and the exception is raised here.
    """
    async with _racing(work, service) as (main, other):
        if other.done():
            other.result()
        return await main


@contextlib.asynccontextmanager
async def _racing(
    first: Coroutine[Any, Any, Result], second: Coroutine[Any, Any, Any]
) -> AsyncIterator[tuple[asyncio.Task[Result], asyncio.Task[Any]]]:
    """Run both until one has ended; cancel what still runs after the block, and wait for it."""
    tasks = asyncio.ensure_future(first), asyncio.ensure_future(second)
    try:
        await first_completed(tasks)
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


# ---- disk work of the master: in a thread, so that its event loop runs on, and with a time limit


async def on_disk(what: str, timeout_s: float, work: Callable[[], Result]) -> Result:
    """Run ``work`` in a thread, and return its result.

    Raises WaitTimeout, which names ``what``, if ``work`` takes longer than ``timeout_s``; the thread is then
    abandoned. Raises whatever ``work`` raises.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await (done := in_thread(what, work))
    except TimeoutError:
        if done.done() and not done.cancelled():
            return done.result()  # it was ready when the time was up, or ``work`` raised a TimeoutError
        problem = f"not done within {timeout_s:g} s; the disk hangs, or is too slow for cluster.request_timeout_s"
        raise WaitTimeout(f"master_worker: {what}: {problem}") from None


def in_thread(what: str, work: Callable[[], Result]) -> asyncio.Future[Result]:
    """Start ``work`` in a thread of its own; return its result or exception as a future.

    Not ``asyncio.to_thread``: the loop joins those threads at its end, and a thread that hangs (in the kernel for a
    dead NFS server, in the code of a user) never ends. This one is a daemon, and ends with the process.
    """
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
    return done


def from_thread(
    loop: asyncio.AbstractEventLoop, work: Callable[..., Coroutine[Any, Any, Result]], *args: Any
) -> Result:
    """Run ``work(*args)`` on the event loop of another thread, and wait for its result. Raises what it raises.

    Unlike with ``run_coroutine_threadsafe``, the loop's thread calls ``work``, which may refuse to begin anything.
    Raises RuntimeError if the loop ends before.
    """
    done: Future[Result] = Future()

    def end(task: asyncio.Task[Result]) -> None:
        if task.cancelled():
            done.cancel()
        elif error := task.exception():
            done.set_exception(error)
        else:
            done.set_result(task.result())

    def begin() -> None:
        try:
            loop.create_task(work(*args)).add_done_callback(end)
        except Exception as error:  # the caller raises it
            done.set_exception(error)

    loop.call_soon_threadsafe(begin)
    # A loop that ends right now may never call ``begin``.
    while not wait([done], _LOOK_S).done:
        if loop.is_closed():
            raise RuntimeError("the event loop has ended")
    return done.result()


FULL = "No space left on device"
_FULL_BELOW = 1 << 16  # bytes


def full_disk(folder: Path) -> str:
    """Return that the disk of ``folder`` is full; "" if it is not. A full disk may have kept its victim from saying so.

    The margin is less than what any process writes at a time.
    """
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return ""
    return f"{FULL}: {folder}: free space on this disk" if free < _FULL_BELOW else ""
