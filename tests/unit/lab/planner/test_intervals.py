"""Intervals of predictions: everything that is not known makes them wider. Simulations that the fit compares with."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from realsys.lab.planner import predictions
from realsys.lab.planner.cost_fit import fit, lengths_of, recorded_outcome
from realsys.lab.planner.parameters import Cost, Fit
from realsys.lab.planner.predictions import Interval, predict
from realsys.lab.planner.recorded_run import GroupTime
from realsys.lab.planner.steady_state import SHORT, STEPS, measured_steps, simulate
from tests.support.planner.recordings import COSTS, LENGTHS, config_of, recording_of, simulated


@pytest.fixture(scope="module")
def fitted() -> Fit:
    return fit(recording_of(COSTS), 0.0)


def width(interval: Interval) -> float:
    return interval.high / interval.low


def test_misfit_makes_the_interval_wider(fitted: Fit) -> None:
    assert fitted.misfit < 0.05
    exact, wrong = (predict(replace(fitted, misfit=misfit), config_of()).steps_per_h for misfit in (0.0, 0.2))
    assert wrong.mid == exact.mid and width(wrong) > 1.5 * width(exact)


def test_uneven_steps_make_the_interval_wider(fitted: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some minutes were slower, because another program ran: the mean of another run may differ as much."""
    monkeypatch.setattr(predictions, "MODEL_ERROR", 0.0)  # it is the same for both
    recording = fitted.recording
    slower = [1.6 if k // 4 % 2 else 1.0 for k in range(len(recording.steps))]
    steps = [
        replace(step, training=factor * step.training, total=step.total + (factor - 1) * step.training)
        for step, factor in zip(recording.steps, slower, strict=True)
    ]
    uneven = fit(replace(recording, steps=steps), 0.0)
    assert width(predict(uneven, config_of()).steps_per_h) > 1.1 * width(predict(fitted, config_of()).steps_per_h)


def test_redrawn_runs_scatter_around_the_recorded_one() -> None:
    recording, random = recording_of(COSTS), Random(1)
    recorded = recorded_outcome(recording)
    drawn = [recorded_outcome(recording, random) for _ in range(40)]
    for name in ("steps_per_h", "tokens_per_s", "waits", "step_s", "group_s"):
        values = [getattr(outcome, name) for outcome in drawn]
        assert np.mean(values) == pytest.approx(getattr(recorded, name), rel=0.1)
        assert np.std(values) > 0.0


def test_drawn_seconds_are_never_zero() -> None:
    random = Random(1)
    drawn = [Cost(1e-3, 2e-3).draw_positive(random) for _ in range(1000)]
    assert min(drawn) > 0.0
    assert np.median(drawn) == pytest.approx(1e-3, rel=0.1)


def test_groups_that_wait_for_tools_can_be_fitted() -> None:
    """Their time does not depend on the lengths, so the fitted time of a token is 0."""
    costs = replace(COSTS, token=1e-9, token_per_running=0.0, group=0.5)
    found = fit(recording_of(costs), 0.0)
    recorded = recorded_outcome(found.recording)
    assert predict(found, config_of()).steps_per_h.mid == pytest.approx(recorded.steps_per_h, rel=0.1)


def test_groups_of_the_first_steps_are_not_measured() -> None:
    """At first 40 groups start together. Later 8 start at a time, because the servers wait for the trainer."""
    config = config_of(["asynchronous.max_staleness=4", "rollout.max_concurrent=40"])
    costs = replace(COSTS, step=1.5)
    seconds = simulated(costs, config, 60).account.waits["group"]
    assert float(np.mean(seconds[:40])) > 2 * float(np.mean(seconds[40:]))
    assert simulate(costs, config, LENGTHS).group_s == pytest.approx(float(np.mean(seconds[40:])), rel=0.05)


def test_steps_of_hours_are_no_failure() -> None:
    outcome = simulate(replace(COSTS, step=20_000.0), config_of(), LENGTHS, most=6)
    assert outcome.steps_per_h == pytest.approx(3600 / 20_000, rel=0.01)


@pytest.mark.parametrize(("groups", "expected"), [(32, STEPS), (512, 8), (20_000, 6)])
def test_large_batches_need_few_steps(groups: int, expected: int) -> None:
    config = config_of([f"train.batch_groups={groups}"])
    assert measured_steps(config, STEPS) == expected
    assert measured_steps(config, SHORT) == min(SHORT, expected)


@pytest.mark.parametrize("share", [0.0, 0.8])
def test_lengths_at_the_limit_tell_nothing_of_the_prompt(share: float) -> None:
    """Nine tenths of the completions are cut at the limit, in groups with and without a common part."""
    random = np.random.default_rng(1)
    scores = np.sqrt(share) * random.normal(size=(400, 1)) + np.sqrt(1 - share) * random.normal(size=(400, 4))
    lengths = np.clip(np.exp(scores + 1.28) * 100, 1, 100).astype(int)
    recording = recording_of(COSTS)
    groups = [GroupTime(str(k), 0, 1.0, 2.0, tuple(map(int, row))) for k, row in enumerate(lengths)]
    found = lengths_of(replace(recording, groups=groups)).prompt_share
    assert found == pytest.approx(0.0, abs=0.1) if share == 0.0 else found > 0.3


def test_other_ranks_are_less_certain_than_the_same(fitted: Fit) -> None:
    """How a trainer scales is not recorded. Here it is the bottleneck, so its ranks decide the throughput."""
    slow = [replace(numbers, step_s=20 * numbers.step_s) for numbers in (fitted.mid, *fitted.members)]
    trainer_bound = replace(fitted, mid=slow[0], members=tuple(slow[1:]))
    one, four = (predict(trainer_bound, config_of([f"allocation=serve.d1+d{ranks}"])) for ranks in (1, 4))
    assert width(four.steps_per_h) > 1.5 * width(one.steps_per_h)
    linear = 4 * one.steps_per_h.mid
    assert one.steps_per_h.high < four.steps_per_h.mid < linear < four.steps_per_h.high
