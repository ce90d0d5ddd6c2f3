"""The pool: real processes, whatever a verifier does."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest
import uvloop

from realsys.config.schema_rollout import RewardConfig
from realsys.errors import NoVerifierError, RewardError
from realsys.reward import pool
from realsys.reward.pool import ItemLimits, VerifierPool
from realsys.reward.verifier_protocol import MAX_ITEMS
from realsys.reward.verifiers.contract import Item, Verdict
from tests.support.serving.reward_pools import BEHAVE, correct, error_of, outcomes, trips, until, with_pool

pytestmark = pytest.mark.processes


def test_items_of_one_turn_share_a_trip():
    async def body(pool):
        await correct(pool, "a")
        before = trips(pool)
        await outcomes(pool, [Item("", "a", "a")] * MAX_ITEMS)
        assert trips(pool) == before + 1
        await outcomes(pool, [Item("", "a", "a")] * (MAX_ITEMS + 1))
        assert trips(pool) == before + 3

    with_pool(body)


def test_verifier_without_any_verdict_is_to_blame(monkeypatch):
    """Otherwise groups would be trained with their cut-off completions only, and nothing would say so."""
    monkeypatch.setattr(pool, "HOPELESS", 4)

    async def body(pool):
        failing = [Item("", "raise", "")] * 3
        kinds = {type(error) for error in await outcomes(pool, failing)}
        assert kinds == {RewardError}
        assert await correct(pool, "a")
        first = [type(error) for error in await outcomes(pool, [*failing, *failing])]
        assert first == [RewardError] * 3 + [NoVerifierError] * 3
        assert "7 completions in a row had no verdict" in await error_of(pool, "raise")
        assert await correct(pool, "a")
        assert "in a row" not in await error_of(pool, "raise")

    with_pool(body)


def test_items_are_shared_between_processes():
    """One process must not take all of them: each is slow, and the others would have nothing to do."""

    async def body(pool):
        pids = await outcomes(pool, [Item("", "process", "")] * 8)
        assert len({verdict.reward for verdict in pids}) == 2

    with_pool(body, processes=2)


def test_verifiers_take_turns_in_the_queue():
    async def body(pool):
        order = []

        async def ask(name, completion, answer):
            await pool.verify(name, Item("", completion, answer))
            order.append(name)

        await asyncio.gather(*(ask(BEHAVE, "a", "a") for _ in range(2 * MAX_ITEMS)), ask("exact", "#1", "1"))
        assert order.index("exact") == MAX_ITEMS

    with_pool(body)


def test_item_is_judged_again_before_giving_up(tmp_path):
    """A process that the machine killed says nothing about the completion that it was judging."""

    async def body(pool):
        await correct(pool, "a")
        verdicts = await outcomes(pool, [Item("", "crash once", str(tmp_path / "mark")), Item("", "a", "a")])
        assert verdicts == [Verdict(correct=True)] * 2
        assert (pool.restarts, pool.undecided) == (1, 0)

    with_pool(body)


def test_second_judgement_waits_behind_all_others():
    """A verifier that hangs on one completion must not delay the others twice."""

    async def body(pool):
        await correct(pool, "a")
        order = []

        async def ask(completion):
            await asyncio.gather(pool.verify(BEHAVE, Item("", completion, "")), return_exceptions=True)
            order.append(completion)

        await asyncio.gather(ask("raise"), *(ask(str(k)) for k in range(2 * MAX_ITEMS)))
        assert order[-1] == "raise"

    with_pool(body)


@pytest.mark.parametrize(
    ("used", "left", "reached"),
    [((0.0, 0.0), 2.0, ""), ((1.5, 3.0), 0.5, ""), ((2.0, 3.0), 0.0, "2 s of CPU time"), ((0.1, 6.0), 0.0, "6 s")],
)
def test_limits_of_one_item(used, left, reached):
    limits = ItemLimits.of(RewardConfig(timeout_s=2.0, elapsed_timeout_s=6.0))
    assert limits.left_s(*used) == pytest.approx(left)
    if reached:
        assert limits.reached(used[0]) == reached


def test_process_that_cannot_start_is_an_error(monkeypatch):
    async def body(pool):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", "/no/python")
            assert "cannot be started" in await error_of(pool, "a")
        assert await correct(pool, "a") is True

    with_pool(body)


def test_limit_is_per_item_not_per_trip():
    async def body(pool):
        verdicts = await outcomes(pool, [Item("", "wait", "0.5")] * 5)  # 2.5 s in all, the limit is 2 s
        assert [verdict.correct for verdict in verdicts] == [False] * 5

    with_pool(body, timeout_s=2.0)


def test_verdicts_arrive_while_later_items_run():
    async def body(pool):
        first = asyncio.create_task(correct(pool, "a"))
        second = asyncio.create_task(pool.verify(BEHAVE, Item("", "wait", "1")))
        third = asyncio.create_task(error_of(pool, "hang"))
        assert await first is True and (await second).correct is False
        assert not third.done()
        await pool.close()
        assert "died" in await third

    with_pool(body, timeout_s=5.0)


def test_cancelled_call_leaves_nothing_to_the_next():
    async def body(pool):
        assert await correct(pool, "a") is True
        judged = asyncio.create_task(correct(pool, "wait", "0.5"))
        await until(lambda: trips(pool) == 2)
        waits = asyncio.create_task(correct(pool, "hang"))
        await asyncio.sleep(0)
        assert pool.waiting == 1
        for call in (judged, waits):
            call.cancel()
        await asyncio.gather(judged, waits, return_exceptions=True)
        assert pool.waiting == 0
        assert await correct(pool, "b") is False
        assert pool.restarts == 0  # no process was given the one that hangs

    with_pool(body)


def test_close_ends_processes_and_waiting_calls():
    async def body(pool):
        await correct(pool, "a")
        (child,) = pool._running
        running = asyncio.create_task(error_of(pool, "hang"))
        behind = asyncio.create_task(error_of(pool, "a"))  # it is in the same trip
        await until(lambda: trips(pool) == 2)
        waiting = asyncio.create_task(error_of(pool, "a"))
        await asyncio.sleep(0)
        await pool.close()
        assert "died" in await running
        assert await behind == await waiting == await error_of(pool, "a") == "the verifier pool is closed"
        assert child.process.returncode == -signal.SIGKILL and pool.restarts == 0

    with_pool(body)


def test_wait_for_a_dying_process_blocks_nothing():
    """A process that closes its socket and lives on is waited for, while other coroutines run."""

    async def body(pool):
        await correct(pool, "a")
        (child,) = pool._running
        waiting = asyncio.create_task(child.process.exits_within(60.0))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done() and await child.process.exits_within(0.01) is False
        os.kill(child.process.pid, signal.SIGKILL)
        assert await waiting is True

    with_pool(body)


def test_pool_works_on_uvloop():
    async def run():
        pool = VerifierPool(1, ItemLimits(5.0, 5.0))
        try:
            async with asyncio.timeout(60):
                assert "exited with code 7" in await error_of(pool, "crash")
                assert await correct(pool, "a") is True
        finally:
            await pool.close()

    uvloop.run(run())


def test_nothing_heavy_is_imported():
    code = (
        "import sys, realsys.reward.pool, realsys.reward.verifier_main, realsys.data.check, "
        "realsys.rollout.worker_loop, realsys.rollout.resumable_engine, "
        "realsys.manager.client, realsys.data.arith\n"
        "print([name for name in ('torch', 'transformers', 'sympy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
