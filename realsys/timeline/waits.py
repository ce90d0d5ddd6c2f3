"""Causes of the trainer's waits, from spans: the way of the group that completed each batch. Pure.

    trainer    |<───────────────────── wait ─────────────────────>|
    last group    ticket │ route │ queue │ prefill │ decode │ reward │ push │ claim

A batch is complete when its last group is stored. What that group did at each moment of the wait is what the trainer
waited for. So the parts of a wait add up to the wait. Within the group it is the episode that ended last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType

from realsys.manager.ledger.tickets import tickets_in
from realsys.timeline.follow import Ways
from realsys.timeline.read import Span

#: part of a wait -> what the last group was doing
WAITS: Mapping[str, str] = MappingProxyType(
    {
        "ticket": "its ticket was not granted yet",
        "route": "it waited for a server that may serve",
        "queue": "its completion waited in a server",
        "prefill": "a server computed its prompt, or computed it again after a weight update",
        "decode": "a server sampled its tokens",
        "transit": "its request was between RolloutWorker and server",
        "tool": "a tool of its agent ran",
        "agent": "its agent itself worked",
        "reward": "its verdict was computed",
        "push": "it was sent to the trainer",
        "claim": "it was stored, and the batch was claimed at the manager",
        "unknown": "its spans are not there any more",
    }
)
#: name of a span inside of an episode -> part; a later entry is more exact than an earlier one
_INSIDE = {
    "generate": "transit",
    "queue": "queue",
    "prefill": "prefill",
    "decode": "decode",
    "route": "route",
    "reward": "reward",
    "tool": "tool",
}
_RANK = {name: place for place, name in enumerate(_INSIDE)}


def parts_of_wait(wait: Span, step: Span, ways: Ways) -> dict[str, float]:
    """Return the seconds of ``wait`` by part; they add up. ``step`` has the tickets of the batch in its facts."""
    groups = groups_of_batch(step, ways)
    last = max(groups, key=lambda attempt: _stored(ways.attempts[attempt]), default=None)
    if last is None:
        return {"unknown": wait.seconds}
    parts = dict.fromkeys(WAITS, 0.0)
    for name, begin, end in way_of_group(last, ways):
        parts[name] += max(0.0, min(end, wait.end) - max(begin, wait.begin))
    # Whatever no span covers, such as the time between two processes.
    parts["unknown"] += max(0.0, wait.seconds - sum(parts.values()))
    return {name: seconds for name, seconds in parts.items() if seconds > 0}


def groups_of_batch(step: Span, ways: Ways) -> list[str]:
    """Return the attempts whose groups the batch of ``step`` has: of each ticket the one that was pushed last."""
    groups = []
    for ticket in tickets_in(str(step.facts.get("tickets", ""))):
        pushed = [
            (span.end, attempt)
            for attempt in ways.attempts_of.get(ticket, ())
            for span in ways.attempts[attempt]
            if span.name == "push" and span.begin <= step.end
        ]
        if pushed:
            groups.append(max(pushed)[1])
    return groups


def _stored(spans: Iterable[Span]) -> float:
    """Return when the group of an attempt was stored: at its notice, or else at the end of its push."""
    ends = {span.name: span.end for span in spans}
    return ends.get("receive", ends.get("push", 0.0))


def way_of_group(attempt: str, ways: Ways) -> list[tuple[str, float, float]]:
    """Split all of time by what the group of an attempt did: (part, begin, end), without overlaps."""
    own = ways.attempts[attempt]
    push = max((span for span in own if span.name == "push"), key=lambda span: span.end)
    stored = max(push.begin, min(_stored(own), push.end))
    episodes = [ways.episodes[episode] for episode in ways.episodes_of.get(attempt, ())]
    rollout = [span.begin for span in own if span.name == "rollout"]
    # A RolloutWorker that was killed has not recorded its rollout: nothing tells when the ticket was granted.
    before = "ticket" if rollout else "unknown"
    begin = min([*rollout, *(span.begin for spans in episodes for span in spans if not rollout), push.begin])
    pieces = [(before, float("-inf"), begin), ("push", push.begin, stored), ("claim", stored, float("inf"))]
    if not episodes:
        return [*pieces, ("unknown", begin, push.begin)]
    last = max(episodes, key=lambda spans: max(span.end for span in spans))
    return [*pieces, *split(last, begin, push.begin)]


def split(spans: Sequence[Span], begin: float, end: float) -> list[tuple[str, float, float]]:
    """Split ``begin`` to ``end`` by the spans of an episode: at each moment the most exact one; else ``agent``."""
    inside = [span for span in spans if span.name in _INSIDE]
    cuts = sorted({begin, end, *(t for span in inside for t in (span.begin, span.end) if begin < t < end)})
    pieces = []
    for left, right in pairwise(cuts):
        middle = (left + right) / 2
        names = [span.name for span in inside if span.begin <= middle < span.end]
        part = _INSIDE[max(names, key=_RANK.__getitem__)] if names else "agent"
        pieces.append((part, left, right))
    return pieces
