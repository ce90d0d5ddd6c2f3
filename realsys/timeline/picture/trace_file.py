"""Export of a trial's timeline as a file for ui.perfetto.dev."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import msgspec

from realsys.config.paths import TrialPaths
from realsys.errors import ConfigError
from realsys.observe.events import read_events
from realsys.observe.spans import SUFFIX
from realsys.observe.step_log import StepRecord, StepTail
from realsys.timeline.follow import ticket_named, ways_of
from realsys.timeline.picture.perfetto import RUN, trace_events
from realsys.timeline.read import Span, Timeline, Window, read_timeline
from realsys.timeline.units import number_of

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
    with _opened(out) as file:
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


def phases_of(records: Sequence[StepRecord]) -> list[Span]:
    """Return the phases of a run (connect, warmup, evaluate, train, ...) as spans, from its step log."""
    phases: list[Span] = []
    name, begin, latest = "", 0.0, 0.0
    for record in records:
        if not isinstance(time := record.get("time"), int | float):
            continue
        if record["kind"] == "phase":
            # A trial that was stopped has no record until it is started again, which begins with this phase.
            end = latest if record.get("phase") == "connect" else time
            phases += [Span(RUN, name, begin, end, "", {})] if name else []
            name, begin = str(record.get("phase", "")), time
        latest = max(latest, time)
    return [*phases, Span(RUN, name, begin, latest, "", {})] if name else phases


def _opened(out: Path) -> BinaryIO:
    # mtime 0: the same trace has the same bytes.
    return gzip.GzipFile(out, "wb", mtime=0) if out.suffix == ".gz" else out.open("wb")  # type: ignore[return-value]
