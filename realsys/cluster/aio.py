"""A worker's body as a coroutine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from realsys.cluster.worker import WorkerContext

log = logging.getLogger(__name__)


async def run_until_stopped(ctx: WorkerContext, work: Coroutine[Any, Any, None]) -> bool:
    """Run ``work`` until it ends or the worker is asked to stop, whichever is first; then it is cancelled.

    Returns whether it ended by itself. What it raises comes out here.
    """
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()

    def stop() -> None:
        loop.call_soon_threadsafe(stopped.set)

    ctx.on_stop(stop)
    task = asyncio.ensure_future(work)
    stopping = asyncio.create_task(stopped.wait(), name="stop")
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            log.info("asked to stop")
            return False
        task.result()
        return True
    finally:
        for pending in (task, stopping):
            if not pending.done():
                pending.cancel()
                await asyncio.wait({pending})
