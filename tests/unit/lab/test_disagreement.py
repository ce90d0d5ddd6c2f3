"""Counts of `realsys regrade`: what a disagreement is, its directions, and the interval of the rate."""

from __future__ import annotations

import pytest

from realsys.data.prompts import Prompt
from realsys.errors import RewardError
from realsys.lab.regrade import Disagreement, LeftOut, RecordedCompletion
from realsys.observe.evaluation_records import wilson
from realsys.rollout.environments import Judgement, Response, Task
from realsys.types import Ticket


def recorded(reward, correct, prompt=0):
    task = Task(Prompt("1+1=", "2", [1]), Ticket("7", 0, prompt))
    return RecordedCompletion(3, "7.0/0.0", task, Response("2", "stop", 1), reward, correct)


@pytest.mark.parametrize(
    ("before", "now", "flip"),
    [
        ((5.0, True), (-5.0, False), "right -> wrong"),
        ((-5.0, False), (5.0, True), "wrong -> right"),
        ((5.0, True), (1.0, True), ""),
        ((0.5, None), (0.75, None), "higher reward"),
        ((0.5, True), (0.25, None), "lower reward"),
        ((0.5, None), (0.5 + 1e-9, True), ""),
    ],
)
def test_correctness_decides_where_both_have_it(before, now, flip):
    counts = Disagreement()
    counts.add(recorded(*before), Judgement(*now))
    assert dict(counts.flips) == ({flip: 1} if flip else {})
    assert counts.different == bool(flip)


def test_results_have_means_rate_and_causes():
    counts = Disagreement(keep=1)
    for prompt in range(2):
        counts.add(recorded(5.0, True, prompt), Judgement(-5.0, False))
    for prompt in range(2, 8):
        counts.add(recorded(5.0, True, prompt), Judgement(5.0, True))
    counts.fail(RewardError("verifier x: ValueError: first", "raised"))
    counts.fail(RewardError("verifier x: ValueError: second", "raised"))
    counts.leave_out(LeftOut("8.0/0.0", "it has no completion"))
    results = counts.results()
    assert (results["samples"], results["judged"], results["disagreements"], results["rate"]) == (10, 8, 2, 0.25)
    assert results["rate_interval_95"] == [pytest.approx(0.0715, abs=1e-3), pytest.approx(0.5907, abs=1e-3)]
    assert results["reward_mean"] == {"recorded": 5.0, "now": 2.5}
    assert results["accuracy"] == {"recorded": 1.0, "now": 0.75}
    assert (results["errors"], results["left_out"]) == ({"raised": 2}, {"it has no completion": 1})
    assert counts.first_errors["raised"].endswith("first") and len(counts.shown) == 1


def test_nothing_judged_has_no_rate():
    results = Disagreement().results()
    assert results["rate"] is results["rate_interval_95"] is results["reward_mean"] is results["accuracy"] is None


def test_interval_has_the_prompts_as_clusters():
    """Eight samples of two prompts, of which one always disagrees, say as much as two samples."""
    alone, clustered = Disagreement(), Disagreement()
    for number in range(8):
        now = Judgement(-5.0, False) if number < 4 else Judgement(5.0, True)
        alone.add(recorded(5.0, True, prompt=number), now)
        clustered.add(recorded(5.0, True, prompt=number // 4), now)
    assert alone.results()["rate"] == clustered.results()["rate"] == 0.5
    assert alone.results()["rate_interval_95"] == pytest.approx(wilson(0.5, 8))
    assert clustered.results()["rate_interval_95"] == pytest.approx(wilson(0.5, 2))
