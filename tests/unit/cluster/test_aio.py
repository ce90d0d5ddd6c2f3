"""Work that is given up, or given time, when a worker is asked to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from realsys.cluster.aio import run_until_stopped, unless

BOUND_S = 60.0


def run(body: Any) -> Any:
    return asyncio.run(asyncio.wait_for(body, BOUND_S))


class Context:
    """The part of WorkerContext that is used: asked to stop when the test says so."""

    def __init__(self) -> None:
        self.ask: Callable[[], None] = lambda: None

    def on_stop(self, callback: Callable[[], None]) -> None:
        self.ask = callback


def test_unless_gives_the_result_or_nothing_and_cancels() -> None:
    async def body() -> None:
        stop, began, ended = asyncio.Event(), asyncio.Event(), list[str]()

        async def work() -> int:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("cancelled")
            return 0

        async def quick() -> int:
            return 7

        async def broken() -> int:
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


def test_work_that_stops_by_itself_has_its_grace() -> None:
    async def body() -> None:
        ctx: Any = Context()
        began, finish, log = asyncio.Event(), asyncio.Event(), list[str]()

        async def work() -> None:
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


def test_work_is_cancelled_after_its_grace() -> None:
    async def body() -> None:
        for grace in (0.0, 0.01):
            ctx: Any = Context()
            began = asyncio.Event()

            async def work(began: asyncio.Event = began) -> None:
                began.set()
                await asyncio.Event().wait()

            running = asyncio.create_task(run_until_stopped(ctx, work(), grace_s=grace))
            await began.wait()
            ctx.ask()
            assert not await running

    run(body())


def test_grace_begins_again_with_progress() -> None:
    async def body() -> None:
        ctx: Any = Context()
        began, seen = asyncio.Event(), list[int]()
        numbers = iter([1, 2, 3, 3])

        async def work() -> None:
            began.set()
            await asyncio.Event().wait()

        def progress() -> int:
            seen.append(next(numbers))
            return seen[-1]

        running = asyncio.create_task(run_until_stopped(ctx, work(), 0.01, progress, 0.01))
        await began.wait()
        ctx.ask()
        assert not await running and seen == [1, 2, 3, 3]

    run(body())


def test_an_error_within_the_grace_comes_out() -> None:
    async def body() -> None:
        ctx: Any = Context()
        began, fail = asyncio.Event(), asyncio.Event()

        async def work() -> None:
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
