"""Reader of the spans of all processes (``realsys.observe.spans``), put on one clock.

    {trial}/spans/<process>/*.spans ──> segments of each process ──> clocks of the hosts ──> Timeline: spans by begin

A segment that cannot be read, and a line that is not complete, are left out and counted: the process may be writing it,
or may have been killed.
"""

from __future__ import annotations

import contextlib
import functools
import re
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from realsys.observe.spans import FLUSH_S, LOST, SUFFIX, Header, RawSpan

_HEADER = msgspec.json.Decoder(Header)
_LINE = msgspec.json.Decoder(list[RawSpan])
#: bytes of spans that are read: half a GiB of memory
MOST_BYTES = 64 << 20
_NOTHING: Mapping[str, Any] = {}


class TimelineSpan(NamedTuple):
    """One span. Times are unix seconds on one clock."""

    process: str  # kind/index
    name: str
    begin: float
    end: float
    unit: str
    facts: Mapping[str, Any]

    @property
    def seconds(self) -> float:
        return self.end - self.begin


Window = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans of all processes.

    spans     sorted by begin
    offsets   clock -> its correction
    hosts     process -> host
    lost      spans that processes had to drop because they could not be written in time
    unread    lines that could not be read
    """

    spans: Sequence[TimelineSpan]
    offsets: Mapping[str, Offset] = field(default_factory=dict)
    hosts: Mapping[str, str] = field(default_factory=dict)
    lost: int = 0
    unread: int = 0

    def named(self, *names: str) -> list[TimelineSpan]:
        return [span for span in self.spans if span.name in names]


@dataclass(frozen=True, slots=True)
class Segment:
    """A file of spans. ``until``: monotonic ns at which the next segment of its process begins; None: there is none."""

    path: Path
    header: Header
    until: int | None


def segments_of(folder: Path) -> list[Segment]:
    """Return the segments of one process that have a header, oldest first."""
    found: list[tuple[Path, Header]] = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            with path.open("rb") as file:
                found.append((path, _HEADER.decode(file.readline())))
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            continue
    segments = []
    for number, (path, header) in enumerate(found):
        later = found[number + 1][1] if number + 1 < len(found) else None
        same_clock = later is not None and later.clock == header.clock
        segments.append(Segment(path, header, later.monotonic_ns if later is not None and same_clock else None))
    return segments


def read_timeline(folder: Path, window: Window | None = None, kind: str = "") -> Timeline:
    """Return the spans under ``{trial}/spans`` that overlap ``window`` (unix seconds); an empty one without any.

    ``kind``: of the processes to read; "": all.
    """
    segments = [segment for process in _folders(folder, kind) for segment in segments_of(process)]
    base = base_offsets(segment.header for segment in segments)
    spans: dict[str, list[TimelineSpan]] = {clock: [] for clock in base}
    unread = 0
    for segment in segments:
        # between two flushes lie FLUSH_S seconds
        ends_ns = None if segment.until is None else segment.until + base[segment.header.clock]
        if window is not None and ends_ns is not None and ends_ns / 1e9 + FLUSH_S < window[0]:
            continue
        read, bad = _spans_of(segment, base[segment.header.clock], window)
        spans[segment.header.clock] += read
        unread += bad
    offsets = offsets_of(spans)
    merged = [span for clock, read in spans.items() for span in shifted(read, offsets[clock].seconds)]
    merged.sort(key=lambda span: (span.begin, -span.end))
    return Timeline(
        merged,
        offsets,
        {segment.header.process: segment.header.host for segment in segments},
        sum(int(span.facts.get("spans", 0)) for span in merged if span.name == LOST),
        unread,
    )


def bounded_window(folder: Path, windows: Sequence[Window], kind: str = "") -> Window:
    """Return the first of ``windows`` whose spans are at most MOST_BYTES, else the last one. ``kind``: as above."""
    return next((window for window in windows if bytes_of(folder, window, kind) <= MOST_BYTES), windows[-1])


def bytes_of(folder: Path, window: Window, kind: str = "") -> int:
    """Return about how many bytes of the spans under ``{trial}/spans`` are in ``window``. ``kind``: as above.

    A segment counts with the share of its time that is in the window.
    """
    segments = [segment for process in _folders(folder, kind) for segment in segments_of(process)]
    base = base_offsets(segment.header for segment in segments)
    total = 0.0
    for segment in segments:
        offset = base[segment.header.clock]
        with contextlib.suppress(OSError):  # the process has removed it since
            stat = segment.path.stat()
            begin = (segment.header.monotonic_ns + offset) / 1e9
            end = stat.st_mtime if segment.until is None else (segment.until + offset) / 1e9
            inside = max(0.0, min(end, window[1]) - max(begin, window[0]))
            total += stat.st_size * min(1.0, inside / max(end - begin, 1e-9))
    return round(total)


def shifted(spans: Sequence[TimelineSpan], seconds: float) -> Sequence[TimelineSpan]:
    """Return ``spans`` moved by ``seconds``."""
    if not seconds:
        return spans
    return [span._replace(begin=span.begin + seconds, end=span.end + seconds) for span in spans]


def _folders(folder: Path, kind: str) -> list[Path]:
    try:
        folders = sorted(path for path in folder.iterdir() if path.is_dir())
        return [path for path in folders if not kind or path.name.startswith(f"{kind}-")]
    except OSError:
        return []


def _spans_of(segment: Segment, base: int, window: Window | None) -> tuple[list[TimelineSpan], int]:
    process, spans, unread = segment.header.process, list[TimelineSpan](), 0
    for line in _lines(segment.path):
        try:
            raw = _LINE.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            unread += 1
            continue
        for name, begin, duration, unit, facts in raw:
            start = (begin + base) / 1e9
            end = (begin + duration + base) / 1e9
            if window is None or (end >= window[0] and start <= window[1]):
                spans.append(TimelineSpan(process, name, start, end, unit, facts or _NOTHING))
    return spans, unread


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines after the header."""
    try:
        with path.open("rb") as file:
            file.readline()
            yield from file
    except OSError:  # the process has removed it since
        return


