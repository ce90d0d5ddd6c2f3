"""A timeline in the JSON of Chrome's trace events, which ui.perfetto.dev and chrome://tracing open.

process        pid, with its name; the first one has phases and events of the run
row            tid, with its name (``realsys.timeline.picture.lanes``)
span           event X: begin and duration in microseconds since the first span
episode        events s, t, ..., f with one id: arrows through the spans of ``realsys.timeline.follow``
event, moment  event i, and X of a microsecond: an arrow must end in a span
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from realsys.observe.events import Event
from realsys.timeline.follow import Ways, ways_of
from realsys.timeline.picture.lanes import Lane, lanes_of
from realsys.timeline.read import Span, Timeline

TraceEvent = dict[str, Any]

#: process that the spans of the whole run belong to
RUN = "run/0"
#: kinds of processes, as a reader follows a sample
_KINDS = (
    "run",
    "gserver_manager",
    "rollout_worker",
    "generation_server",
    "reward_service",
    "model_worker",
    "master_worker",
)
_MOMENT_S = 1e-6
#: pid of RUN. Viewers take process 0 for the idle time of the machine.
_RUN_PID = 1


@dataclass(frozen=True, slots=True)
class _Place:
    """Row and time of a drawn span. ``ts``, ``end`` in microseconds."""

    pid: int
    tid: int
    ts: float
    end: float


def trace_events(timeline: Timeline, events: Iterable[Event] = (), phases: Sequence[Span] = ()) -> Iterator[TraceEvent]:
    """Yield the trace events of a timeline. ``phases``: spans of the process RUN."""
    spans = sorted((_visible(span) for span in [*phases, *timeline.spans]), key=lambda span: (span.begin, -span.end))
    if not spans:
        return
    begin = spans[0].begin
    by_process: dict[str, list[Span]] = {}
    for span in spans:
        by_process.setdefault(span.process, []).append(span)
    places: dict[int, _Place] = {}
    by_process.setdefault(RUN, [])
    for pid, process in enumerate(sorted(by_process, key=_sort_key), start=_RUN_PID):
        yield from _process(pid, process, timeline.hosts.get(process, ""))
        tids: dict[Lane, int] = {}
        for span, lane in lanes_of(by_process[process]):
            if lane not in tids:
                tids[lane] = len(tids) + 1
            places[id(span)] = place = _Place(pid, tids[lane], _us(span.begin - begin), _us(span.end - begin))
            yield _slice(span, place)
        yield from _rows(pid, tids)
    yield from _flows(ways_of(spans), places)
    for event in events:
        if event.time >= begin:
            yield _instant(event, _us(event.time - begin))


def _visible(span: Span) -> Span:
    return span if span.end - span.begin >= _MOMENT_S else span._replace(end=span.begin + _MOMENT_S)


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _sort_key(process: str) -> tuple[int, str, int]:
    kind, _, index = process.partition("/")
    place = _KINDS.index(kind) if kind in _KINDS else len(_KINDS)
    return place, kind, int(index) if index.isdigit() else 0


def _process(pid: int, process: str, host: str) -> Iterator[TraceEvent]:
    name = f"{process} on {host}" if host else process
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}


def _rows(pid: int, tids: Mapping[Lane, int]) -> Iterator[TraceEvent]:
    for number, ((group, place), tid) in enumerate(sorted(tids.items())):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": f"{group} {place + 1}"}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": number}}


def _slice(span: Span, place: _Place) -> TraceEvent:
    name = str(span.facts["call"]) if span.name == "call" and "call" in span.facts else span.name
    facts = {"unit": span.unit, **span.facts} if span.unit else dict(span.facts)
    event: TraceEvent = {
        "ph": "X",
        "name": name,
        "cat": span.name,
        "ts": place.ts,
        "dur": round(place.end - place.ts, 3),
    }
    return event | {"pid": place.pid, "tid": place.tid, "args": facts}


def _flows(ways: Ways, places: Mapping[int, _Place]) -> Iterator[TraceEvent]:
    for number, episode in enumerate(sorted(ways.episodes), start=1):
        points = list(_points(places[id(span)] for span in ways.of_episode(episode)))
        if len(points) < 2:
            continue
        last = len(points) - 1
        for k, (place, ts) in enumerate(points):
            event: TraceEvent = {"ph": "f" if k == last else "t" if k else "s", "id": number, "name": episode}
            event |= {"cat": "episode", "ts": ts, "pid": place.pid, "tid": place.tid}
            yield event | ({"bp": "e"} if k == last else {})


def _points(way: Iterable[_Place]) -> Iterator[tuple[_Place, float]]:
    """Yield the points of an arrow, in order of time, each inside of its span."""
    ts = 0.0
    for place in way:
        if place.end > ts:
            ts = max(ts, place.ts)
            yield place, ts


def _instant(event: Event, ts: float) -> TraceEvent:
    name = f"{event.kind} {event.process}".strip()
    return {
        "ph": "i",
        "s": "g",
        "name": name,
        "cat": "event",
        "ts": ts,
        "pid": _RUN_PID,
        "tid": 0,
        "args": {"text": event.text},
    }
