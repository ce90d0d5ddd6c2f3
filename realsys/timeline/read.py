"""Reader of the spans of all processes (``realsys.observe.spans``), put on one clock.

    {trial}/spans/<process>/*.spans ──> segments of each process ──> clocks of the hosts ──> Timeline: spans by begin

A segment that cannot be read, and a line that is not complete, are left out and counted: the process may be writing it,
or may have been killed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from realsys.observe.spans import FLUSH_S, LOST, SUFFIX, Header, RawSpan
from realsys.timeline.clocks import Offset, base_offsets, offsets_of

_HEADER = msgspec.json.Decoder(Header)
_LINE = msgspec.json.Decoder(list[RawSpan])
#: bytes of spans that are read: half a GiB of memory
MOST_BYTES = 64 << 20
_NOTHING: Mapping[str, Any] = {}


class Span(NamedTuple):
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

    spans: Sequence[Span]
    offsets: Mapping[str, Offset] = field(default_factory=dict)
    hosts: Mapping[str, str] = field(default_factory=dict)
    lost: int = 0
    unread: int = 0

    def named(self, *names: str) -> list[Span]:
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
    spans: dict[str, list[Span]] = {clock: [] for clock in base}
    unread = 0
    for segment in segments:
        if window is not None and _is_before(segment, base, window[0]):
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


def shifted(spans: Sequence[Span], seconds: float) -> Sequence[Span]:
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


def _is_before(segment: Segment, base: Mapping[str, int], begin: float) -> bool:
    """Return True if all spans of a segment end before ``begin``. Between two flushes lie FLUSH_S seconds."""
    if segment.until is None:
        return False
    return (segment.until + base[segment.header.clock]) / 1e9 + FLUSH_S < begin


def _spans_of(segment: Segment, base: int, window: Window | None) -> tuple[list[Span], int]:
    process, spans, unread = segment.header.process, list[Span](), 0
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
                spans.append(Span(process, name, start, end, unit, facts or _NOTHING))
    return spans, unread


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines after the header."""
    try:
        with path.open("rb") as file:
            file.readline()
            yield from file
    except OSError:  # the process has removed it since
        return
