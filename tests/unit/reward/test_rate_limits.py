"""RateLimits: no window has more than its limit, whatever happens in it, and no request waits for ever."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realsys.reward.llm_judge import WINDOW_S, RateLimits

LIMITS = st.builds(
    RateLimits,
    concurrency=st.integers(1, 4),
    requests=st.integers(0, 5),
    tokens=st.sampled_from([0, 50, 100]),
)
#: (what happens, seconds after the event before, tokens)
EVENTS = st.lists(
    st.tuples(st.sampled_from(["start", "end", "pause"]), st.floats(0, 40), st.integers(0, 120)), max_size=60
)


@settings(max_examples=300, deadline=None)
@given(limits=LIMITS, events=EVENTS)
def test_no_window_exceeds_a_limit(limits, events):
    """A request that starts whenever it may, uses what it reserved, and ends at any time."""
    now, running, starts, paused = 0.0, [], [], 0.0
    for what, after, tokens in events:
        now += after
        if what == "start" and limits.wait_s(now, tokens) == 0:
            started = limits.start(now, tokens)
            running.append(started)
            starts.append(started)
            assert now >= paused
        elif what == "end" and running:
            limits.end(running.pop(tokens % len(running)), None)
        elif what == "pause":
            limits.pause(now, tokens / 4)
            paused = max(paused, now + tokens / 4)
        assert limits.running == len(running) <= limits.concurrency
    for first in starts:
        window = [each.tokens for each in starts if first.time <= each.time < first.time + WINDOW_S]
        assert not limits.requests or len(window) <= limits.requests
        assert not limits.tokens or sum(window) <= limits.tokens


@settings(max_examples=300, deadline=None)
@given(limits=LIMITS, events=EVENTS, tokens=st.integers(0, 1000))
def test_request_starts_after_its_wait(limits, events, tokens):
    """The wait is exact: a request may start after it, and not before."""
    now = 0.0
    for what, after, used in events:
        now += after
        if what == "start" and limits.wait_s(now, used) == 0:
            limits.end(limits.start(now, used), 3 * used)  # more than it reserved
        elif what == "pause":
            limits.pause(now, used / 4)
    waited = 0
    while (wait_s := limits.wait_s(now, tokens)) > 0:
        assert wait_s <= WINDOW_S + 1e-6
        assert limits.wait_s(now + 0.9 * wait_s, tokens) > 0
        now += wait_s + 1e-6
        waited += 1
        assert waited <= 2, "the end of a pause, then that of a window"
    limits.start(now, tokens)


def test_running_requests_bound_the_next():
    limits = RateLimits(concurrency=1)
    first = limits.start(0.0, 10)
    assert limits.wait_s(100.0, 10) == math.inf
    with pytest.raises(RuntimeError, match="too early"):
        limits.start(100.0, 10)
    limits.end(first, 10)
    assert limits.wait_s(100.0, 10) == 0.0


def test_used_tokens_replace_the_reservation():
    limits = RateLimits(concurrency=9, tokens=100)
    limits.end(limits.start(0.0, 90), 20)
    assert limits.wait_s(1.0, 80) == 0.0
    assert limits.wait_s(1.0, 81) == WINDOW_S - 1.0


def test_longer_pause_counts():
    limits = RateLimits(concurrency=9)
    limits.pause(0.0, 30.0)
    limits.pause(1.0, 2.0)
    assert limits.wait_s(5.0, 1) == 25.0
