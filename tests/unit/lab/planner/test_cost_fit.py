"""Fit and prediction: a run with known costs is explained, and other settings are predicted within the interval."""

from __future__ import annotations

from dataclasses import replace

import pytest

from realsys.config.compose import with_overrides
from realsys.errors import ConfigError
from realsys.lab.planner.cost_fit import fit, recorded_outcome
from realsys.lab.planner.parameters import Fit
from realsys.lab.planner.predictions import predict
from realsys.lab.planner.recorded_run import Decoding, ServerTimes
from realsys.lab.planner.steady_state import Costs, simulate
from tests.support.planner.recordings import COSTS, SHARED, recording_of, steps_per_h

SYNCHRONOUS = ("asynchronous.max_staleness=0", "asynchronous.interruptible=false")


@pytest.fixture(scope="module", params=[COSTS, SHARED], ids=["devices", "shared cores"])
def fitted(request: pytest.FixtureRequest) -> tuple[Costs, Fit]:
    costs: Costs = request.param
    return costs, fit(recording_of(costs), costs.cores)


def test_fit_explains_the_recorded_run(fitted: tuple[Costs, Fit]) -> None:
    _, found = fitted
    recorded = recorded_outcome(found.recording)
    for numbers in (found.mid, *found.members):
        outcome = simulate(found.costs(numbers), found.recording.config, found.lengths)
        assert outcome.steps_per_h == pytest.approx(recorded.steps_per_h, rel=0.06)


def test_costs_that_spans_tell_stay() -> None:
    """The trainer never waits, so its throughput tells nothing about the servers, and the groups' seconds little."""
    running = [4.0 + k % 25 for k in range(200)]
    seconds = [20 * (COSTS.token + COSTS.token_per_running * count) for count in running]
    decoding = [
        Decoding(k, k + each, 20, count, 0.0) for k, (each, count) in enumerate(zip(seconds, running, strict=True))
    ]
    recording = recording_of(COSTS)
    late = [replace(group, granted=group.granted - 5.0) for group in recording.groups]  # they waited for their turn
    found = fit(replace(recording, groups=late, servers=ServerTimes(decoding)), 0.0)
    assert found.mid.token_s == found.estimates.token_s.value and found.mid.group_s == found.estimates.group_s.value
    truth = COSTS.token + COSTS.token_per_running * found.completions
    assert found.mid.token_s == pytest.approx(truth, rel=0.05) and found.misfit < 0.02


@pytest.mark.parametrize(
    "overrides",
    [(), SYNCHRONOUS, ("train.batch_groups=16",), ("allocation=serve.d2+d1",), ("allocation=serve.d1+d2",)],
    ids=["the same", "synchronous", "batch", "servers", "ranks"],
)
def test_truth_is_inside_the_interval(fitted: tuple[Costs, Fit], overrides: tuple[str, ...]) -> None:
    costs, found = fitted
    config = with_overrides(found.recording.config, overrides)
    truth = steps_per_h(costs, config)
    predicted = predict(found, config).steps_per_h
    assert predicted.holds(truth), (predicted, truth)
    assert predicted.mid == pytest.approx(truth, rel=0.15)


def test_longer_completions_take_longer(fitted: tuple[Costs, Fit]) -> None:
    _, found = fitted
    config = with_overrides(found.recording.config, ["generation.sampling.max_new_tokens=256"])
    short, long = predict(found, config), predict(found, config, scale=2.0)
    assert 0.3 < long.steps_per_h.mid / short.steps_per_h.mid < 0.8


def test_other_sizes_of_servers_are_refused(fitted: tuple[Costs, Fit]) -> None:
    _, found = fitted
    config = with_overrides(found.recording.config, ["allocation=serve.d1m2+d1"])
    with pytest.raises(ConfigError, match="record a run with these"):
        predict(found, config)
