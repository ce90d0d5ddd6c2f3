"""Work that is given up, or given time, when a worker is asked to stop."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest

from realsys.cluster.aio import from_thread, on_disk, run_until_stopped, unless
from realsys.errors import WaitTimeout

BOUND_S = 60.0


def run(body):
    return asyncio.run(asyncio.wait_for(body, BOUND_S))


class Context:
    """The part of WorkerContext that is used: asked to stop when the test says so."""

    def __init__(self):
        self.ask: Callable[[], None] = lambda: None

    def on_stop(self, callback):
        self.ask = callback


def test_unless_gives_the_result_or_nothing_and_cancels():
    async def body():
        stop, began, ended = asyncio.Event(), asyncio.Event(), list[str]()

        async def work():
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("cancelled")
            return 0

        async def quick():
            return 7

        async def broken():
            raise ValueError("x")

        assert await unless(stop, quick()) == 7
        with pytest.raises(ValueError, match="x"):
            await unless(stop, broken())
        waiting = asyncio.create_task(unless(stop, work()))
        await began.wait()
        stop.set()
        assert await waiting is None and ended == ["cancelled"]
        assert await unless(stop, quick()) is None, "not even begun"

    run(body())


def test_work_that_stops_by_itself_has_its_grace():
    async def body():
        ctx: Any = Context()
        began, finish, log = asyncio.Event(), asyncio.Event(), list[str]()

        async def work():
            began.set()
            await finish.wait()
            log.append("saved")

        running = asyncio.create_task(run_until_stopped(ctx, work(), grace_s=BOUND_S))
        await began.wait()
        ctx.ask()
        await asyncio.sleep(0)
        finish.set()
        assert await running and log == ["saved"]

    run(body())


def test_work_is_cancelled_after_its_grace():
    async def body():
        for grace in (0.0, 0.01):
            ctx: Any = Context()
            began = asyncio.Event()

            async def work(began=began):
                began.set()
                await asyncio.Event().wait()

            running = asyncio.create_task(run_until_stopped(ctx, work(), grace_s=grace))
            await began.wait()
            ctx.ask()
            assert not await running

    run(body())


def test_grace_begins_again_with_progress():
    async def body():
        ctx: Any = Context()
        began, seen = asyncio.Event(), list[int]()
        numbers = iter([1, 2, 3, 3])

        async def work():
            began.set()
            await asyncio.Event().wait()

        def progress():
            seen.append(next(numbers))
            return seen[-1]

        running = asyncio.create_task(run_until_stopped(ctx, work(), 0.01, progress, 0.01))
        await began.wait()
        ctx.ask()
        assert not await running and seen == [1, 2, 3, 3]

    run(body())


def test_an_error_within_the_grace_comes_out():
    async def body():
        ctx: Any = Context()
        began, fail = asyncio.Event(), asyncio.Event()

        async def work():
            began.set()
            await fail.wait()
            raise ValueError("disk full")

        running = asyncio.create_task(run_until_stopped(ctx, work(), grace_s=BOUND_S))
        await began.wait()
        ctx.ask()
        fail.set()
        with pytest.raises(ValueError, match="disk full"):
            await running

    run(body())


# ---- Disk work of the master: in a thread, and with a time limit


def test_result_and_error_are_passed_on():
    async def body():
        assert await on_disk("reading", 60.0, lambda: threading.current_thread().name) == "reading"
        for error in (OSError(28, "No space left on device"), TimeoutError("of its own")):

            def fail(error=error):
                raise error

            with pytest.raises(type(error)) as caught:
                await on_disk("writing", 60.0, fail)
            assert caught.value is error

    asyncio.run(body())


def test_hanging_disk_blocks_no_loop():
    """The loop's own threads are waited for when it ends: this would never return."""
    released = threading.Event()
    try:
        with pytest.raises(WaitTimeout, match=r"publishing v3: not done within 0\.01 s; the disk hangs"):
            asyncio.run(on_disk("publishing v3", 0.01, released.wait))
    finally:
        released.set()


def test_late_result_does_not_disturb_the_loop():
    async def body():
        released, ended = threading.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def work():
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


def test_call_on_a_loop_that_ends_before_it_begins_is_an_error():
    loop = asyncio.new_event_loop()  # it never runs

    async def work():
        pytest.fail("no loop runs")

    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(from_thread, loop, work)
        assert not wait([call], 0.05).done
        loop.close()
        with pytest.raises(RuntimeError, match="loop has ended|loop is closed"):
            call.result(BOUND_S)
