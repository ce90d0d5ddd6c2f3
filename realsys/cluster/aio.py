"""A worker's body as a coroutine: the request to stop, on its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from realsys.cluster.worker import WorkerContext

log = logging.getLogger(__name__)

Result = TypeVar("Result")


def stop_event(ctx: WorkerContext) -> asyncio.Event:
    """Set, on the running event loop, when the worker is asked to stop."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def request_stop() -> None:  # from the signal thread
        with contextlib.suppress(RuntimeError):  # the loop has closed, perhaps just now
            loop.call_soon_threadsafe(stop.set)

    ctx.on_stop(request_stop)
    return stop


async def run_until_stopped(ctx: WorkerContext, work: Coroutine[Any, Any, None], grace_s: float = 0.0) -> bool:
    """Run ``work`` until it ends or the worker is asked to stop, whichever is first; then it is cancelled.

    ``grace_s``: how long work that was told to stop by itself, too, has for that. Returns whether it ended by itself.
    What it raises comes out here.
    """
    task = asyncio.ensure_future(work)
    stopping = asyncio.create_task(stop_event(ctx).wait(), name="stop")
    try:
        await first_completed((task, stopping))
        if not task.done():
            log.info("asked to stop")
            if not grace_s or not (await asyncio.wait({task}, timeout=grace_s))[0]:
                return False
        task.result()
        return True
    finally:
        for pending in (task, stopping):
            if not pending.done():
                pending.cancel()
                await asyncio.wait({pending})


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, Result]) -> Result | None:
    """The result of ``work``; None, and ``work`` is cancelled, when ``stop`` is set before it ends."""
    if stop.is_set():
        work.close()
        return None
    task, stopping = asyncio.ensure_future(work), asyncio.create_task(stop.wait(), name="stop")
    try:
        await first_completed((task, stopping))
        return task.result() if task.done() else None
    finally:
        for pending in (task, stopping):
            pending.cancel()
        await asyncio.wait({task, stopping})


async def first_completed(futures: Iterable[asyncio.Future[Any]]) -> set[asyncio.Future[Any]]:
    """Wait until at least one of ``futures`` is done; return all that are done. It cancels none."""
    done, _ = await asyncio.wait(list(futures), return_when=asyncio.FIRST_COMPLETED)
    return done


async def run_beside(work: Coroutine[Any, Any, Result], service: Coroutine[Any, Any, None]) -> Result:
    """Run ``work`` to its end while ``service``, which is to run for ever, runs beside it.

    What either raises comes out here; the other is then cancelled.
    """
    main, beside = asyncio.ensure_future(work), asyncio.ensure_future(service)
    try:
        await first_completed((main, beside))
        if beside.done():
            beside.result()
        return await main
    finally:
        for task in (main, beside):
            task.cancel()
        await asyncio.wait({main, beside})
