"""Tests of ``realsys.observe.timeline.why`` and ``.usage``: what a batch waited for, how busy both sides were."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realsys.observe.timeline.clocked_spans import TimelineSpan, read_timeline
from realsys.observe.timeline.why import (
    WAITS,
    Ways,
    life_of_groups,
    parts_of_wait,
    server_use,
    split,
    ways_of,
    worker_use,
)
from tests.support.timelines.made_up import START, small_trial

_INSIDE = ("generate", "queue", "prefill", "decode", "reward", "tool", "route", "episode")


def _step(ways_from: list[TimelineSpan]) -> tuple[TimelineSpan, TimelineSpan]:
    (step,) = [span for span in ways_from if span.name == "step"]
    (wait,) = [span for span in ways_from if span.name == "wait"]
    return step, wait


def test_wait_is_split_by_the_last_episode(tmp_path: Path) -> None:
    spans = list(read_timeline(small_trial(tmp_path).paths.spans).spans)
    step, wait = _step(spans)
    parts = parts_of_wait(wait, step, ways_of(spans))
    expected = {"ticket": 0.5, "queue": 1.0, "prefill": 1.0, "decode": 4.0, "reward": 2.0, "push": 1.0, "claim": 0.5}
    assert parts == pytest.approx(expected)


def test_last_attempt_of_a_ticket_counts(tmp_path: Path) -> None:
    """A reissued ticket was pushed by its second attempt, whose begin is what the trainer waited for."""
    spans = list(read_timeline(small_trial(tmp_path).paths.spans).spans)
    first = [span for span in spans if span.unit.startswith("0000000007.0") and span.name in {"rollout", "grant"}]
    spans += [span._replace(unit="0000000007.1", begin=span.begin + 1, end=span.end + 0.2) for span in first]
    spans.append(TimelineSpan("rollout_worker/0", "push", START + 10.0, START + 10.3, "0000000007.1", {}))
    step, wait = _step(spans)
    parts = parts_of_wait(wait, step, ways_of(spans))
    assert parts["ticket"] == pytest.approx(1.5)
    assert "decode" not in parts


def test_wait_before_a_lost_rollout_is_unknown(tmp_path: Path) -> None:
    """The RolloutWorker was killed after its push: it has recorded its episodes, but not the rollout."""
    spans = [span for span in read_timeline(small_trial(tmp_path).paths.spans).spans if span.name != "rollout"]
    step, wait = _step(spans)
    parts = parts_of_wait(wait, step, ways_of(spans))
    assert "ticket" not in parts
    assert parts["unknown"] == pytest.approx(0.5)
    assert parts["decode"] == pytest.approx(4.0)
    assert life_of_groups([(step, wait)], ways_of(spans)) == {}


def test_batch_without_spans_is_unknown() -> None:
    step = TimelineSpan("master_worker/0", "step", 0, 5, "step/1", {"tickets": "1-3"})
    wait = step._replace(name="wait", end=2.0)
    assert parts_of_wait(wait, step, Ways()) == {"unknown": 2.0}


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(_INSIDE), st.floats(0, 20), st.floats(0, 10)), max_size=12),
    st.floats(0, 10),
    st.floats(0.001, 20),
)
def test_pieces_of_an_episode_add_up(drawn: list[tuple[str, float, float]], begin: float, length: float) -> None:
    spans = [TimelineSpan("w", name, start, start + seconds, "", {}) for name, start, seconds in drawn]
    pieces = split(spans, begin, begin + length)
    assert sum(end - start for _, start, end in pieces) == pytest.approx(length)
    assert {name for name, _, _ in pieces} <= WAITS.keys()
    assert all(one[2] == other[1] for one, other in pairwise(pieces))


def test_use_of_servers(tmp_path: Path) -> None:
    spans = read_timeline(small_trial(tmp_path).paths.spans).spans
    use = server_use(spans, (START, START + 10))
    assert (use.servers, use.most) == (1, 2)
    assert use.busy == pytest.approx(0.55)  # from 1.5 to 7
    assert use.running == pytest.approx(0.75)  # 2.5 s and 5 s
    assert use.queued == pytest.approx(0.15)
    assert server_use(spans, (START + 16, START + 18)).paused == pytest.approx(0.2)


def test_use_of_rollout_workers(tmp_path: Path) -> None:
    use = worker_use(read_timeline(small_trial(tmp_path).paths.spans).spans, (START, START + 10))
    assert (use.workers, use.reasons) == (1, {})
    assert use.playing == pytest.approx(0.9)
    assert use.empty == pytest.approx(0.4)  # four places for one second


def test_life_of_a_group(tmp_path: Path) -> None:
    spans = read_timeline(small_trial(tmp_path).paths.spans).spans
    life = life_of_groups([_step(list(spans))], ways_of(spans))
    assert life["buffered"] == pytest.approx(0.5)
    assert life["trained"] == pytest.approx(4.5)
    assert sum(life.values()) == pytest.approx(14.0)  # from its grant to the end of its step


def test_life_leaves_out_groups_with_lost_spans(tmp_path: Path) -> None:
    """Spans were read from a moment on at which the group ran already."""
    spans = read_timeline(small_trial(tmp_path).paths.spans).spans
    assert life_of_groups([_step(list(spans))], ways_of(spans), since=START + 2.0) == {}
