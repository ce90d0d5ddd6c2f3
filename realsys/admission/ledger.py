"""The rollout ledger: where every train ticket is, as a pure function of events.

                grant                     finish accepted            trained
    waiting ────────────> running ───────────────────────> finished ─────────> trained at version k
       ^                  │  │  └── finish rejected/failed ──> dropped(reason)     (also from running and waiting:
       └── failed, lost ──┘  └──────────── trained ─────────> trained               the group may outrun its finish)

Every ticket ends exactly once. Decisions (``grant``, ``finish``, ...) check, apply and return events; ``apply`` alone
replays a journal. ``counted`` is N of the admission inequality without the candidate: running + finished + trained,
and in a trial that continues from a checkpoint the groups that were trained before it.
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from realsys.admission.events import Dropped, Finished, Granted, Outcome, Reissued, Resumed, TicketEvent, Trained
from realsys.admission.messages import DataPosition
from realsys.admission.order import PromptOrder
from realsys.errors import LedgerError

OpenState = Literal["running", "finished", "waiting"]

_OPEN, _FIRST_REASON = -1, -2  # outcome codes; a version >= 0 means trained, <= -2 dropped for reason -2 - code
MAX_REASONS = 64  # distinct drop reasons counted by name; a worker's free text must not grow the table for ever


def ticket_name(number: int) -> str:
    """Lexical order of ticket ids is grant order."""
    return f"{number:010d}"


@dataclass(slots=True)
class OpenTicket:
    """A ticket that has not ended."""

    ticket_id: str
    prompt_index: int
    attempt: int
    worker: str
    incarnation: str
    version: int
    news_at: float  # last sign of life; the lease runs from here
    failures: int = 0
    state: OpenState = "running"


@dataclass(slots=True)
class LedgerCounts:
    """Numbers of tickets by state, of drops by reason and of re-issues by cause."""

    inherited: int = 0  # groups trained before the checkpoint that this trial continues from; they have no ticket here
    granted: int = 0  # tickets
    attempts: int = 0
    open: dict[OpenState, int] = field(default_factory=lambda: {"running": 0, "finished": 0, "waiting": 0})
    trained: int = 0
    dropped: int = 0
    dropped_by_reason: Counter[str] = field(default_factory=Counter)
    reissued_by_cause: Counter[str] = field(default_factory=Counter)
    anomalies: Counter[str] = field(default_factory=Counter)

    @property
    def counted(self) -> int:
        """N of the admission inequality without the candidate."""
        return self.inherited + self.open["running"] + self.open["finished"] + self.trained

    def by_state(self) -> dict[str, int]:
        """Tickets in each state; the sum is ``granted``."""
        states: dict[str, int] = {state: number for state, number in self.open.items()}  # noqa: C416 (wider key type)
        return states | {"trained": self.trained, "dropped": self.dropped}


@dataclass(frozen=True, slots=True)
class Finish:
    """What ``finish`` decided. ``event`` is None when nothing changed."""

    known: bool
    retry: bool = False
    event: Finished | None = None


def label(text: str) -> str:
    """The countable part of a reason: what stands before the first colon, one line, at most 48 characters."""
    return " ".join(text.split(":", 1)[0].split())[:48] or "unnamed"


class Ledger:
    """State of all train tickets. Memory: 16 bytes per ended ticket."""

    def __init__(self, order: PromptOrder, max_attempts: int) -> None:
        self._order, self._max_attempts = order, max_attempts
        self.open: dict[str, OpenTicket] = {}
        self.counts = LedgerCounts()
        self.cursor = 0  # position of the next new prompt
        self._reissue: list[str] = []  # heap of waiting ticket ids; stale entries are skipped
        self._prompts: deque[int] = deque()  # given back by stale drops, or pending at the checkpoint
        self._outcome, self._attempt, self._prompt = array("i"), array("i"), array("q")
        self._reasons: list[str] = []

    # -- questions ---------------------------------------------------------------------------------------------------

    @property
    def counted(self) -> int:
        """N without the candidate: running + finished + trained, here or before the checkpoint."""
        return self.counts.counted

    @property
    def epoch(self) -> int:
        """Passes over the prompts begun, from 0."""
        return self.cursor // self._order.size

    @property
    def exhausted(self) -> bool:
        """Nothing waits and the epochs are used up."""
        return not self.counts.open["waiting"] and not self._prompts and self._order.at(self.cursor) is None

    def position(self) -> DataPosition:
        """Where in the data this is: what a later trial must issue to miss no prompt and repeat none."""
        pending = [self.open[ticket_id].prompt_index for ticket_id in sorted(self.open)]
        return DataPosition(self.cursor, [*pending, *self._prompts], self._order.size, self._order.seed)

    def running(self) -> Iterator[OpenTicket]:
        return (ticket for ticket in self.open.values() if ticket.state == "running")

    def is_running(self, ticket_id: str, attempt: int) -> bool:
        ticket = self.open.get(ticket_id)
        return ticket is not None and ticket.state == "running" and ticket.attempt == attempt

    def ended(self, ticket_id: str) -> str | None:
        """``trained@k``, ``dropped: reason``, or None while open or unknown."""
        number = self._number(ticket_id)
        code = _OPEN if number is None else self._outcome[number]
        if code == _OPEN:
            return None
        return f"trained@{code}" if code >= 0 else f"dropped: {self._reasons[_FIRST_REASON - code]}"

    def touch(self, ticket_id: str, attempt: int, now: float) -> bool:
        """News of a running attempt renews its lease. False if it is not running (any more)."""
        if not self.is_running(ticket_id, attempt):
            return False
        self.open[ticket_id].news_at = now
        return True

    # -- decisions: each applies the events it returns ---------------------------------------------------------------

    def grant(self, worker: str, incarnation: str, version: int, now: float, request: str = "") -> Granted | None:
        """The next attempt: lost and failed tickets first, oldest first; then given-back prompts; then new ones."""
        found = self._next()
        if found is None:
            return None
        event = Granted(*found, worker, incarnation, version, now, request)
        self.apply(event)
        return event

    def finish(self, ticket_id: str, attempt: int, outcome: Outcome, reason: str, now: float) -> Finish:
        """End of an attempt. Not known if superseded or never granted; a repetition is known and changes nothing."""
        number = self._number(ticket_id)
        if number is None or self._attempt[number] != attempt:
            return Finish(known=False)
        ticket = self.open.get(ticket_id)
        if ticket is None or ticket.state == "finished":
            return Finish(known=True)
        if ticket.state == "waiting":
            # The attempt failed before (a repetition) or its lease lapsed; another attempt is under way either way.
            return Finish(known=False, retry=True)
        retry = outcome == "failed" and ticket.failures + 1 < self._max_attempts
        event = Finished(ticket_id, attempt, outcome, reason[:512], retry, now)
        self.apply(event)
        return Finish(known=True, retry=retry, event=event)

    def trained(self, version: int, step: int, tickets: list[str], now: float) -> Trained | None:
        """These are in the weights now. Repetitions are left out; None when nothing is left."""
        fresh = []
        for ticket_id in dict.fromkeys(tickets):
            number = self._number(ticket_id)
            if number is None:
                self.counts.anomalies["trained unknown ticket"] += 1
            elif self._outcome[number] < 0:
                fresh.append(ticket_id)
        if not fresh:
            return None
        event = Trained(version, step, fresh, now)
        self.apply(event)
        return event

    def drop(self, ticket_id: str, reason: str, now: float, *, requeue: bool = False) -> Dropped | None:
        """The trainer gave a group back. None if the ticket has ended already."""
        if ticket_id not in self.open:
            if self._number(ticket_id) is None:
                self.counts.anomalies["dropped unknown ticket"] += 1
            return None
        event = Dropped(ticket_id, reason[:512], requeue, now)
        self.apply(event)
        return event

    def lose(self, lost: Callable[[OpenTicket], bool], cause: str, now: float) -> list[Reissued]:
        """Re-issue every running ticket for which ``lost`` holds."""
        events = [Reissued(t.ticket_id, t.attempt, cause, now) for t in self.running() if lost(t)]
        for event in events:
            self.apply(event)
        return events

    def roll_back(self, version: int, now: float) -> list[Reissued]:
        """Training restarts from the checkpoint of ``version``: what was trained later, or only buffered, is lost."""
        events = [
            Reissued(ticket_name(number), self._attempt[number], "rolled back", now)
            for number, outcome in enumerate(self._outcome)
            if outcome > version
        ]
        events += [
            Reissued(t.ticket_id, t.attempt, "rolled back", now) for t in self.open.values() if t.state == "finished"
        ]
        for event in events:
            self.apply(event)
        return events

    # -- transitions -------------------------------------------------------------------------------------------------

    def apply(self, event: TicketEvent) -> None:
        """One event. Raises LedgerError if it cannot follow the ones before (a journal of another trial, or damage)."""
        match event:
            case Resumed():
                self._apply_resumed(event)
            case Granted():
                self._apply_granted(event)
            case Finished():
                self._apply_finished(event)
            case Reissued():
                self._apply_reissued(event)
            case Dropped():
                self._end(self._open(event.ticket_id, event), self._reason_code(event.reason))
                if event.requeue:
                    self._prompts.append(self._prompt[int(event.ticket_id)])
            case Trained():
                self._apply_trained(event)

    def _apply_resumed(self, event: Resumed) -> None:
        if self.counts.granted or self.counts.inherited or self.cursor:
            raise LedgerError(f"ledger: {event.checkpoint} can only be resumed by a new trial, before its first ticket")
        self.counts.inherited, self.cursor = event.groups, event.cursor
        self._prompts.extend(event.pending)

    def _apply_granted(self, event: Granted) -> None:
        ticket = self.open.get(event.ticket_id)
        if ticket is not None:
            if ticket.state != "waiting" or event.attempt != ticket.attempt + 1:
                raise LedgerError(f"ledger: {event} cannot follow {ticket}")
            ticket.attempt, ticket.worker, ticket.incarnation = event.attempt, event.worker, event.incarnation
            ticket.version, ticket.news_at = event.version, event.time
            self._attempt[int(event.ticket_id)] = event.attempt
            self._move(ticket, "running")
        else:
            if event.ticket_id != ticket_name(len(self._outcome)) or event.attempt != 0:
                raise LedgerError(f"ledger: {event}: expected ticket {ticket_name(len(self._outcome))}, attempt 0")
            if event.position >= 0:
                self.cursor = event.position + 1
            elif self._prompts:
                self._prompts.popleft()
            self._outcome.append(_OPEN)
            self._attempt.append(0)
            self._prompt.append(event.prompt_index)
            self.open[event.ticket_id] = OpenTicket(
                event.ticket_id, event.prompt_index, 0, event.worker, event.incarnation, event.version, event.time
            )
            self.counts.granted += 1
            self.counts.open["running"] += 1
        self.counts.attempts += 1

    def _apply_finished(self, event: Finished) -> None:
        ticket = self._open(event.ticket_id, event)
        if event.outcome == "accepted":
            self._move(ticket, "finished")
        elif event.outcome == "rejected":
            self._end(ticket, self._reason_code(f"rejected {label(event.reason)}" if event.reason else "rejected"))
        elif event.retry:
            ticket.failures += 1
            self._wait(ticket, "failed")
        else:
            self._end(ticket, self._reason_code(f"failed {label(event.reason)}" if event.reason else "failed"))

    def _apply_reissued(self, event: Reissued) -> None:
        number = self._number(event.ticket_id)
        ticket = self.open.get(event.ticket_id)
        if ticket is None and number is not None and self._outcome[number] >= 0:  # roll-back of a trained ticket
            ticket = OpenTicket(
                event.ticket_id,
                self._prompt[number],
                event.attempt,
                "",
                "",
                self._outcome[number],
                event.time,
                0,
                "finished",
            )
            self.open[event.ticket_id] = ticket
            self._outcome[number] = _OPEN
            self.counts.trained -= 1
            self.counts.open["finished"] += 1
        if ticket is None or ticket.attempt != event.attempt or ticket.state == "waiting":
            raise LedgerError(f"ledger: {event} cannot follow {ticket}")
        self._wait(ticket, label(event.cause))

    def _apply_trained(self, event: Trained) -> None:
        for ticket_id in event.tickets:
            number = self._number(ticket_id)
            if number is None or self._outcome[number] >= 0:
                raise LedgerError(
                    f"ledger: ticket {ticket_id} trained at version {event.version}: unknown or trained before"
                )
            if self._outcome[number] <= _FIRST_REASON:
                # We gave the ticket up, but its group had reached the trainer: what is in the weights counts.
                self.counts.dropped -= 1
                self.counts.dropped_by_reason[self._reasons[_FIRST_REASON - self._outcome[number]]] -= 1
                self.counts.anomalies["trained after drop"] += 1
                self._outcome[number] = event.version
                self.counts.trained += 1
            else:
                self._end(self.open[ticket_id], event.version)

    def _move(self, ticket: OpenTicket, state: OpenState) -> None:
        self._leave(ticket)
        ticket.state = state
        self.counts.open[state] += 1

    def _wait(self, ticket: OpenTicket, cause: str) -> None:
        self._move(ticket, "waiting")
        heapq.heappush(self._reissue, ticket.ticket_id)
        self.counts.reissued_by_cause[self._bounded(self.counts.reissued_by_cause, cause)] += 1

    def _end(self, ticket: OpenTicket, code: int) -> None:
        self._leave(ticket)
        del self.open[ticket.ticket_id]
        self._outcome[int(ticket.ticket_id)] = code
        if code >= 0:
            self.counts.trained += 1
        else:
            self.counts.dropped += 1
            self.counts.dropped_by_reason[self._reasons[_FIRST_REASON - code]] += 1

    def _leave(self, ticket: OpenTicket) -> None:
        self.counts.open[ticket.state] -= 1
        assert self.counts.open[ticket.state] >= 0, f"{ticket.state} count below zero at {ticket}"

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _next(self) -> tuple[str, int, int, int] | None:
        """(ticket id, attempt, prompt index, position) of the next grant."""
        while self._reissue:
            ticket = self.open.get(heapq.heappop(self._reissue))
            if ticket is not None and ticket.state == "waiting":
                return ticket.ticket_id, ticket.attempt + 1, ticket.prompt_index, -1
        new = ticket_name(len(self._outcome))
        if self._prompts:
            return new, 0, self._prompts[0], -1
        prompt = self._order.at(self.cursor)
        return None if prompt is None else (new, 0, prompt, self.cursor)

    def _open(self, ticket_id: str, event: TicketEvent) -> OpenTicket:
        ticket = self.open.get(ticket_id)
        if ticket is None:
            raise LedgerError(f"ledger: {event}: ticket {ticket_id} is not open ({self.ended(ticket_id) or 'unknown'})")
        return ticket

    def _number(self, ticket_id: str) -> int | None:
        """Ticket number, None for anything that this ledger never granted."""
        if len(ticket_id) != 10 or not (ticket_id.isascii() and ticket_id.isdigit()):
            return None
        number = int(ticket_id)
        return number if number < len(self._outcome) else None

    def _reason_code(self, reason: str) -> int:
        name = label(reason)
        if name not in self._reasons:
            if len(self._reasons) >= MAX_REASONS:
                name = "other"
            if name not in self._reasons:
                self._reasons.append(name)
        return _FIRST_REASON - self._reasons.index(name)

    @staticmethod
    def _bounded(counter: Counter[str], name: str) -> str:
        return name if name in counter or len(counter) < MAX_REASONS else "other"
