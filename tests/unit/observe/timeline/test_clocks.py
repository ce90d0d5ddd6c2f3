"""Tests of ``realsys.observe.timeline.clocked_spans``: exchanges between hosts put their clocks together."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realsys.observe.timeline.clocked_spans import TimelineSpan, offsets_of, read_timeline
from tests.support.timelines.made_up import START, small_trial


def _call(begin: float, end: float, number: int = 0) -> TimelineSpan:
    return TimelineSpan("rollout_worker/0", "generate", begin, end, f"000000000{number}.0/0", {"call": 0})


def _served(begin: float, end: float, number: int = 0) -> TimelineSpan:
    return TimelineSpan("generation_server/0", "decode", begin, end, f"000000000{number}.0.0.0.0#0", {})


def test_clocks_that_obey_all_exchanges_stay() -> None:
    offsets = offsets_of({"a": [_call(1.0, 9.0)], "b": [_served(1.2, 8.8)]})
    assert offsets["b"].seconds == 0.0
    assert offsets["b"].error == pytest.approx(0.2)


@settings(deadline=None)
@given(skew=st.floats(-100, 100), delays=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=9))
def test_skewed_clock_is_moved_within_its_error(skew: float, delays: list[tuple[float, float]]) -> None:
    """The correction brings back the true times but for its own bound on the error."""
    calls = [_call(10.0 * k, 10.0 * k + 5, k) for k in range(len(delays))]
    served = [
        _served(10.0 * k + before + skew, 10.0 * k + 5 - after + skew, k) for k, (before, after) in enumerate(delays)
    ]
    offset = offsets_of({"a": calls, "b": served})["b"]
    assert offset.error is not None
    assert abs(offset.seconds + skew) <= offset.error + 1e-6
    assert offset.error <= 2.0 + 1e-6


def test_host_without_exchange_has_no_bound() -> None:
    offsets = offsets_of({"a": [_call(1.0, 9.0)], "b": [_served(1.2, 8.8, 5)]})
    assert offsets["b"].error is None


def test_chain_of_hosts_is_corrected() -> None:
    """Host c exchanges with b only, and b with the manager's host a."""
    update = {"server": "generation_server/0"}
    spans = {
        "a": [TimelineSpan("gserver_manager/0", "update", 0.0, 2.0, "version/1", update)],
        "b": [TimelineSpan("generation_server/0", "stage", 50.1, 51.9, "version/1", {}), _served(51.0, 53.0)],
        "c": [_call(-49.1, -46.9)],
    }
    offsets = offsets_of(spans)
    assert offsets["b"].seconds == pytest.approx(-50.0, abs=0.11)
    assert offsets["c"].seconds == pytest.approx(50.0, abs=0.31)


@pytest.mark.parametrize("wrong", [0.0, 0.7, -30.0])
def test_timeline_of_two_hosts_is_one(tmp_path: Path, wrong: float) -> None:
    """The trainer's host has the reference clock; the other one is wrong by up to half a minute."""
    timeline = read_timeline(small_trial(tmp_path, {"b": wrong}).paths.spans)
    (push,) = timeline.named("push")
    (receive,) = timeline.named("receive")
    assert push.begin <= receive.begin <= push.end
    assert push.end == pytest.approx(START + 10.1, abs=0.6)


def test_repeated_steps_move_no_clock() -> None:
    """Steps 1 and 2 were trained again 100 s later, under the same names."""
    times = [(1, 0.0), (2, 10.0), (1, 100.0), (2, 110.0), (3, 120.0)]
    calls = [TimelineSpan("master_worker/0", "call", t, t + 5, f"step/{k}", {"call": "actor_train"}) for k, t in times]
    served = [
        TimelineSpan("model_worker/0", "call", t + 1, t + 4, f"step/{k}", {"call": "actor_train"}) for k, t in times
    ]
    offset = offsets_of({"a": calls, "b": served})["b"]
    assert offset.seconds == 0.0
    assert offset.error == pytest.approx(1.0)