# ---- one clock for the processes of several hosts, from the spans themselves
#
# Processes of one host share CLOCK_MONOTONIC, so their spans need no correction. Each host's clock is placed by its
# wall time. Wall times of hosts differ by milliseconds or more. Exchanges show by how much: what a server does for a
# call lies inside of the call.
#
#     caller's host     |<──────── call ────────>|
#     server's host          |<── served ──>|            begin(call) <= begin(served), end(served) <= end(call)
#
# Each exchange bounds the difference of the two clocks from both sides, and all of them together bound it well. If
# wall times obey the bounds, they stay. Otherwise the clock moves to the middle of what the bounds allow.
#
# A few exchanges may be paired wrongly: after a roll-back the calls of a step have the names of those before it, and a
# killed caller has not recorded its side. So the bounds are those that most exchanges agree on.


#: process whose host has the clock of the timeline
REFERENCE = "gserver_manager/0"


#: least and greatest seconds by which a clock must be moved
Bounds = tuple[float, float]


class Offset(NamedTuple):
    """Correction of a clock in seconds, and the bound on its error; None: no exchange bounds it."""

    seconds: float
    error: float | None


def base_offsets(headers: Iterable[Header]) -> dict[str, int]:
    """Return clock -> ns from its monotonic time to unix time: the middle of what its processes saw."""
    seen: dict[str, list[int]] = {}
    for header in headers:
        seen.setdefault(header.clock, []).append(header.wall_ns - header.monotonic_ns)
    return {clock: round(statistics.median_low(values)) for clock, values in seen.items()}


def offsets_of(spans: Mapping[str, Sequence[TimelineSpan]]) -> dict[str, Offset]:
    """Return clock -> its correction. ``spans``: clock -> its spans, in wall time."""
    if len(spans) < 2:
        return {clock: Offset(0.0, 0.0) for clock in spans}
    reference = next(
        (clock for clock, own in spans.items() if any(span.process == REFERENCE for span in own)), next(iter(spans))
    )
    bounds = {pair: _agreed(found) for pair, found in _exchanges(spans).items()}
    bounds |= {(b, a): (-high, -low) for (a, b), (low, high) in bounds.items()}
    offsets = {reference: Offset(0.0, 0.0)}
    todo = deque([reference])
    while todo:
        known = todo.popleft()
        for clock in spans.keys() - offsets.keys():
            if (between := bounds.get((known, clock))) is not None:
                seconds, error = _correction(*between)
                before = offsets[known]
                offsets[clock] = Offset(before.seconds + seconds, (before.error or 0.0) + error)
                todo.append(clock)
    return {clock: offsets.get(clock, Offset(0.0, None)) for clock in spans}


def _correction(low: float, high: float) -> tuple[float, float]:
    """Return the correction within its bounds, and its error."""
    return (0.0, max(-low, high)) if low <= 0.0 <= high else ((low + high) / 2, (high - low) / 2)


def _agreed(exchanges: Iterable[Bounds]) -> Bounds:
    """Return the bounds that the largest number of exchanges allow; of several such ones, those nearest to 0."""
    edges = sorted(edge for low, high in exchanges for edge in ((low, 0), (high, 1)))  # begins before ends
    count = most = 0
    agreed = (0.0, 0.0)
    for (low, is_end), (high, _) in pairwise(edges):
        count += -1 if is_end else 1
        nearer = max(low, -high, 0.0) < max(agreed[0], -agreed[1], 0.0)
        if count > most or (count == most and nearer):
            most, agreed = count, (low, high)
    return agreed


