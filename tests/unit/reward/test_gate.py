"""Gate: requests start in their order, and one that is cancelled holds up no other."""

from __future__ import annotations

import asyncio

from realsys.reward.llm_judge import RateLimits, RequestGate
from tests.support.serving.reward_pools import until


def test_requests_start_in_their_order():
    async def run():
        gate, order = RequestGate(RateLimits(concurrency=1)), []

        async def ask(name):
            started = await gate.enter(1)
            order.append(name)
            await asyncio.sleep(0)
            gate.leave(started, 1)

        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            waiting = [tasks.create_task(ask(name)) for name in range(5)]
            await until(lambda: gate.waiting == 4)
            waiting[1].cancel()
            waiting[3].cancel()
        assert order == [0, 2, 4] and gate.waiting == 0

    asyncio.run(run())


def test_full_window_holds_the_next():
    async def run():
        gate = RequestGate(RateLimits(concurrency=9, requests=2), clock=lambda: 5.0)
        async with asyncio.timeout(30):
            tasks = [asyncio.create_task(gate.enter(1)) for _ in range(3)]
            await until(lambda: tasks[1].done())
            assert gate.waiting == 1
            tasks[2].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert [task.cancelled() for task in tasks] == [False, False, True] and gate.waiting == 0

    asyncio.run(run())
