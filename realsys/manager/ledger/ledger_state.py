"""What the rollout ledger knows, and how each event of the journal changes it. Pure; memory: 18 bytes per ended ticket.

journal ──event──> apply ──> open tickets, outcome of the ended ones, counts, position in the data
   ^                                                 │
   └───────────── Snapshot (compaction) <────────────┘
"""

from __future__ import annotations

import dataclasses
import heapq
from array import array
from collections import Counter, deque

import numpy as np

from realsys.errors import LedgerError
from realsys.manager.ledger.events import (
    Claimed,
    Dropped,
    EvaluationState,
    Finished,
    Granted,
    Opened,
    Reissued,
    Resumed,
    RolledBack,
    Snapshot,
    TicketEvent,
    Trained,
)
from realsys.manager.ledger.tickets import LedgerCounts, OpenState, OpenTicket, label, ticket_name, ticket_number

OPEN, FIRST_REASON = -1, -2  # outcome codes; a version >= 0 means trained, <= -2 dropped for reason -2 - code
MAX_REASONS = 64  # distinct drop reasons counted by name; a worker's free text must not grow the table for ever
ROLLED_BACK = "rolled back"
UNKNOWN_LAG, LONGEST_LAG = -1, 32767


class LedgerState:
    """State of all train tickets. ``apply`` is the only thing that changes it."""

    def __init__(self) -> None:
        self.open: dict[str, OpenTicket] = {}
        self.counts = LedgerCounts()
        self.cursor = 0  # position of the next new prompt
        self.opened: Opened | None = None  # what the decisions are bound by
        self.rolled_back: RolledBack | None = None  # the last start of the training side
        self.reissued = 0  # tickets, by that start
        self.base = self.newest = -1  # see Snapshot
        self._records, self._first_cursor = 0, 0
        self._reissue: list[str] = []  # heap of waiting ticket ids; stale entries are skipped
        self._prompts: deque[int] = deque()  # given back by stale drops, or pending at the checkpoint
        self._outcome, self._attempt, self._prompt, self._lag = array("i"), array("i"), array("q"), array("h")
        self._reasons: list[str] = []

    # -- transitions -------------------------------------------------------------------------------------------------

    def apply(self, event: TicketEvent) -> None:
        """One event. Raises LedgerError if it cannot follow the ones before (a journal of another trial, or damage)."""
        match event:
            case Granted():
                self._apply_granted(event)
            case Finished():
                self._apply_finished(event)
            case Claimed():
                self._apply_claimed(event)
            case Trained():
                self._apply_trained(event)
            case Reissued():
                self._apply_reissued(event)
            case Dropped():
                self._end(self._open(event.ticket_id, event), self._reason_code(event.reason))
                if event.requeue:
                    self._prompts.append(self._prompt[int(event.ticket_id)])
            case RolledBack():
                self._apply_rolled_back(event)
            case Opened():
                self._apply_opened(event)
            case Resumed():
                self._apply_resumed(event)
            case Snapshot():
                self._apply_snapshot(event)
        self._records += 1

    def _apply_resumed(self, event: Resumed) -> None:
        if self.counts.granted or self.counts.inherited or self.cursor:
            raise LedgerError(f"ledger: {event.checkpoint} can only be resumed by a new trial, before its first ticket")
        self.counts.inherited, self.cursor, self._first_cursor = event.groups, event.cursor, event.cursor
        self.base = self.newest = event.step
        self._prompts.extend(event.pending)

    def _apply_opened(self, event: Opened) -> None:
        before = self.opened
        if before is not None and self._outcome:
            for name in ("prompts", "seed", "batch_groups"):
                was, now = getattr(before, name), getattr(event, name)
                if was != now:
                    raise LedgerError(f"ledger: its tickets were granted with {name}={was}, and now it is {now}")
        self.opened = event

    def _apply_rolled_back(self, event: RolledBack) -> None:
        """In the order of the ticket numbers, so that a replay gives the same state."""
        if self.rolled_back is not None and event.incarnation <= self.rolled_back.incarnation:
            raise LedgerError(f"ledger: {event} cannot follow {self.rolled_back}")
        lost = [ticket for _, ticket in sorted(self.open.items()) if ticket.state != "waiting"]
        for ticket in lost:
            self._leave(ticket)
            ticket.state = "waiting"
        younger = np.flatnonzero(np.asarray(self._outcome) > max(event.version, OPEN)).tolist()
        lost += [self._untrain(number, event.time) for number in younger]
        self.counts.trained -= len(younger)
        if lost:  # all at once: there may be as many as the run has trained
            self.counts.open["waiting"] += len(lost)
            self.counts.reissued_by_cause[self._bounded(self.counts.reissued_by_cause, ROLLED_BACK)] += len(lost)
            self._reissue += [ticket.ticket_id for ticket in lost]
            heapq.heapify(self._reissue)
        self.rolled_back, self.reissued = event, len(lost)
        self.newest = max(self.base, event.version)
        self.counts.starts += 1

    def _untrain(self, number: int, now: float) -> OpenTicket:
        """Open a trained ticket again, to wait: what it is trained in does not exist any more."""
        name = ticket_name(number)
        ticket = self.open[name] = OpenTicket(
            name, self._prompt[number], self._attempt[number], "", "", self._outcome[number], now, 0, "waiting"
        )
        self._outcome[number], self._lag[number] = OPEN, UNKNOWN_LAG
        return ticket

    def _apply_granted(self, event: Granted) -> None:
        ticket = self.open.get(event.ticket_id)
        if ticket is not None:
            if ticket.state != "waiting" or event.attempt != ticket.attempt + 1:
                raise LedgerError(f"ledger: {event} cannot follow {ticket}")
            ticket.attempt, ticket.worker, ticket.incarnation = event.attempt, event.worker, event.incarnation
            ticket.version, ticket.news_at, ticket.request = event.version, event.time, event.request
            self._attempt[int(event.ticket_id)] = event.attempt
            self._move(ticket, "running")
        else:
            if event.ticket_id != ticket_name(len(self._outcome)) or event.attempt != 0:
                raise LedgerError(f"ledger: {event}: expected ticket {ticket_name(len(self._outcome))}, attempt 0")
            self._advance(event)
            self._outcome.append(OPEN)
            self._attempt.append(0)
            self._prompt.append(event.prompt_index)
            self._lag.append(UNKNOWN_LAG)
            ticket = OpenTicket(
                event.ticket_id, event.prompt_index, 0, event.worker, event.incarnation, event.version, event.time
            )
            ticket.request = event.request
            self.open[event.ticket_id] = ticket
            self.counts.granted += 1
            self.counts.open["running"] += 1
        self.counts.attempts += 1

    def _advance(self, event: Granted) -> None:
        """The prompt of a new ticket is the next one of the order, or the first of those given back."""
        if event.position >= 0:
            if event.position != self.cursor:
                raise LedgerError(f"ledger: {event}: the next prompt is that of position {self.cursor}")
            self.cursor += 1
        elif not self._prompts or self._prompts.popleft() != event.prompt_index:
            raise LedgerError(f"ledger: {event}: prompt {event.prompt_index} is not the next of those given back")

    def _apply_finished(self, event: Finished) -> None:
        ticket = self._open(event.ticket_id, event)
        if ticket.state != "running" or ticket.attempt != event.attempt:
            raise LedgerError(f"ledger: {event} cannot follow {ticket}")
        if event.outcome == "accepted":
            self._move(ticket, "finished")
            ticket.news_at = event.time
        elif event.outcome == "rejected":
            self._end(ticket, self._reason_code(f"rejected {label(event.reason)}" if event.reason else "rejected"))
        elif event.retry:
            ticket.failures += 1
            self._wait(ticket, "failed")
        else:
            self._end(ticket, self._reason_code(f"failed {label(event.reason)}" if event.reason else "failed"))

    def _apply_reissued(self, event: Reissued) -> None:
        ticket = self.open.get(event.ticket_id)
        if ticket is None or ticket.attempt != event.attempt or ticket.state == "waiting":
            raise LedgerError(f"ledger: {event} cannot follow {ticket or self.ended(event.ticket_id)}")
        self._wait(ticket, label(event.cause))

    def _apply_claimed(self, event: Claimed) -> None:
        for ticket_id in event.tickets:
            ticket = self._open(ticket_id, event)
            if ticket.state == "claimed":
                raise LedgerError(f"ledger: {event} cannot follow {ticket}")
            self._move(ticket, "claimed")

    def _apply_trained(self, event: Trained) -> None:
        if event.oldest and len(event.oldest) != len(event.tickets):
            raise LedgerError(f"ledger: {len(event.tickets)} tickets trained, versions of {len(event.oldest)}")
        for i, ticket_id in enumerate(event.tickets):
            ticket = self._open(ticket_id, event)
            if ticket.state != "claimed":
                raise LedgerError(f"ledger: {event} cannot follow {ticket}")
            self._end(ticket, event.version)
            if event.oldest:  # version k is trained with the weights of k - 1 in place
                self._lag[int(ticket_id)] = max(0, min(event.version - 1 - event.oldest[i], LONGEST_LAG))
        self.newest = max(self.newest, event.version)

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
            self.counts.dropped_by_reason[self._reasons[FIRST_REASON - code]] += 1

    def _leave(self, ticket: OpenTicket) -> None:
        self.counts.open[ticket.state] -= 1
        assert self.counts.open[ticket.state] >= 0, f"{ticket.state} count below zero at {ticket}"

    # -- compaction --------------------------------------------------------------------------------------------------

    def snapshot(self, now: float, evaluations: list[EvaluationState], forgotten: dict[str, int]) -> Snapshot:
        """All of it as one record; shares nothing that changes with the state."""
        return Snapshot(
            records=self._records,
            opened=self.opened,
            rolled_back=self.rolled_back,
            reissued=self.reissued,
            starts=self.counts.starts,
            inherited=self.counts.inherited,
            first_cursor=self._first_cursor,
            base=self.base,
            newest=self.newest,
            cursor=self.cursor,
            outcome=self._outcome.tolist(),
            attempt=self._attempt.tolist(),
            prompt=self._prompt.tolist(),
            lag=self._lag.tolist(),
            reasons=list(self._reasons),
            open=[dataclasses.replace(ticket) for ticket in self.open.values()],
            prompts=list(self._prompts),
            reissued_by_cause=dict(self.counts.reissued_by_cause),
            evaluations=evaluations,
            forgotten=forgotten,
            time=now,
        )

    def _apply_snapshot(self, event: Snapshot) -> None:
        if self._records:
            raise LedgerError(f"ledger: a snapshot of {event.records} records after {self._records} others")
        if problem := event.problem():
            raise LedgerError(f"ledger: {problem}")
        self.opened, self.rolled_back, self.reissued = event.opened, event.rolled_back, event.reissued
        self.base, self.newest, self.cursor = event.base, event.newest, event.cursor
        self._records, self._first_cursor = event.records - 1, event.first_cursor
        self._outcome, self._attempt = array("i", event.outcome), array("i", event.attempt)
        self._prompt, self._lag = array("q", event.prompt), array("h", event.lag)
        self._reasons, self._prompts = list(event.reasons), deque(event.prompts)
        self.open = {ticket.ticket_id: dataclasses.replace(ticket) for ticket in event.open}
        self._reissue = sorted(ticket.ticket_id for ticket in event.open if ticket.state == "waiting")
        counts = self.counts = LedgerCounts(event.inherited, len(event.outcome), starts=event.starts)
        counts.attempts = counts.granted + sum(event.attempt)
        for ticket in event.open:
            counts.open[ticket.state] += 1
        for code, number in Counter(event.outcome).items():
            if code >= 0:
                counts.trained += number
            elif code != OPEN:
                counts.dropped += number
                counts.dropped_by_reason[self._reasons[FIRST_REASON - code]] += number
        counts.reissued_by_cause.update(event.reissued_by_cause)

    # -- helpers -----------------------------------------------------------------------------------------------------

    def ended(self, ticket_id: str) -> str | None:
        """``trained@k``, ``dropped: reason``, or None while open or unknown."""
        number = self._number(ticket_id)
        code = OPEN if number is None else self._outcome[number]
        if code == OPEN:
            return None
        return f"trained@{code}" if code >= 0 else f"dropped: {self._reasons[FIRST_REASON - code]}"

    def state_of(self, ticket_id: str) -> str:
        """For people: the state of an open ticket, the end of another, ``never granted``."""
        ticket = self.open.get(ticket_id)
        return ticket.state if ticket is not None else self.ended(ticket_id) or "never granted"

    def _open(self, ticket_id: str, event: TicketEvent) -> OpenTicket:
        ticket = self.open.get(ticket_id)
        if ticket is None:
            raise LedgerError(f"ledger: {event}: ticket {ticket_id} is not open: it is {self.state_of(ticket_id)}")
        return ticket

    def _number(self, ticket_id: str) -> int | None:
        """Ticket number, None for anything that this ledger never granted."""
        number = ticket_number(ticket_id)
        return number if number is not None and number < len(self._outcome) else None

    def _reason_code(self, reason: str) -> int:
        name = label(reason)
        if name not in self._reasons:
            if len(self._reasons) >= MAX_REASONS:
                name = "other"
            if name not in self._reasons:
                self._reasons.append(name)
        return FIRST_REASON - self._reasons.index(name)

    @staticmethod
    def _bounded(counter: Counter[str], name: str) -> str:
        return name if name in counter or len(counter) < MAX_REASONS else "other"
