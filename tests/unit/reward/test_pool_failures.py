"""Completions without a verdict or over a limit: each is counted by its cause, and costs no other completion."""

import asyncio

import pytest

from realsys.errors import NoVerifierError, RewardError
from realsys.reward import pool
from realsys.reward.verifier_protocol import CAUSES
from realsys.reward.verifiers.contract import Item, Verdict
from tests.support.serving.reward_pools import correct, outcomes, with_pool

pytestmark = pytest.mark.processes

CHECKED = "tests.support.serving.reward_verifiers:checked"


@pytest.mark.parametrize(
    ("bad", "cause"),
    [
        ("raise", "raised"),
        ("none", "no_verdict"),
        ("nan", "no_verdict"),
        ("memory", "resources"),
        ("open sockets", "resources"),
        ("hang", "elapsed"),
        ("spin", "cpu_time"),
        ("crash", "died"),
        ("exit", "died"),
    ],
)
def test_failure_is_counted_by_cause(bad, cause):
    async def body(pool):
        await correct(pool, "a")
        first, failed, last = await outcomes(pool, [Item("", does, "a") for does in ("a", bad, "b")])
        assert (first, last) == (Verdict(correct=True), Verdict(correct=False))
        assert isinstance(failed, RewardError) and failed.cause == cause in CAUSES
        assert pool.take_failures() == {cause: 1} and pool.take_failures() == {}

    with_pool(body, timeout_s=1.0 if bad == "hang" else 50.0, cpu_s=30.0 if bad == "hang" else 1.0)


def test_limit_that_nothing_keeps_is_an_error(monkeypatch):
    """Else a limit that is too low would make every completion wrong."""
    monkeypatch.setattr(pool, "HOPELESS", 2)

    async def body(pool):
        await pool.verify(CHECKED, Item("", "a", "a"))
        calls = (pool.verify(CHECKED, Item("", "spin", "a")) for _ in range(2))
        first, second = await asyncio.gather(*calls, return_exceptions=True)
        assert first == Verdict(correct=False) and isinstance(second, NoVerifierError)
        assert "2 completions in a row had no verdict" in str(second)

    with_pool(body, timeout_s=30.0, cpu_s=0.3)


def test_hung_completion_is_never_wrong():
    """Time on the clock depends on the machine, so it says nothing about the completion."""

    async def body(pool):
        await pool.verify(CHECKED, Item("", "a", "a"))
        with pytest.raises(RewardError, match="no result within 1.1 s"):
            await pool.verify(CHECKED, Item("", "hang", ""))
        assert pool.take_failures() == {"elapsed": 1}

    with_pool(body, timeout_s=1.0, cpu_s=30.0)


def test_endless_expression_is_wrong_for_math():
    async def body(pool):
        await pool.verify("math", Item("", "5", "5"))
        items = [Item("", text, "5") for text in ("5", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{5}")]
        verdicts = await asyncio.gather(*(pool.verify("math", item) for item in items))
        assert [verdict.correct for verdict in verdicts] == [True, False, True]
        assert (pool.take_failures(), pool.undecided) == ({"cpu_time": 1}, 0)

    with_pool(body, timeout_s=55.0, cpu_s=1.0)
