"""Export of a trial's timeline as a file for ui.perfetto.dev."""

from __future__ import annotations

import gzip
import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from realsys.config.paths import TrialPaths
from realsys.errors import ConfigError
from realsys.observe.spans import SUFFIX
from realsys.observe.step_log import Event, StepRecord, StepTail, read_events
from realsys.observe.timeline.clocked_spans import Timeline, TimelineSpan, Window, number_of, read_timeline
from realsys.observe.timeline.why import Ways, ticket_named, ways_of

#: size of all spans from which steps must be chosen: a viewer takes about a tenth of that
_MOST_BYTES = 256 << 20
#: first and last step; None: from the first, to the last of the run
Steps = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Part of a timeline. ``ticket``: an id, its number, or an episode; "" and None: all."""

    steps: Steps | None = None
    ticket: str = ""


@dataclass(frozen=True, slots=True)
class Written:
    """Contents of a written trace."""

    spans: int
    processes: int
    seconds: float
    lost: int
    unread: int
    clock_error: float | None  # seconds by which clocks of hosts may differ; None: of a host it is not known


def write_trace(paths: TrialPaths, out: Path, wanted: Wanted = Wanted()) -> Written:
    """Write the trace events of a trial to ``out``; compressed if its name ends with .gz.

    Raises ConfigError if the trial has no spans, or not those that are wanted, and OSError.
    """
    timeline = chosen(paths, wanted)
    begin = min(span.begin for span in timeline.spans)
    end = max(span.end for span in timeline.spans)
    phases = [span for span in phases_of(StepTail(paths.steps).read()) if span.end > begin and span.begin < end]
    if wanted != Wanted():
        # A viewer shows the time of all spans: a phase of days would hide the chosen steps.
        phases = [span._replace(begin=max(span.begin, begin), end=min(span.end, end)) for span in phases]
    events = [event for event in read_events(paths.events) if event.time <= end]
    # mtime 0: the same trace has the same bytes
    with gzip.GzipFile(out, "wb", mtime=0) if out.suffix == ".gz" else out.open("wb") as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        for number, event in enumerate(trace_events(timeline, events, phases)):
            file.write((b",\n" if number else b"") + msgspec.json.encode(event))
        file.write(b"\n]}\n")
    errors = [offset.error for offset in timeline.offsets.values()]
    return Written(
        spans=len(timeline.spans),
        processes=len({span.process for span in timeline.spans}),
        seconds=end - begin,
        lost=timeline.lost,
        unread=timeline.unread,
        clock_error=None if None in errors else max(error for error in errors if error is not None),
    )


def chosen(paths: TrialPaths, wanted: Wanted) -> Timeline:
    """Read the wanted part of a timeline. Raises ConfigError if it has no span."""
    if not paths.spans.is_dir():
        problem = "no folder spans: not the folder of a trial, or it ran with telemetry.spans=false"
        raise ConfigError("TRIAL_DIR", str(paths.root), problem)
    size = sum(path.stat().st_size for path in paths.spans.rglob(f"*{SUFFIX}"))
    if wanted.steps is None and size > _MOST_BYTES:
        problem = f"the spans of this trial have {size >> 20} MiB: choose steps, such as --steps 20:25"
        raise ConfigError("--steps", "", problem)
    timeline = read_timeline(paths.spans, None if wanted.steps is None else window_of(paths, wanted.steps))
    if wanted.ticket:
        timeline = replace(timeline, spans=ways_of(timeline.spans).of_ticket(ticket_named(wanted.ticket)))
    if not timeline.spans:
        if wanted.ticket:
            raise ConfigError("--ticket", wanted.ticket, "no span of this ticket: it is unknown, or too old")
        raise ConfigError("TRIAL_DIR", str(paths.root), "no span was written yet")
    return timeline


def window_of(paths: TrialPaths, steps: Steps) -> Window:
    """Return the time from the beginning of the first step to the end of the last. Raises ConfigError."""
    first, last = steps
    named = f"{'' if first is None else first}:{'' if last is None else last}"
    masters = read_timeline(paths.spans, kind="master_worker").named("step")
    latest = {number: span for span in masters if (number := number_of(span.unit, "step")) is not None}
    taken = [span for n, span in latest.items() if (first is None or n >= first) and (last is None or n <= last)]
    if not taken:
        there = f"steps {min(latest)} to {max(latest)}" if latest else "no step"
        raise ConfigError("--steps", named, f"the spans have {there}")
    return min(span.begin for span in taken), max(span.end for span in taken)


def phases_of(records: Sequence[StepRecord]) -> list[TimelineSpan]:
    """Return the phases of a run (connect, warmup, evaluate, train, ...) as spans, from its step log."""
    phases: list[TimelineSpan] = []
    name, begin, latest = "", 0.0, 0.0
    for record in records:
        if not isinstance(time := record.get("time"), int | float):
            continue
        if record["kind"] == "phase":
            # A trial that was stopped has no record until it is started again, which begins with this phase.
            end = latest if record.get("phase") == "connect" else time
            phases += [TimelineSpan(RUN, name, begin, end, "", {})] if name else []
            name, begin = str(record.get("phase", "")), time
        latest = max(latest, time)
    return [*phases, TimelineSpan(RUN, name, begin, latest, "", {})] if name else phases


# ---- JSON of Chrome's trace events, which ui.perfetto.dev and chrome://tracing open
#
# process        pid, with its name; the first one has phases and events of the run
# row            tid, with its name (``lanes_of``)
# span           event X: begin and duration in microseconds since the first span
# episode        events s, t, ..., f with one id: arrows through the spans of ``realsys.observe.timeline.why``
# event, moment  event i, and X of a microsecond: an arrow must end in a span


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


def trace_events(
    timeline: Timeline, events: Iterable[Event] = (), phases: Sequence[TimelineSpan] = ()
) -> Iterator[TraceEvent]:
    """Yield the trace events of a timeline. ``phases``: spans of the process RUN."""
    spans = sorted((_visible(span) for span in [*phases, *timeline.spans]), key=lambda span: (span.begin, -span.end))
    if not spans:
        return
    begin = spans[0].begin
    by_process: dict[str, list[TimelineSpan]] = {}
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
            name = f"{event.kind} {event.process}".strip()
            yield {
                "ph": "i",
                "s": "g",
                "name": name,
                "cat": "event",
                "ts": _us(event.time - begin),
                "pid": _RUN_PID,
                "tid": 0,
                "args": {"text": event.text},
            }


def _visible(span: TimelineSpan) -> TimelineSpan:
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


def _slice(span: TimelineSpan, place: _Place) -> TraceEvent:
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


# ---- rows: spans of one process that overlap go to different ones. Pure
#
# A viewer draws the spans of a row as a stack, so on one row two spans must nest or be apart. A *chain* is the spans
# of one unit, such as prefill and decode of a completion. A chain stays on one row for its whole time.


#: name of a span -> its group of rows in the process; any other span is in the group ``work``
GROUPS: Mapping[str, str] = MappingProxyType(
    {
        "allocate": "tickets",
        "rollout": "groups",
        "push": "groups",
        "finish": "groups",
        "episode": "episodes",
        "generate": "episodes",
        "reward": "episodes",
        "tool": "episodes",
        "route": "episodes",
        "grant": "grants",
        "update": "updates",
        "queue": "queue",
        "prefill": "completions",
        "decode": "completions",
        "stage": "staging",
        "pause": "pauses",
        "receive": "groups",
        "write": "writes",
        "publish": "publications",
        "evaluate": "evaluations",
        "call": "calls",
        "step": "steps",
        "wait": "steps",
        "plan": "steps",
        "settle": "steps",
        "copy": "steps",
        "report": "steps",
        "save": "steps",
    }
)
OTHER = "work"
#: the same for a ModelWorker, which serves one request at a time; ``write`` is in another thread
_OF_MODEL_WORKERS = MappingProxyType({"receive": "groups", "write": "writes"})

#: Spans of one unit that are further apart need not be on one row: it would be occupied in between.
_GAP_S = 1e-3

#: group and number of a row
Lane = tuple[str, int]


def lanes_of(spans: Sequence[TimelineSpan]) -> list[tuple[TimelineSpan, Lane]]:
    """Give every span of one process a row. ``spans``: sorted by begin, longest first.

    In the result the spans of a row are sorted, each parent before its children.
    """
    by_group: dict[str, list[TimelineSpan]] = {}
    for span in spans:
        by_group.setdefault(_group_of(span), []).append(span)
    placed: list[tuple[TimelineSpan, Lane]] = []
    for group, members in by_group.items():
        for number, chain in _numbered(_chains(members)):
            placed += [(span, (group, number)) for span in chain]
    placed.sort(key=lambda item: (item[0].begin, -item[0].end))
    return placed


def _group_of(span: TimelineSpan) -> str:
    if span.process.startswith("model_worker/"):
        return _OF_MODEL_WORKERS.get(span.name, "requests")
    return GROUPS.get(span.name, OTHER)


def _chains(spans: Sequence[TimelineSpan]) -> list[list[TimelineSpan]]:
    """Split the spans of a group: those of one unit that nest, or follow each other without a gap, stay together."""
    chains: list[list[TimelineSpan]] = []
    open_chain: dict[str, tuple[list[TimelineSpan], list[float]]] = {}  # unit -> chain, ends of its open spans
    for span in spans:
        chain, ends = open_chain.get(span.unit, ([], []))
        last = 0.0
        while ends and ends[-1] <= span.begin:
            last = ends.pop()
        fits = span.end <= ends[-1] if ends else span.begin - last < _GAP_S
        # A span that begins inside of another one and ends after it cannot be drawn on its row.
        if not span.unit or not chain or not fits:
            chain, ends = [], []
            chains.append(chain)
            open_chain[span.unit] = chain, ends
        chain.append(span)
        ends.append(span.end)
    return chains


def _numbered(chains: Sequence[list[TimelineSpan]]) -> list[tuple[int, list[TimelineSpan]]]:
    """Give each chain the lowest number that is free for its whole time."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []  # (end, number)
    count = 0
    numbered = []
    for chain in sorted(chains, key=lambda chain: chain[0].begin):
        while busy and busy[0][0] <= chain[0].begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            number = heapq.heappop(free)
        else:
            number, count = count, count + 1
        heapq.heappush(busy, (max(span.end for span in chain), number))
        numbered.append((number, chain))
    return numbered
