"""Times of the servers of a recorded run, from their spans.

decode spans  ──> seconds and tokens of each, and how many completions decoded beside it
pause spans   ──> the prefill spans that begin there: caches that are computed again, and for how long
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from realsys.config.paths import TrialPaths
from realsys.timeline.read import Span, Window, bounded_window, read_timeline
from realsys.timeline.units import attempt_of, ticket_of

_KIND = "generation_server"
_STEPS = (50, 20, 5, 1)  # last steps whose spans are read: the first number whose spans are not too many
_MOST = 20_000  # decode spans that are kept, evenly spaced: more tell no more
_FEWEST = 100  # decode spans; the seconds of a token are estimated from at least this many
_SAME_MOMENT = 0.02  # s; a cache is invalid from a pause on


@dataclass(frozen=True, slots=True)
class Decoding:
    """Tokens of one completion that one weight version sampled. Times are in unix seconds.

    running      mean number of completions of the server that decoded meanwhile, this one included
    recomputing  seconds of it in which the server computed caches again
    """

    begin: float
    end: float
    tokens: int
    running: float
    recomputing: float


@dataclass(frozen=True, slots=True)
class Recompute:
    """Caches of one server that are computed again after an update: ``tokens`` of all running completions."""

    begin: float
    end: float
    tokens: int


@dataclass(frozen=True, slots=True)
class ServerTimes:
    """What the spans of the servers tell; empty without spans. ``served``: attempt -> when servers had its group."""

    decoding: Sequence[Decoding] = ()
    recomputes: Sequence[Recompute] = ()
    served: Mapping[tuple[str, int], Window] = field(default_factory=dict)

    @property
    def tell_tokens(self) -> bool:
        """Return True if the decode spans are enough to tell what a token takes."""
        return len(self.decoding) >= _FEWEST


def read_server_times(paths: TrialPaths, begins: Sequence[float], end: float) -> ServerTimes:
    """Return the times of the servers during the last steps. ``begins``: of all steps; ``end``: of the last one."""
    windows = [(begins[-min(count, len(begins))], end) for count in _STEPS]
    window = bounded_window(paths.spans, windows, _KIND)
    return server_times(read_timeline(paths.spans, window, _KIND).spans, window)


def server_times(spans: Sequence[Span], window: Window) -> ServerTimes:
    """Return the times of the servers from their ``spans``, sorted by begin; decode spans inside ``window`` only."""
    decoding: list[Decoding] = []
    recomputes: list[Recompute] = []
    for server in sorted({span.process for span in spans}):
        own = [span for span in spans if span.process == server]
        again = _recomputes(own)
        recomputes += again
        decoding += _decoding([span for span in own if span.name == "decode"], again, window)
    decoding.sort(key=lambda each: each.begin)
    return ServerTimes(decoding[:: 1 + len(decoding) // _MOST], recomputes, _served(spans, window))


def _served(spans: Sequence[Span], window: Window) -> dict[tuple[str, int], Window]:
    """Return from when to when the servers had the completions of each attempt that began in ``window``."""
    found: dict[tuple[str, int], Window] = {}
    for span in spans:
        if attempt := attempt_of(span.unit):
            key = ticket_of(attempt), int(attempt.rpartition(".")[2])
            begin, end = found.get(key, (span.begin, span.end))
            found[key] = min(begin, span.begin), max(end, span.end)
    return {key: times for key, times in found.items() if times[0] >= window[0] and times[1] <= window[1]}


def _recomputes(spans: Sequence[Span]) -> list[Recompute]:
    """Return the caches that one server computed again. A prefill that begins at a pause is one of these."""
    pauses = [span for span in spans if span.name == "pause"]
    found: list[list[Span]] = [[] for _ in pauses]
    begins = np.array([span.begin for span in pauses])
    for span in spans:
        if span.name == "prefill" and "positions" in span.facts and len(pauses):
            k = int(np.searchsorted(begins, span.begin + _SAME_MOMENT)) - 1
            if k >= 0 and span.begin <= pauses[k].end + _SAME_MOMENT:
                found[k].append(span)
    return [
        Recompute(pause.end, max(span.end for span in again), sum(int(span.facts["positions"]) for span in again))
        for pause, again in zip(pauses, found, strict=True)
        if again and max(span.end for span in again) > pause.end
    ]


def _decoding(spans: Sequence[Span], recomputes: Sequence[Recompute], window: Window) -> list[Decoding]:
    running = _integral([(span.begin, span.end) for span in spans])
    again = _integral([(each.begin, each.end) for each in recomputes])
    found = []
    for span in spans:
        tokens = int(span.facts.get("tokens", 0))
        if tokens and span.seconds > 0 and window[0] <= span.begin and span.end <= window[1]:
            mean = (_at(running, span.end) - _at(running, span.begin)) / span.seconds
            found.append(Decoding(span.begin, span.end, tokens, mean, _at(again, span.end) - _at(again, span.begin)))
    return found


def _integral(intervals: Sequence[Window]) -> tuple[Any, Any]:
    """Return (times, integral up to them) of the number of ``intervals`` that contain a moment."""
    if not intervals:
        return np.zeros(1), np.zeros(1)
    changes = np.array([(begin, 1.0) for begin, _ in intervals] + [(end, -1.0) for _, end in intervals])
    changes = changes[np.argsort(changes[:, 0], kind="stable")]
    times, counts = changes[:, 0], np.cumsum(changes[:, 1])
    return times, np.concatenate([[0.0], np.cumsum(counts[:-1] * np.diff(times))])


def _at(integral: tuple[Any, Any], time: float) -> float:
    return float(np.interp(time, *integral))
