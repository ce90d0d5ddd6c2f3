"""One clock for the processes of several hosts, from the spans themselves.

Processes of one host share CLOCK_MONOTONIC, so their spans need no correction. Each host's clock is placed by its wall
time. Wall times of hosts differ by milliseconds or more. Exchanges show by how much: what a server does for a call lies
inside of the call.

    caller's host     |<──────── call ────────>|
    server's host          |<── served ──>|            begin(call) <= begin(served), end(served) <= end(call)

Each exchange bounds the difference of the two clocks from both sides, and all of them together bound it well. If wall
times obey the bounds, they stay. Otherwise the clock moves to the middle of what the bounds allow.

A few exchanges may be paired wrongly: after a roll-back the calls of a step have the names of those before it, and a
killed caller has not recorded its side. So the bounds are those that most exchanges agree on.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from realsys.observe.spans import Header
from realsys.timeline.units import completion_of

if TYPE_CHECKING:
    from realsys.timeline.read import Span

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


def offsets_of(spans: Mapping[str, Sequence[Span]]) -> dict[str, Offset]:
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


def _exchanges(spans: Mapping[str, Sequence[Span]]) -> dict[tuple[str, str], list[Bounds]]:
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
