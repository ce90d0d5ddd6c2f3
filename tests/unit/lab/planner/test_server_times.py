"""Times of the servers from made-up spans, and the costs that are estimated from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from realsys.lab.planner.cost_estimates import estimate_server, load_of
from realsys.lab.planner.recorded_run import Decoding, Recompute, ServerTimes, server_times
from realsys.observe.timeline.clocked_spans import TimelineSpan
from tests.support.planner.recordings import COSTS, recording_of

WINDOW = (0.0, 100.0)


def span(name: str, begin: float, end: float, number: int = 1, **facts: Any) -> TimelineSpan:
    return TimelineSpan("generation_server/0", name, begin, end, f"{number:010}.0.0.0.0#0", facts)


def test_running_completions_are_counted_with_their_time() -> None:
    spans = [span("decode", 0, 10, 1, tokens=40), span("decode", 0, 5, 2, tokens=20)]
    assert server_times(spans, WINDOW).decoding == [Decoding(0, 10, 40, 1.5, 0.0), Decoding(0, 5, 20, 2.0, 0.0)]


def test_servers_do_not_count_for_each_other() -> None:
    other = span("decode", 0, 10, 2, tokens=9)._replace(process="generation_server/1")
    found = server_times([span("decode", 0, 10, 1, tokens=40), other], WINDOW)
    assert [each.running for each in found.decoding] == [1.0, 1.0]


def test_caches_after_a_pause_are_recomputed() -> None:
    """A prefill that begins later is a new completion's. A decode span knows how long it overlaps."""
    spans = [
        span("prefill", 1.0, 1.5, 3, positions=8),
        span("pause", 10.0, 10.5),
        span("prefill", 10.001, 11.5, 1, positions=60),
        span("prefill", 10.002, 12.5, 2, positions=100),
        span("decode", 11.5, 14.5, 1, tokens=30),
        span("prefill", 13.0, 13.2, 4, positions=8),
    ]
    found = server_times(spans, WINDOW)
    assert found.recomputes == [Recompute(10.5, 12.5, 160)]
    assert found.decoding == [Decoding(11.5, 14.5, 30, 1.0, 1.0)]


def test_attempt_is_served_until_its_last_token() -> None:
    spans = [span("queue", 1, 2, 7), span("prefill", 2, 3, 7), span("decode", 3, 9, 7, tokens=4)]
    cut_off = [span("decode", 90, 101, 8, tokens=4)]
    assert server_times([*spans, *cut_off], WINDOW).served == {("0000000007", 0): (1, 9)}


@pytest.mark.parametrize("fixed", [0.0, 0.5, 0.8])
def test_fixed_share_of_a_token_is_found(fixed: float) -> None:
    """A token takes 4 ms beside 19 others. The loads are 5 to 50, and caches are recomputed in between."""
    token, completions = 0.004, 20
    decoding, now = [], 0.0
    for k in range(200):
        running = 5 + 45 * (k % 7) / 6
        seconds = token * (fixed + (1 - fixed) * running / completions)
        again = (k % 5) * 0.1
        decoding.append(Decoding(now, now + 100 * seconds + again, 100, running, again))
        now += 100 * seconds + again
    recording = recording_of(COSTS)
    times = ServerTimes(decoding, [Recompute(k, k + 0.5, 1000) for k in range(8)])
    costs = estimate_server(replace(recording, servers=times), load_of(recording), completions, 0.0)
    assert costs.token.value == pytest.approx(token, rel=0.02)
    assert costs.fixed_token.value == pytest.approx(fixed, abs=0.05)
    assert costs.forward.value == pytest.approx(0.0005, rel=0.05)
