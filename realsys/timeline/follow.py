"""The way of an episode through all processes. Pure.

grant ──> rollout ──> episode ──> generate ──> queue, prefill, decode on a server ──> reward, tool ──> push
(manager)  (RolloutWorker)                     (GenerationServer)                     (RolloutWorker)  │
    ┌──────────────────────────────────────────────────────────────────────────────────────────────────┘
    └──> receive ──> step ──> call ──> publish ──> pause
         (ModelWorker) (MasterWorker) (ModelWorker) (MasterWorker) (GenerationServer)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from realsys.manager.ledger.tickets import tickets_in
from realsys.timeline.read import Span
from realsys.timeline.units import attempt_of, completion_of, number_of, ticket_of

_OF_ATTEMPT = frozenset({"grant", "rollout", "push", "finish", "receive"})
_ORDER = {name: place for place, name in enumerate(("grant", "rollout", "episode", "generate", "queue"))}


@dataclass(slots=True)
class Trained:
    """A train step and the spans that follow it, in order. ``step`` has the tickets in its facts."""

    step: Span
    calls: list[Span] = field(default_factory=list)  # that train, on ModelWorkers
    publish: Span | None = None
    pauses: list[Span] = field(default_factory=list)  # servers that take over its version


@dataclass(slots=True)
class Ways:
    """Spans by attempt, episode and ticket."""

    attempts: dict[str, list[Span]] = field(default_factory=dict)  # ticket.attempt -> its own spans
    episodes: dict[str, list[Span]] = field(default_factory=dict)  # ticket.attempt/episode -> its own spans
    trained: dict[str, Trained] = field(default_factory=dict)  # ticket -> the step that trained it
    attempts_of: dict[str, list[str]] = field(default_factory=dict)  # ticket -> its attempts
    episodes_of: dict[str, list[str]] = field(default_factory=dict)  # ticket.attempt -> its episodes

    def of_episode(self, episode: str) -> list[Span]:
        """Return the spans of an episode and of what its group becomes, in order of their begin."""
        attempt = attempt_of(episode)
        before = [span for span in self.attempts.get(attempt, []) if span.name != "finish"]
        own = sorted([*before, *self.episodes.get(episode, [])], key=_place)
        return [*own, *self._after(attempt)]

    def of_ticket(self, ticket: str) -> list[Span]:
        """Return all spans of a ticket: its attempts, their episodes, its step and the version of that step."""
        attempts = self.attempts_of.get(ticket, [])
        spans = [span for attempt in attempts for span in self.attempts[attempt]]
        spans += [span for a in attempts for episode in self.episodes_of.get(a, []) for span in self.episodes[episode]]
        if (trained := self.trained.get(ticket)) is not None:
            spans += [trained.step, *trained.calls, *_present(trained.publish), *trained.pauses]
        return sorted(spans, key=lambda span: (span.begin, -span.end))

    def _after(self, attempt: str) -> list[Span]:
        """Return step, call, publication and one pause. Only an attempt that was received can be the trained one."""
        trained = self.trained.get(ticket_of(attempt))
        own = self.attempts.get(attempt, [])
        if trained is None or not any(span.name == "push" for span in own):
            return []
        receivers = {span.process for span in own if span.name == "receive"}
        calls = [span for span in trained.calls if span.process in receivers] or trained.calls
        return [trained.step, *calls[-1:], *_present(trained.publish), *trained.pauses[:1]]


def ways_of(spans: Sequence[Span]) -> Ways:
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


def _trained(spans: Sequence[Span]) -> Iterator[tuple[str, Trained]]:
    """Yield (ticket, its step). A step that was undone and trained again counts with its last time."""
    steps: dict[int, Trained] = {}
    for span in spans:
        number = number_of(span.unit, "step")
        if span.name == "step" and number is not None and "tickets" in span.facts:
            steps[number] = Trained(span)
    for span in spans:
        match span.name:
            case "call" if (number := number_of(span.unit, "step")) in steps and _is_training(span):
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


def _is_training(span: Span) -> bool:
    return span.process.startswith("model_worker") and str(span.facts.get("call", "")).endswith("_train")


def _place(span: Span) -> tuple[float, int]:
    return span.begin, _ORDER.get(span.name, len(_ORDER))


def _present(span: Span | None) -> list[Span]:
    return [] if span is None else [span]


def ticket_named(text: str) -> str:
    """Return the ticket that a user means by ``text``: an id, its number, ``ticket.attempt`` or an episode."""
    ticket = ticket_of(attempt_of(text)) or text
    return ticket.zfill(10) if ticket.isdigit() else ticket
