"""A pool of verifier processes for one test, and the calls to it."""

import asyncio

import pytest

from realsys.errors import NoVerifierError, RewardError
from realsys.reward.pool import ItemLimits, VerifierPool
from realsys.reward.verifiers.contract import Item

BEHAVE = "tests.support.serving.reward_verifiers:behave"


def with_pool(body, processes=1, timeout_s=5.0, cpu_s=None):
    """Run ``body(pool)`` on a pool that is closed afterwards; 60 s bound all of it."""

    async def run():
        pool = VerifierPool(processes, ItemLimits(cpu_s or timeout_s, timeout_s))
        try:
            async with asyncio.timeout(60):
                return await body(pool)
        finally:
            await pool.close()

    return asyncio.run(run())


async def correct(pool, completion, answer="a"):
    return (await pool.verify(BEHAVE, Item("", completion, answer))).correct


async def outcomes(pool, items):
    """Return verdicts and errors of items that are given in one turn of the event loop."""
    calls = (pool.verify(BEHAVE, item) for item in items)
    return await asyncio.gather(*calls, return_exceptions=True)


async def error_of(pool, completion, answer=""):
    with pytest.raises((RewardError, NoVerifierError)) as caught:
        await pool.verify(BEHAVE, Item("", completion, answer))
    assert "\n" not in str(caught.value)
    return str(caught.value)


async def until(condition):
    """Let other coroutines run until the condition holds; with_pool bounds the time."""
    while True:
        if condition():
            return
        await asyncio.sleep(0)


def trips(pool):
    return sum(child._batches - len(child.loaded) for child in pool._running)
