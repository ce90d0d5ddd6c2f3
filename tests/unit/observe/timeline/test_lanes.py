"""Tests of ``realsys.observe.timeline.perfetto``: spans of a row nest."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from realsys.observe.timeline.clocked_spans import TimelineSpan
from realsys.observe.timeline.perfetto import lanes_of

_TIMES = st.integers(0, 40)


def _span(name: str, begin: float, end: float, unit: str = "", process: str = "rollout_worker/0") -> TimelineSpan:
    return TimelineSpan(process, name, begin, end, unit, {})


def _ordered(spans: list[TimelineSpan]) -> list[TimelineSpan]:
    return sorted(spans, key=lambda span: (span.begin, -span.end))


_NAMES = st.sampled_from(["episode", "generate", "call", "step", "hold"])
_UNITS = st.sampled_from(["", "1.0/0", "1.0/1"])
_PROCESSES = st.sampled_from(["master_worker/0", "model_worker/0"])


@settings(deadline=None)
@given(st.lists(st.tuples(_NAMES, _TIMES, _TIMES, _UNITS), max_size=15), _PROCESSES)
def test_spans_of_a_row_nest(drawn: list[tuple[str, int, int, str]], process: str) -> None:
    spans = [_span(name, begin, begin + length, unit, process) for name, begin, length, unit in drawn]
    ends: dict[object, list[float]] = {}
    placed = lanes_of(_ordered(spans))
    for span, lane in placed:
        open_ends = ends.setdefault(lane, [])
        while open_ends and open_ends[-1] <= span.begin:
            open_ends.pop()
        assert not open_ends or span.end <= open_ends[-1]
        open_ends.append(span.end)
    assert len(placed) == len(spans)


def test_episode_stays_on_one_row() -> None:
    """Two episodes overlap; each has its row with all of its spans."""
    spans = [
        _span("episode", 0, 9, "1.0/0"),
        _span("generate", 1, 4, "1.0/0"),
        _span("reward", 4, 9, "1.0/0"),
        _span("episode", 2, 8, "1.0/1"),
        _span("generate", 2, 7, "1.0/1"),
    ]
    rows = {(span.unit, lane) for span, lane in lanes_of(_ordered(spans))}
    assert rows == {("1.0/0", ("episodes", 0)), ("1.0/1", ("episodes", 1))}


def test_row_is_used_again() -> None:
    spans = [_span("episode", 10 * k, 10 * k + 9, f"1.0/{k}") for k in range(5)]
    assert {lane for _, lane in lanes_of(spans)} == {("episodes", 0)}


def test_unit_that_pauses_frees_its_row() -> None:
    """Otherwise a unit that returns much later would keep a row empty until then."""
    spans = [_span("decode", 0, 1, "r#0"), _span("decode", 5, 6, "s#0"), _span("decode", 50, 51, "r#0")]
    assert {lane for _, lane in lanes_of(spans)} == {("completions", 0)}
