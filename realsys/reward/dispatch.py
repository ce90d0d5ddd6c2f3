"""Dispatch: which reward service gets which items, and when. Pure: time and randomness are arguments.

    add ──> lot ──take──> Send ──accepted──> decided ──> Settled
             ^             │ refused: the service is full ────────> in front of its lot; the service is left alone
             ├─────────────┤ lost: the service died or is silent ─> another service; it is left alone, then tried
             └─────────────┘ no verdict, the first time ──────────> another service judges it

A lot holds the items that may travel together: same work, same services to avoid. Events are methods; ``take``,
``expire`` and the returned Settled are the effects. Invariants, with those of a service below:

one-end             an item is settled or dropped once; until then it is in one lot or in one Send
another-service     an item without a verdict is judged once more, by another service if one is there
error-is-not-data   an item that was the only one at a service that died, after two others died with it, fails
bounded-wait        an item ends after ``retry_timeout_s`` without an answer of a service, or after ``total_timeout_s``
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import Random

from realsys.reward.verifier_protocol import DIED, MAX_ITEMS, REFUSED, Decided, NoVerdict, NoVerifier, VerifierWork
from realsys.reward.verifiers.contract import Verdict

FEWEST = 16  # items of a Send, if that many wait: one request costs more than the verdicts of a fast verifier
MOST_BYTES = 8 << 20  # bytes of the items of one Send, unless a single item is larger
JUDGEMENTS = 2  # an item without a verdict is judged this often
ALONE_AFTER, MOST_LOSSES = 2, 3  # services that died with an item


@dataclass(frozen=True, slots=True)
class DispatchBounds:
    """Bounds on the wait of an item.

    retry_timeout_s  without an answer of any service
    total_timeout_s  for a service, while they answer that they are full
    """

    retry_timeout_s: float
    total_timeout_s: float


@dataclass(frozen=True, slots=True)
class Lot:
    """Key of a queue. ``avoid``: names of the services that failed these items. ``alone``: one in each Send."""

    work: VerifierWork
    avoid: frozenset[str] = frozenset()
    alone: bool = False


@dataclass(eq=False, slots=True)
class DispatchEntry:
    """One item. ``since``: when it began to wait for a service; ``gone``: it was dropped or settled."""

    number: int
    work: VerifierWork
    item: bytes
    added: float
    since: float
    judged: int = 0  # judgements without a verdict
    unable: int = 0  # services that could not judge it
    losses: int = 0  # services that died with it
    avoid: frozenset[str] = frozenset()
    gone: bool = False
    send: Send | None = None


@dataclass(eq=False, slots=True)
class Send:
    """Items of one request, by their index."""

    number: int
    instance: Instance
    work: VerifierWork
    entries: dict[int, DispatchEntry]  # those that are not decided


@dataclass(frozen=True, slots=True)
class Settled:
    """The end of an item."""

    number: int
    outcome: Verdict | NoVerdict | NoVerifier
    over_limit: bool = False


class Dispatch:
    """The items of one client. All times are seconds on one clock that only advances."""

    def __init__(self, bounds: DispatchBounds, random: Random, now: float) -> None:
        self.waiting = 0  # items that no service has
        self._bounds = bounds
        self._random = random
        self._heard_at = now  # last answer of any service
        self._numbers = itertools.count()
        self._instances: dict[str, Instance] = {}
        self._lots: dict[Lot, deque[DispatchEntry]] = {}  # the first is served next
        self._entries: dict[int, DispatchEntry] = {}  # not ended
        self._sends: dict[int, Send] = {}

    # ---- events

    def add(self, number: int, work: VerifierWork, item: bytes, now: float) -> None:
        """An item wants a verdict."""
        entry = self._entries[number] = DispatchEntry(number, work, item, now, now)
        self._put(entry)

    def drop(self, number: int) -> int | None:
        """Forget an item. Returns the number of a Send that must be aborted, because it has no other items."""
        entry = self._entries.pop(number, None)
        if entry is None:
            return None
        entry.gone = True
        send = entry.send
        if send is None:
            self.waiting -= 1
            entry.item = b""  # its place in the lot stays until its turn
            return None
        if all(each.gone for each in send.entries.values()):
            self._close(send)
            return send.number
        return None

    def registered(self, addresses: Mapping[str, tuple[str, str]]) -> None:
        """These services are in the name store: name -> (url, incarnation). A new incarnation is a new service."""
        before = self._instances
        self._instances = {}
        for name, address in addresses.items():
            old = before.get(name)
            same = old is not None and (old.url, old.incarnation) == address
            self._instances[name] = old if old is not None and same else Instance(name, *address)

    def accepted(self, number: int, now: float) -> None:
        """The service of a Send has begun to answer it."""
        if (send := self._sends.get(number)) is not None:
            self._heard_at = now
            send.instance.accept(number)

    def decided(self, number: int, decided: Iterable[Decided], now: float) -> list[Settled]:
        """The service of a Send has decided these items."""
        self.accepted(number, now)
        send, settled = self._sends.get(number), []
        for each in decided if send else ():
            assert send is not None
            if (entry := send.entries.pop(each.index, None)) is None:
                continue
            send.instance.outstanding -= 1
            entry.send = None
            if not entry.gone and (end := self._outcome(entry, send.instance, each, now)) is not None:
                settled.append(end)
        if send is not None and not send.entries:
            self._close(send)
        return settled

    def refused(self, number: int, retry_after_s: float, reason: str, now: float) -> None:
        """A service is full. The items wait in front of the others, and the time since when they wait stays."""
        if (send := self._sends.get(number)) is not None:
            self._heard_at = now
            send.instance.full(retry_after_s, reason, now, self._random.random())
            for entry in reversed(self._close(send)):
                self._put(entry, first=True)

    def lost(self, number: int, reason: str, now: float, *, died: bool) -> list[Settled]:
        """A Send has no answer. ``died``: its connection broke, so that one of its items may be the cause."""
        settled: list[Settled] = []
        if (send := self._sends.get(number)) is None:
            return settled
        send.instance.fail(reason, now, self._random.random())
        for entry in self._close(send):
            entry.losses += died
            if entry.losses < MOST_LOSSES:
                self._again(entry, send.instance, now)
            else:
                problem = f"{entry.losses} reward services died while they judged it; the last one: {reason}"
                settled.append(self._settle(entry, NoVerdict(DIED, problem)))
        return settled

    def rejected(self, number: int, problem: str) -> list[Settled]:
        """A service has refused a Send for good. Another one would, too."""
        send = self._sends.get(number)
        return [self._settle(entry, NoVerifier(problem)) for entry in self._close(send)] if send else []

    # ---- effects

    def take(self, now: float) -> list[Send]:
        """Return the requests that must be made now. Lots take turns."""
        sends: list[Send] = []
        found = True
        while found and self.waiting:
            found = False
            for lot in list(self._lots):
                if (send := self._next(lot, now)) is not None:
                    sends.append(send)
                    found = True
        return sends

    def expire(self, now: float) -> list[Settled]:
        """End the items that have waited too long."""
        settled = []
        for lot, entries in list(self._lots.items()):
            while entries and (entries[0].gone or now >= self._deadline(entries[0])):
                if not (entry := entries.popleft()).gone:
                    self.waiting -= 1
                    problems = [f"{each.name}: {each.problem or 'no room'}" for each in self._instances.values()]
                    why = "; ".join(problems) or "none is in the name store"
                    settled.append(
                        self._settle(entry, NoVerifier(f"waited {now - entry.since:.0f} s for a reward service: {why}"))
                    )
            if not entries:
                del self._lots[lot]
        return settled

    def due(self, now: float) -> float | None:
        """Return when ``take`` or ``expire`` has something to do without another event; None: never."""
        if not self.waiting:
            return None
        times = [self._deadline(entries[0]) for entries in self._lots.values()]
        times += [each.blocked_until for each in self._instances.values() if each.blocked_until > now]
        return min(times)

    # ---- rules

    def _next(self, lot: Lot, now: float) -> Send | None:
        """Give items of one lot to the service with the fewest items, if one has room."""
        entries = self._lots[lot]
        while entries and entries[0].gone:
            entries.popleft()
        if not entries:
            del self._lots[lot]
            return None
        # those to avoid are among them only if all others are away
        room = [each for each in self._instances.values() if each.room(now)]
        choice = [each for each in room if each.name not in lot.avoid] if self._has_other(lot.avoid, now) else room
        if not choice:
            return None
        instance = min(choice, key=lambda each: (each.outstanding, self._random.random()))
        share = 1 if lot.alone else max(FEWEST, -(-len(entries) // len(choice)))
        batch = _batch(entries, min(share, MAX_ITEMS, instance.room(now)))
        del self._lots[lot]
        if entries:
            self._lots[lot] = entries  # behind the others
        self.waiting -= len(batch)
        send = Send(next(self._numbers), instance, lot.work, dict(enumerate(batch)))
        for entry in batch:
            entry.send = send
        self._sends[send.number] = send
        instance.begin(send.number, len(batch))
        return send

    def _has_other(self, avoid: frozenset[str], now: float) -> bool:
        return any(each.name not in avoid and not each.is_away(now) for each in self._instances.values())

    def _outcome(self, entry: DispatchEntry, instance: Instance, decided: Decided, now: float) -> Settled | None:
        """Return the end of an item, or None if it is judged again."""
        outcome = decided.outcome
        again = False
        if isinstance(outcome, NoVerifier):
            instance.fail(outcome.message, now, self._random.random())
            entry.unable += 1
            again = entry.unable < JUDGEMENTS and self._has_other(frozenset([instance.name]), now)
        elif isinstance(outcome, NoVerdict) and outcome.cause != REFUSED:
            entry.judged += 1
            again = entry.judged < JUDGEMENTS
        if not again:
            return self._settle(entry, outcome, decided.over_limit)
        self._again(entry, instance, now)
        return None

    def _again(self, entry: DispatchEntry, instance: Instance, now: float) -> None:
        entry.avoid, entry.since = entry.avoid | {instance.name}, now
        self._put(entry)

    def _put(self, entry: DispatchEntry, *, first: bool = False) -> None:
        lot = Lot(entry.work, entry.avoid, entry.losses >= ALONE_AFTER)
        entries = self._lots.setdefault(lot, deque())
        if first:
            entries.appendleft(entry)
        else:
            entries.append(entry)
        self.waiting += 1

    def _close(self, send: Send) -> list[DispatchEntry]:
        """End a Send. Returns the items that still want a verdict."""
        del self._sends[send.number]
        send.instance.end(send.number, len(send.entries))
        for entry in send.entries.values():
            entry.send = None
        return [entry for entry in send.entries.values() if not entry.gone]

    def _settle(
        self, entry: DispatchEntry, outcome: Verdict | NoVerdict | NoVerifier, over_limit: bool = False
    ) -> Settled:
        entry.gone = True
        del self._entries[entry.number]
        return Settled(entry.number, outcome, over_limit)

    def _deadline(self, entry: DispatchEntry) -> float:
        unheard = max(entry.since, self._heard_at) + self._bounds.retry_timeout_s
        return min(unheard, entry.added + self._bounds.total_timeout_s)


def _batch(entries: deque[DispatchEntry], most: int) -> list[DispatchEntry]:
    """Take up to ``most`` items, and at most MOST_BYTES unless the first one alone has more."""
    batch: list[DispatchEntry] = []
    size = 0
    while entries and len(batch) < most:
        if not entries[0].gone:
            size += len(entries[0].item)
            if batch and size > MOST_BYTES:
                break
            batch.append(entries[0])
        entries.popleft()
    return batch


# ---- one reward service, as a client sees it. Pure: time and randomness are arguments
#
#     well ──full──> left alone ──delay──> one Send on trial ──accepted──> well
#       └───failed──────^  ^                      │ full, failed
#                          └──────────────────────┘
#
# bounded-window   a service has at most ``WINDOW`` items of this client
# left-alone       a service that was full, died or cannot judge gets nothing until its delay is over, and then one Send
#                  until that is accepted


WINDOW = 2 * MAX_ITEMS  # items of one client at one service
FIRST_DELAY_S, LAST_DELAY_S = 0.5, 10.0  # a service is left alone for this time, which doubles


@dataclass(eq=False, slots=True)
class Instance:
    """State of one service. ``jitter``: random, from 0 to 1, so that clients do not try again at the same moment."""

    name: str
    url: str
    incarnation: str
    outstanding: int = 0  # items
    refusals: int = 0  # refusals in a row
    failures: int = 0  # failures in a row
    blocked_until: float = 0.0
    trial: int = -1  # number of the Send on trial
    problem: str = ""  # last refusal or failure

    def is_away(self, now: float) -> bool:
        """Return True if it died or cannot judge, and its delay is not over."""
        return self.failures > 0 and now < self.blocked_until

    def room(self, now: float) -> int:
        """Return how many more items it may get."""
        if now < self.blocked_until or self.trial >= 0:
            return 0
        return max(0, WINDOW - self.outstanding)

    def begin(self, send: int, items: int) -> None:
        """It gets these items."""
        self.outstanding += items
        if self.refusals or self.failures:
            self.trial = send

    def accept(self, send: int) -> None:
        """It has begun to answer a Send."""
        self.failures = 0
        if self.trial == send:
            self.trial = -1
            self.refusals = 0

    def end(self, send: int, items: int) -> None:
        """A Send is over. ``items``: those that were not decided."""
        self.outstanding -= items
        if self.trial == send:
            self.trial = -1

    def full(self, retry_after_s: float, problem: str, now: float, jitter: float) -> None:
        """It has refused a Send for load."""
        if now >= self.blocked_until:  # else this is another answer to the same load
            self.refusals += 1
        self._leave_alone(self.refusals, retry_after_s, problem, now, jitter)

    def fail(self, problem: str, now: float, jitter: float) -> None:
        """It died, is silent, or has said that it cannot judge."""
        if not self.is_away(now):
            self.failures += 1
        self._leave_alone(self.failures, 0.0, problem, now, jitter)

    def _leave_alone(self, times: int, least_s: float, problem: str, now: float, jitter: float) -> None:
        delay_s = min(LAST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(times - 1, 16))
        self.blocked_until = max(self.blocked_until, now + max(least_s, delay_s) * (1.0 + jitter / 2))
        self.problem = problem
