"""The way of an episode through all processes, and the causes of the trainer's waits. Pure.

grant ──> rollout ──> episode ──> generate ──> queue, prefill, decode on a server ──> reward, tool ──> push
(manager)  (RolloutWorker)                     (GenerationServer)                     (RolloutWorker)  │
    ┌──────────────────────────────────────────────────────────────────────────────────────────────────┘
    └──> receive ──> step ──> call ──> publish ──> pause
         (ModelWorker) (MasterWorker) (ModelWorker) (MasterWorker) (GenerationServer)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType

from realsys.manager.ledger.tickets import tickets_in
from realsys.observe.timeline.clocked_spans import TimelineSpan, attempt_of, completion_of, number_of, ticket_of

_OF_ATTEMPT = frozenset({"grant", "rollout", "push", "finish", "receive"})
_ORDER = {name: place for place, name in enumerate(("grant", "rollout", "episode", "generate", "queue"))}


@dataclass(slots=True)
class TrainedIn:
    """A train step and the spans that follow it, in order. ``step`` has the tickets in its facts."""

    step: TimelineSpan
    calls: list[TimelineSpan] = field(default_factory=list)  # that train, on ModelWorkers
    publish: TimelineSpan | None = None
    pauses: list[TimelineSpan] = field(default_factory=list)  # servers that take over its version


@dataclass(slots=True)
class Ways:
    """Spans by attempt, episode and ticket."""

    attempts: dict[str, list[TimelineSpan]] = field(default_factory=dict)  # ticket.attempt -> its own spans
    episodes: dict[str, list[TimelineSpan]] = field(default_factory=dict)  # ticket.attempt/episode -> its own spans
    trained: dict[str, TrainedIn] = field(default_factory=dict)  # ticket -> the step that trained it
    attempts_of: dict[str, list[str]] = field(default_factory=dict)  # ticket -> its attempts
    episodes_of: dict[str, list[str]] = field(default_factory=dict)  # ticket.attempt -> its episodes

    def of_episode(self, episode: str) -> list[TimelineSpan]:
        """Return the spans of an episode and of what its group becomes, in order of their begin."""
        attempt = attempt_of(episode)
        before = [span for span in self.attempts.get(attempt, []) if span.name != "finish"]
        own = sorted([*before, *self.episodes.get(episode, [])], key=_place)
        return [*own, *self._after(attempt)]

    def of_ticket(self, ticket: str) -> list[TimelineSpan]:
        """Return all spans of a ticket: its attempts, their episodes, its step and the version of that step."""
        attempts = self.attempts_of.get(ticket, [])
        spans = [span for attempt in attempts for span in self.attempts[attempt]]
        spans += [span for a in attempts for episode in self.episodes_of.get(a, []) for span in self.episodes[episode]]
        if (trained := self.trained.get(ticket)) is not None:
            spans += [trained.step, *trained.calls, *_present(trained.publish), *trained.pauses]
        return sorted(spans, key=lambda span: (span.begin, -span.end))

    def _after(self, attempt: str) -> list[TimelineSpan]:
        """Return step, call, publication and one pause. Only an attempt that was received can be the trained one."""
        trained = self.trained.get(ticket_of(attempt))
        own = self.attempts.get(attempt, [])
        if trained is None or not any(span.name == "push" for span in own):
            return []
        receivers = {span.process for span in own if span.name == "receive"}
        calls = [span for span in trained.calls if span.process in receivers] or trained.calls
        return [trained.step, *calls[-1:], *_present(trained.publish), *trained.pauses[:1]]


def ways_of(spans: Sequence[TimelineSpan]) -> Ways:
    """Sort spans by attempt, episode and ticket."""
    ways = Ways()
    for span in spans:
        if span.name in _OF_ATTEMPT:
            if attempt := attempt_of(span.unit):
                ways.attempts.setdefault(attempt, []).append(span)
        elif (completion := completion_of(span.unit)) is not None:
            ways.episodes.setdefault(completion.unit, []).append(span)
        elif attempt_of(span.unit):
            ways.episodes.setdefault(span.unit, []).append(span)
    for attempt in ways.attempts:
        ways.attempts_of.setdefault(ticket_of(attempt), []).append(attempt)
    for episode in ways.episodes:
        ways.episodes_of.setdefault(attempt_of(episode), []).append(episode)
    ways.trained = dict(_trained(spans))
    return ways


def _trained(spans: Sequence[TimelineSpan]) -> Iterator[tuple[str, TrainedIn]]:
    """Yield (ticket, its step). A step that was undone and trained again counts with its last time."""
    steps: dict[int, TrainedIn] = {}
    for span in spans:
        number = number_of(span.unit, "step")
        if span.name == "step" and number is not None and "tickets" in span.facts:
            steps[number] = TrainedIn(span)
    for span in spans:
        match span.name:
            case "call" if (number := number_of(span.unit, "step")) in steps and (
                span.process.startswith("model_worker") and str(span.facts.get("call", "")).endswith("_train")
            ):
                if span.begin >= steps[number].step.begin:
                    steps[number].calls.append(span)
            case "publish" if (number := number_of(span.unit, "version")) in steps:
                steps[number].publish = span
            case "pause" if (number := number_of(span.unit, "version")) in steps:
                if span.begin >= steps[number].step.begin:
                    steps[number].pauses.append(span)
    # A step that a roll back undid may have had tickets of a later step with a lower number: the last in time counts.
    for trained in sorted(steps.values(), key=lambda trained: trained.step.begin):
        for ticket in tickets_in(str(trained.step.facts["tickets"])):
            yield ticket, trained


def _place(span: TimelineSpan) -> tuple[float, int]:
    return span.begin, _ORDER.get(span.name, len(_ORDER))


def _present(span: TimelineSpan | None) -> list[TimelineSpan]:
    return [] if span is None else [span]


def ticket_named(text: str) -> str:
    """Return the ticket that a user means by ``text``: an id, its number, ``ticket.attempt`` or an episode."""
    ticket = ticket_of(attempt_of(text)) or text
    return ticket.zfill(10) if ticket.isdigit() else ticket


# ---- causes of the trainer's waits: the way of the group that completed each batch
#
#     trainer    |<───────────────────── wait ─────────────────────>|
#     last group    ticket │ route │ queue │ prefill │ decode │ reward │ push │ claim
#
# A batch is complete when its last group is stored. What that group did at each moment of the wait is what the trainer
# waited for. So the parts of a wait add up to the wait. Within the group it is the episode that ended last.


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


def parts_of_wait(wait: TimelineSpan, step: TimelineSpan, ways: Ways) -> dict[str, float]:
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


def groups_of_batch(step: TimelineSpan, ways: Ways) -> list[str]:
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


def _stored(spans: Iterable[TimelineSpan]) -> float:
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


def split(spans: Sequence[TimelineSpan], begin: float, end: float) -> list[tuple[str, float, float]]:
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
