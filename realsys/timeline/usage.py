"""Use of both sides of a trial in a time, from spans: servers, places of RolloutWorkers, groups. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from realsys.timeline.follow import Ways
from realsys.timeline.read import Span, Window
from realsys.timeline.waits import groups_of_batch, way_of_group


@dataclass(frozen=True, slots=True)
class ServerUse:
    """Means over the servers of a trial.

    busy     share of the time in which a server computes at least one completion
    running  completions that a server computes at a time
    most     the same, the most that any server computed at a moment
    queued   completions that wait in a server
    paused   share of the time in which a server takes over weights
    staging  share of the time in which a server reads weights while it works
    """

    servers: int = 0
    busy: float = 0.0
    running: float = 0.0
    most: int = 0
    queued: float = 0.0
    paused: float = 0.0
    staging: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerUse:
    """Groups that all RolloutWorkers together play at a time, and further ones for which they wait for tickets.

    ``reasons``: reason that the manager gave for a refusal -> how often.
    """

    workers: int = 0
    playing: float = 0.0
    empty: float = 0.0
    reasons: Mapping[str, int] = field(default_factory=dict)


def server_use(spans: Iterable[Span], window: Window) -> ServerUse:
    """Return the use of the servers in ``window``."""
    by_server: dict[str, list[Span]] = {}
    for span in spans:
        if span.process.startswith("generation_server/"):
            by_server.setdefault(span.process, []).append(span)
    if not by_server or window[1] <= window[0]:
        return ServerUse()
    sums: defaultdict[str, float] = defaultdict(float)
    most = 0
    for own in by_server.values():
        computing = [span for span in own if span.name in {"prefill", "decode"}]
        sums["busy"] += _covered(computing, window)
        sums["running"] += _seconds(computing, window)
        most = max(most, _most_at_once(computing, window))
        for name, part in (("queued", "queue"), ("paused", "pause"), ("staging", "stage")):
            sums[name] += _seconds((span for span in own if span.name == part), window)
    whole = len(by_server) * (window[1] - window[0])
    return ServerUse(
        servers=len(by_server),
        busy=sums["busy"] / whole,
        running=sums["running"] / whole,
        most=most,
        queued=sums["queued"] / whole,
        paused=sums["paused"] / whole,
        staging=sums["staging"] / whole,
    )


def worker_use(spans: Iterable[Span], window: Window) -> WorkerUse:
    """Return the use of the RolloutWorkers in ``window``."""
    playing = empty = 0.0
    workers: set[str] = set()
    reasons: Counter[str] = Counter()
    for span in spans:
        if span.name == "rollout":
            playing += _overlap(span, window)
            workers.add(span.process)
        elif span.name == "allocate":
            empty += _overlap(span, window) * int(span.facts.get("wanted", 0))
            workers.add(span.process)
            if (reason := span.facts.get("reason")) and _overlap(span, window):
                reasons[str(reason)] += 1
    whole = max(window[1] - window[0], 1e-9)
    return WorkerUse(len(workers), playing / whole, empty / whole, dict(reasons))


def life_of_groups(steps: Sequence[tuple[Span, Span]], ways: Ways, since: float = float("-inf")) -> dict[str, float]:
    """Return the mean seconds of a trained group by part, from its grant to the end of its step.

    ``steps``: (step, wait) of each. Besides the parts of a wait: ``buffered`` until its batch is complete, ``trained``.
    A group whose rollout is not in the spans, or began before ``since``, is left out: its spans are not complete.
    """
    sums: defaultdict[str, float] = defaultdict(float)
    groups = [
        (attempt, step, wait)
        for step, wait in steps
        for attempt in groups_of_batch(step, ways)
        if any(span.name == "rollout" and span.begin >= since for span in ways.attempts[attempt])
    ]
    for attempt, step, wait in groups:
        for name, begin, end in way_of_group(attempt, ways):
            if name == "claim":
                sums["buffered"] += max(0.0, wait.end - begin)
            elif name != "ticket":
                sums[name] += end - begin
        sums["trained"] += step.end - wait.end
    return {name: seconds / len(groups) for name, seconds in sums.items() if seconds > 0}


def _overlap(span: Span, window: Window) -> float:
    return max(0.0, min(span.end, window[1]) - max(span.begin, window[0]))


def _seconds(spans: Iterable[Span], window: Window) -> float:
    return sum(_overlap(span, window) for span in spans)


def _covered(spans: Iterable[Span], window: Window) -> float:
    """Return the seconds of ``window`` in which at least one span runs. ``spans``: sorted by begin."""
    covered, reached = 0.0, window[0]
    for span in spans:
        begin, end = max(span.begin, reached), min(span.end, window[1])
        if end > begin:
            covered += end - begin
        reached = max(reached, end)
    return covered


def _most_at_once(spans: Iterable[Span], window: Window) -> int:
    """Return how many of ``spans`` run at the fullest moment of ``window``."""
    changes = []
    for span in spans:
        if _overlap(span, window) > 0:
            changes += [(span.begin, 1), (span.end, -1)]
    running = most = 0
    for _, change in sorted(changes):
        running += change
        most = max(most, running)
    return most