def _exchanges(spans: Mapping[str, Sequence[TimelineSpan]]) -> dict[tuple[str, str], list[Bounds]]:
    """Return (a, b) -> bounds by each exchange on what clock b must be moved by, if a stays; each pair once."""
    outer: dict[object, tuple[str, float, float]] = {}
    for clock, own in spans.items():
        for key, begin, end in _calls(own):
            outer[key] = clock, begin, end
    found: dict[tuple[str, str], list[Bounds]] = {}
    for clock, own in spans.items():
        for key, begin, end in _served(own):
            if key not in outer or outer[key][0] == clock:
                continue
            caller, call_begin, call_end = outer[key]
            # The served side may seem longer than the call, because clocks drift: its bounds are in the wrong order.
            low, high = sorted((call_begin - begin, call_end - end))
            if caller < clock:
                found.setdefault((caller, clock), []).append((low, high))
            else:
                found.setdefault((clock, caller), []).append((-high, -low))
    return found


def _calls(spans: Sequence[TimelineSpan]) -> Iterator[tuple[object, float, float]]:
    """Yield (key, begin, end) of the callers' sides of exchanges."""
    for span in spans:
        kind = span.process.partition("/")[0]
        match span.name, kind:
            case "generate", _:
                yield ("generate", span.unit, span.facts.get("call")), span.begin, span.end
            case "push", _:
                yield ("push", span.unit), span.begin, span.end
            case "call", "master_worker":
                yield ("call", span.unit, span.facts.get("call")), span.begin, span.end
            case "copy", "master_worker":
                yield ("copy", span.unit), span.begin, span.end
            case "update", _:
                yield ("update", span.unit, span.facts.get("server")), span.begin, span.end


def _served(spans: Sequence[TimelineSpan]) -> Iterator[tuple[object, float, float]]:
    """Yield (key, begin, end) of the other sides."""
    for span in spans:
        kind = span.process.partition("/")[0]
        match span.name, kind:
            case "queue" | "prefill" | "decode", _:
                if (completion := completion_of(span.unit)) is not None:
                    yield ("generate", completion.unit, completion.call), span.begin, span.end
            case "receive", _:
                yield ("push", span.unit), span.begin, span.end
            case "call", "model_worker":
                yield ("call", span.unit, span.facts.get("call")), span.begin, span.end
            case "copy", "model_worker":
                yield ("copy", span.unit), span.begin, span.end
            case "stage" | "pause", "generation_server":
                yield ("update", span.unit, span.process), span.begin, span.end


# ---- names of what a span is for, as several processes write them: attempts, episodes, steps, versions


#: request id of a call of the engine (``realsys.rollout.resumable_engine.EngineCall``), and the number of the
#: completion in it
_REQUEST = re.compile(
    r"(?P<attempt>(?:\d{10}|eval-.*-\d{6})\.\d+)\.(?P<episode>\d+)\.(?P<call>\d+)"
    r"\.(?P<trip>\d+)(?:\.(?P<index>\d+))?(?:#(?P<number>\d+))?"
)

_ATTEMPT = re.compile(r"(?:\d{10}|eval-.*-\d{6})\.\d+")


class CompletionUnit(NamedTuple):
    """The completion of an episode that a server samples. ``call``: number of the call in its episode."""

    attempt: str
    episode: int
    call: int

    @property
    def unit(self) -> str:
        return f"{self.attempt}/{self.episode}"


@functools.lru_cache(1 << 16)
def completion_of(unit: str) -> CompletionUnit | None:
    """Return whose completion a span of a server is for; None if its request is none of a ticket.

    Equal first calls of an attempt's episodes are one request, which has the name of the first of them.
    """
    match = _REQUEST.fullmatch(unit)
    if match is None:
        return None
    offset = int(match["index"] or match["number"] or 0)
    return CompletionUnit(match["attempt"], int(match["episode"]) + offset, int(match["call"]))


@functools.lru_cache(1 << 16)
def attempt_of(unit: str) -> str:
    """Return ``ticket.attempt`` of an attempt, an episode or a completion; "" for other units."""
    if (completion := completion_of(unit)) is not None:
        return completion.attempt
    head = unit.partition("/")[0]
    return head if _ATTEMPT.fullmatch(head) else ""


def ticket_of(attempt: str) -> str:
    """Return the ticket of an attempt."""
    return attempt.rpartition(".")[0]


def number_of(unit: str, kind: str) -> int | None:
    """Return N of ``kind``/N; None for other units."""
    head, _, number = unit.partition("/")
    return int(number) if head == kind and number.lstrip("-").isdigit() else None
