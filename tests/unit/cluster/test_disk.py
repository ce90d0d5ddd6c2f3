"""Disk work of the master: in a thread, and with a time limit."""

from __future__ import annotations

import asyncio
import threading

import pytest

from realsys.cluster.aio import on_disk
from realsys.errors import WaitTimeout


def test_result_and_error_are_passed_on() -> None:
    async def body() -> None:
        assert await on_disk("reading", 60.0, lambda: threading.current_thread().name) == "reading"
        for error in (OSError(28, "No space left on device"), TimeoutError("of its own")):

            def fail(error: Exception = error) -> None:
                raise error

            with pytest.raises(type(error)) as caught:
                await on_disk("writing", 60.0, fail)
            assert caught.value is error

    asyncio.run(body())


def test_hanging_disk_blocks_no_loop() -> None:
    """The loop's own threads are waited for when it ends: this would never return."""
    released = threading.Event()
    try:
        with pytest.raises(WaitTimeout, match=r"publishing v3: not done within 0\.01 s; the disk hangs"):
            asyncio.run(on_disk("publishing v3", 0.01, released.wait))
    finally:
        released.set()


def test_late_result_does_not_disturb_the_loop() -> None:
    async def body() -> None:
        released, ended = threading.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def work() -> None:
            released.wait()
            loop.call_soon_threadsafe(loop.call_soon_threadsafe, ended.set)  # behind what the thread itself posts

        task = asyncio.create_task(on_disk("work", 60.0, work))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        released.set()
        await asyncio.wait_for(ended.wait(), 60)

    asyncio.run(body(), debug=True)
