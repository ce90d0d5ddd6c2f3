"""One clock for the processes of several hosts, from the spans themselves.

Processes of one host share CLOCK_MONOTONIC, so their spans need no correction. Each host's clock is placed by its wall
time. Wall times of hosts differ by milliseconds or more. Exchanges show by how much: what a server does for a call lies
inside of the call.

    caller's host     |<──────── call ────────>|
    server's host          |<── served ──>|            begin(call) <= begin(served), end(served) <= end(call)

Each exchange bounds the difference of the two clocks from both sides, and all of them together bound it well. If wall
times obey all bounds, they stay. Otherwise the clock moves to the middle of what the bounds allow.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from realsys.telemetry.spans import Header
from realsys.timeline.units import completion_of

if TYPE_CHECKING:
    from realsys.timeline.read import Span

#: process whose host has the clock of the timeline
REFERENCE = "gserver_manager/0"


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


def offsets_of(spans: Mapping[str, Sequence[Span]]) -> dict[str, Offset]:
    """Return clock -> its correction. ``spans``: clock -> its spans, in wall time."""
    if len(spans) < 2:
        return {clock: Offset(0.0, 0.0) for clock in spans}
    reference = next(
        (clock for clock, own in spans.items() if any(span.process == REFERENCE for span in own)), next(iter(spans))
    )
    bounds = _bounds(spans)
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
    """Return the correction within its bounds, and its error. Bounds of clocks that drift may cross."""
    error = abs(high - low) / 2
    return (0.0, max(abs(low), abs(high))) if low <= 0.0 <= high else ((low + high) / 2, error)


def _bounds(spans: Mapping[str, Sequence[Span]]) -> dict[tuple[str, str], tuple[float, float]]:
    """Return (a, b) -> bounds on what clock b must be moved by, if a stays; both ways of each pair."""
    outer: dict[object, tuple[str, float, float]] = {}
    for clock, own in spans.items():
        for key, begin, end in _calls(own):
            outer[key] = clock, begin, end
    bounds: dict[tuple[str, str], tuple[float, float]] = {}
    for clock, own in spans.items():
        for key, begin, end in _served(own):
            if key not in outer or outer[key][0] == clock:
                continue
            caller, call_begin, call_end = outer[key]
            low, high = bounds.get((caller, clock), (float("-inf"), float("inf")))
            bounds[caller, clock] = max(low, call_begin - begin), min(high, call_end - end)
    mirrored = {(b, a): (-high, -low) for (a, b), (low, high) in bounds.items() if (b, a) not in bounds}
    return bounds | mirrored


def _calls(spans: Sequence[Span]) -> Iterator[tuple[object, float, float]]:
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


def _served(spans: Sequence[Span]) -> Iterator[tuple[object, float, float]]:
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
