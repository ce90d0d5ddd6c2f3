"""The interface of all verifiers of a RolloutWorker: a VerifierPool, and reward services behind HTTP."""

import asyncio

import pytest

from realsys.errors import NoVerifierError, RewardError
from realsys.reward.pool import ItemLimits
from realsys.reward.verifier_protocol import CAUSES
from realsys.reward.verifiers.contract import Item, Verdict
from tests.support.rewards.reward_services import run
from tests.support.serving.reward_pools import BEHAVE, correct, error_of, outcomes, until

CHECKED = "tests.support.serving.reward_verifiers:checked"

pytestmark = pytest.mark.parametrize("kind", ["pool", "service"])


def test_each_item_gets_its_own_verdict(kind):
    async def body(verifiers):
        verdicts = await outcomes(verifiers, [Item("", completion, "7") for completion in ("7", "8", "7", "")])
        assert [verdict.correct for verdict in verdicts] == [True, False, True, False]
        assert await verifiers.verify("exact", Item("a1b2=", "#3", "3")) == Verdict(correct=True, answer="3")
        verdict = await verifiers.verify(BEHAVE, Item("", "metrics", ""))
        assert verdict == Verdict(0.25, None, {"length": 3, "right": 1})
        assert (verifiers.undecided, verifiers.waiting) == (0, 0)

    run(kind, body)


def test_keys_of_the_row_arrive_unchanged(kind):
    extra = {"big": 2**70, "list": [1, 1.0, None, {"a": "\u00e9\x00"}]}

    async def body(verifiers):
        verdict = await verifiers.verify(BEHAVE, Item("", "extra", "", extra))
        assert list(verdict.metrics) == [repr(extra)[:100]]
        with pytest.raises(RewardError, match="cannot be written as JSON"):
            await verifiers.verify(BEHAVE, Item("", "\ud800", ""))

    run(kind, body)


def test_item_is_judged_again_before_giving_up(kind, tmp_path):
    """A process that the machine killed says nothing about the completion that it was judging."""

    async def body(verifiers):
        await correct(verifiers, "a")
        verdicts = await outcomes(verifiers, [Item("", "crash once", str(tmp_path / "mark")), Item("", "a", "a")])
        assert verdicts == [Verdict(correct=True)] * 2
        assert (verifiers.undecided, verifiers.take_failures()) == (0, {})

    run(kind, body)


def test_undecidable_item_fails_alone(kind, tmp_path):
    noted = tmp_path / "noted"

    async def body(verifiers):
        items = [Item(str(k), "note", str(noted)) for k in range(16)]
        items[4] = items[11] = Item("", "crash", "")
        results = await outcomes(verifiers, items)
        for k, result in enumerate(results):
            if k in (4, 11):
                assert isinstance(result, RewardError) and "exited with code 7" in str(result)
            else:
                assert result == Verdict(correct=True)
        assert (verifiers.undecided, verifiers.take_failures()) == (2, {"died": 2})

    run(kind, body)
    assert sorted(noted.read_text().split(), key=int) == [str(k) for k in range(16) if k not in (4, 11)]


@pytest.mark.parametrize(
    ("bad", "cause"),
    [
        *(("raise", "raised"), ("nan", "no_verdict"), ("open sockets", "resources"), ("memory", "resources")),
        *(("hang", "elapsed"), ("spin", "cpu_time"), ("exit", "died")),
    ],
)
def test_failure_is_counted_by_cause(kind, bad, cause):
    async def body(verifiers):
        await correct(verifiers, "a")
        first, failed, last = await outcomes(verifiers, [Item("", does, "a") for does in ("a", bad, "b")])
        assert (first, last) == (Verdict(correct=True), Verdict(correct=False))
        assert isinstance(failed, RewardError) and failed.cause == cause in CAUSES
        assert verifiers.take_failures() == {cause: 1} and verifiers.take_failures() == {}
        assert verifiers.undecided == 1

    run(kind, body, ItemLimits(1.0 if bad == "spin" else 30.0, 1.0 if bad == "hang" else 50.0))


def test_completion_over_limit_is_wrong_if_declared(kind):
    """It is judged once: its CPU time does not depend on the load of the machine."""

    async def body(verifiers):
        await verifiers.verify(CHECKED, Item("", "a", "a"))
        items = [Item("", does, "a") for does in ("a", "spin", "b", "a")]
        verdicts = await asyncio.gather(*(verifiers.verify(CHECKED, item) for item in items))
        assert [verdict.correct for verdict in verdicts] == [True, False, False, True]
        assert (verifiers.take_failures(), verifiers.undecided) == ({"cpu_time": 1}, 0)

    run(kind, body, ItemLimits(0.5, 30.0))


def test_verifier_that_cannot_be_loaded_is_an_error(kind):
    async def body(verifiers):
        with pytest.raises(NoVerifierError, match="cannot be loaded: ConfigError: .*no module named 'nowhere'"):
            await verifiers.verify("nowhere:verify", Item("", "a", "a"))
        assert (await verifiers.verify("exact", Item("", "#1", "1"))).correct is True

    run(kind, body)


def test_verifier_without_any_verdict_is_to_blame(kind, monkeypatch):
    """Otherwise groups would be trained with their cut-off completions only, and nothing would say so."""
    monkeypatch.setattr("realsys.reward.pool.HOPELESS", 4)

    async def body(verifiers):
        for _ in range(3):
            await outcomes(verifiers, [Item("", "raise", "")] * 4)
        assert "completions in a row had no verdict" in await error_of(verifiers, "raise")
        with pytest.raises(NoVerifierError):
            await verifiers.verify(BEHAVE, Item("", "raise", ""))

    run(kind, body)


def test_references_are_checked_in_a_process(kind):
    async def body(verifiers):
        checks = (verifiers.check_answer(CHECKED, Item("", "", answer)) for answer in ("good", "bad", "good"))
        assert await asyncio.gather(*checks) == [None, "it is bad", None]
        assert await verifiers.check_answer(BEHAVE, Item("", "", "anything")) is None
        assert "ArithmeticError" in (await verifiers.check_answer(CHECKED, Item("", "", "raise")) or "")
        assert verifiers.failures == {"raised": 1}, "a refused reference is no failure"

    run(kind, body)


def test_arguments_reach_the_verifier(kind):
    async def body(verifiers):
        assert await verifiers.verify(CHECKED, Item("", "a", "a")) == Verdict(None, True, {}, 0.5)

    run(kind, body, arguments={CHECKED: {"bonus": 0.5}})


def test_cancelled_call_leaves_nothing_to_the_next(kind):
    async def body(verifiers):
        assert await correct(verifiers, "a") is True
        calls = [asyncio.create_task(correct(verifiers, "hang")) for _ in range(3)]
        await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert verifiers.waiting == 0
        assert await correct(verifiers, "b") is False

    run(kind, body, ItemLimits(50.0, 50.0))


def test_close_ends_waiting_calls(kind):
    async def body(verifiers):
        await correct(verifiers, "a")
        calls = [asyncio.create_task(error_of(verifiers, "hang")) for _ in range(3)]
        await until(lambda: verifiers.waiting == 0 or kind == "pool")
        await verifiers.close()
        for call in calls:
            assert "closed" in await call or "died" in await call
        assert "closed" in await error_of(verifiers, "a")

    run(kind, body, ItemLimits(50.0, 50.0))
