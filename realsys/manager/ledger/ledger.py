"""The rollout ledger: the state of every train ticket, as a pure function of events.

                grant                     finish accepted             claim             trained
    waiting ────────────> running ───────────────────────> finished ─────────> claimed ─────────> trained at version k
       ^                  │  │  └── finish rejected/failed/filtered ──> dropped   ^
       │                  │  └── the group may arrive before its finish (from waiting, too)
       └── failed, lost ──┴── stale, never arrived, rolled back ── (from finished; claimed only by a roll-back)

Invariants:

one-end             Every ticket ends exactly once between two roll-backs: trained at version k or dropped.
claim-before-train  A group may reach the trainer although its attempt counts as failed, so trainer and ledger agree on
                    a batch first: an ended ticket cannot be claimed, and a claimed one ends by its training only.
monotonic           Versions are ordered by (incarnation of the trainer, number), and so are roll-backs.

Decisions (``grant``, ``finish``, ...) check, apply and return events; ``apply`` alone replays a journal:

    journal ──event──> apply ──> open tickets, history of all tickets, counts, position in the data
       ^                                                 │
       └───────────── Snapshot (compaction) <────────────┘

``counted`` is N of the admission inequality without the candidate: running, finished, claimed and trained groups, with
those that were trained before the checkpoint that a trial resumes from.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Self

import msgspec

from realsys.errors import LedgerError
from realsys.manager.ledger import events as e
from realsys.manager.ledger.prompt_order import Curriculum, PromptOrder
from realsys.manager.ledger.staleness import StalenessBound
from realsys.manager.ledger.ticket_history import LONGEST_LAG, PromptRates, TicketColumns, bounded
from realsys.manager.ledger.tickets import LedgerCounts, OpenState, OpenTicket, label, ticket_name
from realsys.manager.messages import BadCall, DataPosition, FinishReply

ROLLED_BACK = "rolled back"
STALE = "stale"  # cause of a reissue: the group was too old


class Ledger:
    """State of all train tickets, and the decisions about them. Only ``apply`` changes it.

    base     version before which nothing can be rolled back: -1, or the step of the checkpoint that was resumed
    newest   newest version that a batch was trained for
    cursor   position of the next new prompt
    prompts  pending at the checkpoint that was resumed: granted before new ones
    submitted  prompts from ``cursor`` on that the training script has submitted (``data.order=script``)
    """

    def __init__(self, order: PromptOrder, max_attempts: int, curriculum: Curriculum | None = None) -> None:
        self.open: dict[str, OpenTicket] = {}
        self.columns = TicketColumns()
        self.rates = PromptRates()
        self.counts = LedgerCounts()
        self.prompts: deque[int] = deque()
        self.submitted: deque[int] = deque()
        self.cursor = 0
        self.opened: e.Opened | None = None  # settings that bind the decisions
        self.rolled_back: e.RolledBack | None = None  # last start of a trainer
        self.reissued = 0  # tickets that this start reissued
        self.base = -1
        self.newest = -1
        self._records = 0
        self._waiting: list[str] = []  # heap of waiting ticket ids; may hold tickets that wait no more
        self._order = order
        self._max_attempts = max_attempts
        self._curriculum = curriculum
        self._found = (-1, -1, -1)  # (cursor, revision of the rates, next position): the last search

    @classmethod
    def replaying(cls) -> Self:
        """Return a ledger for ``apply`` alone: its decisions would need the order of the trial's prompts."""
        return cls(PromptOrder(seed=0, size=1), max_attempts=1)

    # -- decisions: each applies the events that it returns ------------------------------------------------------------

    @property
    def counted(self) -> int:
        """N of ``admission`` without the candidate."""
        return self.counts.counted

    @property
    def epoch(self) -> int:
        """Number of the pass over the prompts, from 0. A script makes no passes."""
        return 0 if self.by_script else self.cursor // self._order.size

    @property
    def by_script(self) -> bool:
        """True if new prompts are those that the training script submits."""
        return self.opened is not None and self.opened.order == "script"

    @property
    def total_submitted(self) -> int:
        """Number of prompts that the training script has ever submitted."""
        return self.cursor + len(self.submitted)

    @property
    def available(self) -> int:
        """Number of prompts that can be granted before the script submits more. Not for a seeded order."""
        return self.counts.open["waiting"] + len(self.prompts) + len(self.submitted)

    @property
    def exhausted(self) -> bool:
        """True when no ticket waits and the epochs, or the submitted prompts, are used up."""
        return not self.counts.open["waiting"] and not self.prompts and self._next_position() is None

    def position(self) -> DataPosition:
        """Return the position in the data: a trial that resumes there misses no prompt and repeats none.

        Another trial does not have the submitted prompts, so all that are not trained are pending.
        """
        pending = [self.open[ticket_id].prompt_index for ticket_id in sorted(self.open)]
        rates = self.rates.measured() if self._curriculum is not None else []
        pending += [*self.prompts, *self.submitted]
        order: e.Order = "script" if self.by_script else "shuffled"
        return DataPosition(self.total_submitted, pending, self._order.size, self._order.seed, rates, order)

    def running(self) -> Iterator[OpenTicket]:
        return (ticket for ticket in self.open.values() if ticket.state == "running")

    def running_attempt(self, ticket_id: str, attempt: int) -> OpenTicket | None:
        """Return the ticket if this attempt of it runs, else None."""
        ticket = self.open.get(ticket_id)
        return ticket if ticket is not None and ticket.state == "running" and ticket.attempt == attempt else None

    def require(self, tickets: Iterable[str]) -> None:
        """Raise BadCall for a ticket that was never granted."""
        for ticket_id in tickets:
            if self.columns.number(ticket_id) is None:
                problem = "was never granted: the ledger has lost its end, or it is of another trial"
                raise BadCall(f"ticket {ticket_id} {problem}")

    def grant(self, worker: str, incarnation: str, version: int, now: float, request: str = "") -> e.Granted | None:
        """Grant the next attempt: waiting tickets first, oldest first; then given-back prompts; then new ones.

        Returns None when all prompts are used up, or the training script has submitted no other.
        """
        candidate = self._next()
        if candidate is None:
            return None
        event = e.Granted(*candidate, worker, incarnation, version, now, request)
        self.apply(event)
        return event

    def finish(
        self,
        ticket_id: str,
        attempt: int,
        outcome: e.Outcome,
        reason: str,
        now: float,
        versions: tuple[int, int] = (-1, -1),
        verdicts: tuple[int, int] = (0, 0),
    ) -> tuple[FinishReply, e.Finished | None]:
        """End an attempt. Not known if superseded or never granted; a repetition is known and has no event.

        ``versions`` of the oldest and the newest token of its completions. ``verdicts``: episodes that were correct,
        and episodes that were judged.
        """
        number = self.columns.number(ticket_id)
        if number is None or self.columns.attempt[number] != attempt:
            return FinishReply(known=False), None
        ticket = self.open.get(ticket_id)
        if ticket is None or ticket.state in ("finished", "claimed"):
            return FinishReply(known=True), None
        if ticket.state == "waiting":
            # The attempt failed before (a repetition) or its lease lapsed: in both cases another attempt follows.
            return FinishReply(known=False, retry=True), None
        retry = outcome == "failed" and ticket.failures + 1 < self._max_attempts
        event = e.Finished(ticket_id, attempt, outcome, reason[:512], retry, now, *versions, *verdicts)
        self.apply(event)
        return FinishReply(known=True, retry=retry), event

    def claim(
        self, version: int, tickets: Sequence[str], now: float, incarnation: str = ""
    ) -> tuple[e.Claimed | None, list[str]]:
        """Claim a batch for its training. Returns the event, and the tickets that have ended: then none is claimed.

        No event if all were claimed before. Raises BadCall for a ticket that was never granted.
        """
        self.require(tickets)
        if ended := [name for name in dict.fromkeys(tickets) if name not in self.open]:
            return None, ended
        fresh = [name for name in dict.fromkeys(tickets) if self.open[name].state != "claimed"]
        if not fresh:
            return None, []
        event = e.Claimed(version, fresh, now, incarnation)
        self.apply(event)
        return event, []

    def trained(
        self,
        version: int,
        step: int,
        tickets: Sequence[str],
        now: float,
        oldest: Sequence[int] = (),
        incarnation: str = "",
    ) -> e.Trained | None:
        """End tickets as trained at ``version``. Repetitions are left out; None if nothing changes.

        ``oldest``: for each ticket the version of its oldest token, or empty. Raises BadCall if their numbers differ,
        and for a ticket that is not claimed (``claim-before-train``).
        """
        if oldest and len(oldest) != len(tickets):
            raise BadCall(f"oldest has {len(oldest)} versions for {len(tickets)} trained tickets")
        fresh: dict[str, int] = {}
        for i, ticket_id in enumerate(tickets):
            number, ticket = self.columns.number(ticket_id), self.open.get(ticket_id)
            if ticket is not None and ticket.state == "claimed":
                fresh.setdefault(ticket_id, oldest[i] if oldest else -1)
            elif number is None or self.columns.outcome[number] != version:
                was = self.state_of(ticket_id)
                raise BadCall(f"ticket {ticket_id} trained at version {version}, though it is {was}, not claimed")
        supervised = self.opened is not None and self.opened.order == "none"  # its steps have no tickets
        if not fresh and not (supervised and version > max(self.newest, 0)):
            return None
        event = e.Trained(version, step, list(fresh), now, list(fresh.values()) if oldest else [], incarnation)
        self.apply(event)
        return event

    def drop(self, ticket_id: str, reason: str, now: float) -> e.Dropped | None:
        """End a ticket that the trainer gave back. None if it has ended already."""
        if ticket_id not in self.open:
            return None
        event = e.Dropped(ticket_id, reason[:512], now)
        self.apply(event)
        return event

    def reissue_stale(self, attempts: Iterable[tuple[str, int]], now: float) -> list[e.Reissued]:
        """Reissue the tickets whose group of this attempt was too old. One that waits, runs again or ended stays so."""
        stale = [
            ticket
            for ticket_id, attempt in attempts
            if (ticket := self.open.get(ticket_id)) is not None
            and ticket.attempt == attempt
            and ticket.state in ("running", "finished")
        ]
        return self._reissue(stale, STALE, now)

    def stale_reissues(self, ticket_id: str) -> int:
        """Return how often the ticket was issued again because its group was too old."""
        return self.columns.stale[int(ticket_id)]

    def lose(self, is_lost: Callable[[OpenTicket], bool], cause: str, now: float) -> list[e.Reissued]:
        """Reissue every running ticket for which ``is_lost`` holds."""
        return self._reissue([ticket for ticket in self.running() if is_lost(ticket)], cause, now)

    def never_arrived(self, held: Collection[str], before: float, now: float) -> list[e.Reissued]:
        """Reissue the tickets that finished before ``before`` and are not in ``held`` by the trainer.

        The trainer may hold any attempt of a ticket.
        """
        missing = [
            ticket
            for ticket in self.open.values()
            if ticket.state == "finished" and ticket.news_at < before and ticket.ticket_id not in held
        ]
        return self._reissue(missing, "never arrived", now)

    def submit(self, start: int, prompts: Sequence[int], now: float) -> e.Submitted | None:
        """Append prompts to the sequence of the training script. ``start``: position of the first one.

        A repetition of known positions is left out; None if nothing is left. Raises BadCall for a gap, for another
        prompt at a known position that was not granted yet, for too many prompts, and if the order is seeded.
        """
        if not self.by_script:
            raise BadCall(
                "the seed decides the order of the prompts: only with data.order=script can a script submit them"
            )
        if prompts and start > self.total_submitted:
            missing = f"those from {self.total_submitted} on are missing"
            raise BadCall(f"prompts from position {start} on are submitted, and {missing}")
        first, end = max(start, self.cursor), min(start + len(prompts), self.total_submitted)
        known = islice(self.submitted, max(0, first - self.cursor), max(0, end - self.cursor))
        for position, prompt in enumerate(known, first):
            if (other := prompts[position - start]) != prompt:
                raise BadCall(f"prompt {other} is submitted at position {position}, which has prompt {prompt}")
        fresh = list(prompts[self.total_submitted - start :])
        if not fresh:
            return None
        if len(self.submitted) + len(fresh) > e.MOST_SUBMITTED:
            problem = f"{len(self.submitted)} submitted prompts are not granted yet, and {e.MOST_SUBMITTED} may be"
            raise BadCall(f"{problem}: submit {len(fresh)} more later")
        event = e.Submitted(self.total_submitted, fresh, now)
        self.apply(event)
        return event

    def roll_back(self, version: int, step: int, incarnation: str, checkpoint: str, now: float) -> e.RolledBack:
        """Start a trainer from ``version``: reissue the tickets that run, are finished or were trained later.

        Raises BadCall for a version that this ledger cannot roll back to.
        """
        if version < self.base:
            raise BadCall(f"version {version}: this trial began at {self.base}, from a checkpoint of another one")
        if version > max(self.newest, 0):
            raise BadCall(
                f"version {version}: the ledger ends at {max(self.newest, 0)}: it is older than the checkpoint "
                f"{checkpoint or 'that was loaded'}, or of another trial; remove the younger checkpoints, or start anew"
            )
        event = e.RolledBack(version, step, incarnation, checkpoint, now)
        self.apply(event)
        return event

    def bind(self, opened: e.Opened) -> e.Opened | None:
        """Record the settings that bind the decisions from now on; None if they have not changed.

        Raises LedgerError if the granted tickets cannot be those of this order of prompts.
        """
        if self.opened is not None and msgspec.structs.replace(self.opened, time=opened.time) == opened:
            return None
        self.apply(opened)
        return opened

    def _reissue(self, tickets: Sequence[OpenTicket], cause: str, now: float) -> list[e.Reissued]:
        events = [e.Reissued(ticket.ticket_id, ticket.attempt, cause, now) for ticket in tickets]
        for event in events:
            self.apply(event)
        return events

    def _next(self) -> tuple[str, int, int, int] | None:
        """Return (ticket id, attempt, prompt index, position) of the next grant."""
        while self._waiting:
            ticket = self.open.get(heapq.heappop(self._waiting))
            if ticket is not None and ticket.state == "waiting":
                return ticket.ticket_id, ticket.attempt + 1, ticket.prompt_index, -1
        new = ticket_name(len(self.columns))
        if self.prompts:
            return new, 0, self.prompts[0], -1
        position = self._next_position()
        prompt = None if position is None else self._at(position)
        return None if prompt is None or position is None else (new, 0, prompt, position)

    def _next_position(self) -> int | None:
        """Return the position of the next new prompt, None if the epochs or the submitted prompts are used up.

        The curriculum passes over positions, but never over a whole epoch.
        """
        cursor, revision, position = self._found
        if self._curriculum is None:
            position = self.cursor
        elif (cursor, revision) != (self.cursor, self.rates.revision):
            position = self._search(self._curriculum)
            self._found = self.cursor, self.rates.revision, position
        return position if self._at(position) is not None else None

    def _at(self, position: int) -> int | None:
        """Return the prompt at a position from ``cursor`` on; None: there is none, or none yet."""
        if not self.by_script:
            return self._order.at(position)
        ahead = position - self.cursor
        return self.submitted[ahead] if ahead < len(self.submitted) else None

    def _search(self, curriculum: Curriculum) -> int:
        for position in range(self.cursor, self.cursor + self._order.size):
            prompt = self._order.at(position)
            if prompt is None or curriculum.takes(self._order.seed, position, self.rates.of(prompt)):
                return position
        return self.cursor

    # -- replay --------------------------------------------------------------------------------------------------------

    def apply(self, event: e.TicketEvent) -> None:
        """Apply one event. Raises LedgerError if it cannot follow the ones before: another trial's, or damage."""
        match event:
            case e.Granted():
                self._apply_granted(event)
            case e.Finished():
                self._apply_finished(event)
            case e.Claimed():
                self._apply_claimed(event)
            case e.Trained():
                self._apply_trained(event)
            case e.Reissued():
                self._apply_reissued(event)
            case e.Dropped():
                self._end(self._open(event.ticket_id, event), self.columns.reason_code(event.reason))
            case e.RolledBack():
                self._apply_rolled_back(event)
            case e.Opened():
                self._apply_opened(event)
            case e.Resumed():
                self._apply_resumed(event)
            case e.Submitted():
                self._apply_submitted(event)
            case e.Snapshot():
                self._apply_snapshot(event)
        self._records += 1

    def ended(self, ticket_id: str) -> str | None:
        """Return ``trained@k`` or ``dropped: reason``, None while the ticket is open or unknown."""
        return self.columns.end_of(ticket_id)

    def state_of(self, ticket_id: str) -> str:
        """Return, for a message, the state of an open ticket, the end of another, or ``never granted``."""
        ticket = self.open.get(ticket_id)
        return ticket.state if ticket is not None else self.ended(ticket_id) or "never granted"

    def _apply_resumed(self, event: e.Resumed) -> None:
        if self.counts.granted or self.counts.inherited or self.cursor:
            raise LedgerError(f"ledger: {event.checkpoint} can only be resumed by a new trial, before its first ticket")
        self.counts.inherited = event.groups
        self.cursor = event.cursor
        self.base = event.step
        self.newest = event.step
        self.prompts.extend(event.pending)
        self.rates = PromptRates(event.rates)

    def _apply_submitted(self, event: e.Submitted) -> None:
        if not self.by_script or event.start != self.total_submitted:
            order = "the training script" if self.by_script else "the seed"
            raise LedgerError(f"ledger: {event}: {self.total_submitted} prompts are known, in the order of {order}")
        self.submitted.extend(event.prompts)

    def _apply_opened(self, event: e.Opened) -> None:
        begun = len(self.columns) or self.submitted
        if self.opened is not None and begun and (problem := event.conflict(self.opened)):
            raise LedgerError(f"ledger: {problem}")
        self.opened = event
        self.rates.resize(event.prompts)

    def _apply_rolled_back(self, event: e.RolledBack) -> None:
        """In the order of the ticket numbers, so that a replay gives the same state."""
        if self.rolled_back is not None and event.incarnation <= self.rolled_back.incarnation:
            raise LedgerError(f"ledger: {event} cannot follow {self.rolled_back}")
        lost = [ticket for _, ticket in sorted(self.open.items()) if ticket.state != "waiting"]
        for ticket in lost:
            self._leave(ticket)
            ticket.state = "waiting"
        younger = self.columns.reopen_younger(event.version)
        lost += [self._untrain(number, version, event.time) for number, version in younger]
        self.counts.trained -= len(younger)
        if lost:  # one count and one heapify: as many tickets as the run has trained may be lost
            self.counts.open["waiting"] += len(lost)
            self.counts.reissued_by_cause[bounded(self.counts.reissued_by_cause, ROLLED_BACK)] += len(lost)
            self._waiting += [ticket.ticket_id for ticket in lost]
            heapq.heapify(self._waiting)
        self.rolled_back = event
        self.reissued = len(lost)
        self.newest = max(self.base, event.version)
        self.counts.starts += 1

    def _untrain(self, number: int, version: int, now: float) -> OpenTicket:
        """Let a trained ticket wait again: the weights that it is in do not exist any more."""
        prompt, attempt = self.columns.prompt[number], self.columns.attempt[number]
        ticket = OpenTicket(ticket_name(number), prompt, attempt, "", "", version, now, 0, "waiting")
        return self.open.setdefault(ticket.ticket_id, ticket)

    def _apply_granted(self, event: e.Granted) -> None:
        ticket = self.open.get(event.ticket_id)
        if ticket is None:
            if event.ticket_id != ticket_name(len(self.columns)) or event.attempt != 0:
                raise LedgerError(f"ledger: {event}: expected ticket {ticket_name(len(self.columns))}, attempt 0")
            self._advance(event)
            self.columns.append(event.prompt_index)
            self.counts.granted += 1
            self.counts.open["running"] += 1
            failures = 0
        else:
            if ticket.state != "waiting" or event.attempt != ticket.attempt + 1:
                raise LedgerError(f"ledger: {event} cannot follow {ticket}")
            self.columns.attempt[int(event.ticket_id)] = event.attempt
            self._move(ticket, "running")
            failures = ticket.failures
        ticket = _running(event, self.columns.prompt[int(event.ticket_id)], failures)
        ticket.weights = _oldest_weights(self.opened, self.counts.counted)
        self.open[event.ticket_id] = ticket
        self.counts.attempts += 1

    def _advance(self, event: e.Granted) -> None:
        """Take the prompt of a new ticket: the next one of the order, or the first of those given back."""
        if event.position >= 0:
            passes_over = self.opened is not None and self.opened.curriculum is not None
            if event.position < self.cursor or (event.position > self.cursor and not passes_over):
                raise LedgerError(f"ledger: {event}: the next prompt is that of position {self.cursor}")
            if self.by_script and (not self.submitted or self.submitted.popleft() != event.prompt_index):
                raise LedgerError(f"ledger: {event}: prompt {event.prompt_index} was not submitted at that position")
            self.cursor = event.position + 1
        elif not self.prompts or self.prompts.popleft() != event.prompt_index:
            raise LedgerError(f"ledger: {event}: prompt {event.prompt_index} is not the next of those given back")

    def _apply_finished(self, event: e.Finished) -> None:
        ticket = self._open(event.ticket_id, event)
        if ticket.state != "running" or ticket.attempt != event.attempt:
            raise LedgerError(f"ledger: {event} cannot follow {ticket}")
        self.rates.observe(ticket.prompt_index, event.correct, event.judged)
        if event.outcome == "accepted":
            self._move(ticket, "finished")
            ticket.news_at = event.time
        elif event.retry:
            ticket.failures += 1
            self._wait(ticket, "failed")
        else:
            reason = f"{event.outcome} {label(event.reason)}" if event.reason else event.outcome
            self._end(ticket, self.columns.reason_code(reason))

    def _apply_reissued(self, event: e.Reissued) -> None:
        ticket = self.open.get(event.ticket_id)
        if ticket is None or ticket.attempt != event.attempt or ticket.state == "waiting":
            raise LedgerError(f"ledger: {event} cannot follow {ticket or self.ended(event.ticket_id)}")
        if event.cause == STALE:
            number = int(event.ticket_id)
            self.columns.stale[number] = min(self.columns.stale[number] + 1, e.MOST_STALE)
        self._wait(ticket, label(event.cause))

    def _apply_claimed(self, event: e.Claimed) -> None:
        for ticket in [self._open(ticket_id, event) for ticket_id in event.tickets]:
            if ticket.state == "claimed":
                raise LedgerError(f"ledger: {event} cannot follow {ticket}")
            self._move(ticket, "claimed")

    def _apply_trained(self, event: e.Trained) -> None:
        if event.oldest and len(event.oldest) != len(event.tickets):
            raise LedgerError(f"ledger: {len(event.tickets)} tickets trained, versions of {len(event.oldest)}")
        for i, ticket_id in enumerate(event.tickets):
            ticket = self._open(ticket_id, event)
            if ticket.state != "claimed":  # claim-before-train
                raise LedgerError(f"ledger: {event} cannot follow {ticket}")
            self._end(ticket, event.version)
            if event.oldest:  # version k is trained with the weights of k - 1 in place
                self.columns.lag[int(ticket_id)] = max(0, min(event.version - 1 - event.oldest[i], LONGEST_LAG))
        self.newest = max(self.newest, event.version)

    def _open(self, ticket_id: str, event: e.TicketEvent) -> OpenTicket:
        """Return the open ticket of an event. An ended ticket does not change any more (``one-end``)."""
        ticket = self.open.get(ticket_id)
        if ticket is None:
            raise LedgerError(f"ledger: {event}: ticket {ticket_id} is not open: it is {self.state_of(ticket_id)}")
        return ticket

    def _move(self, ticket: OpenTicket, state: OpenState) -> None:
        self._leave(ticket)
        ticket.state = state
        self.counts.open[state] += 1

    def _wait(self, ticket: OpenTicket, cause: str) -> None:
        self._move(ticket, "waiting")
        heapq.heappush(self._waiting, ticket.ticket_id)
        self.counts.reissued_by_cause[bounded(self.counts.reissued_by_cause, cause)] += 1

    def _end(self, ticket: OpenTicket, code: int) -> None:
        self._leave(ticket)
        del self.open[ticket.ticket_id]
        self.columns.outcome[int(ticket.ticket_id)] = code
        if code >= 0:
            self.counts.trained += 1
        else:
            self.counts.dropped += 1
            self.counts.dropped_by_reason[self.columns.reason(code)] += 1

    def _leave(self, ticket: OpenTicket) -> None:
        self.counts.open[ticket.state] -= 1
        assert self.counts.open[ticket.state] >= 0, f"{ticket.state} count below zero at {ticket}"

    def snapshot(self, now: float, evaluations: list[e.EvaluationState], forgotten: dict[str, int]) -> e.Snapshot:
        """Return the whole state as one record, which shares nothing that changes with it."""
        return e.Snapshot(
            records=self._records,
            opened=self.opened,
            rolled_back=self.rolled_back,
            reissued=self.reissued,
            starts=self.counts.starts,
            inherited=self.counts.inherited,
            base=self.base,
            newest=self.newest,
            cursor=self.cursor,
            **self.columns.in_snapshot(),
            rates=self.rates.measured(),
            open=[dataclasses.replace(ticket) for ticket in self.open.values()],
            prompts=list(self.prompts),
            submitted=list(self.submitted),
            reissued_by_cause=dict(self.counts.reissued_by_cause),
            evaluations=evaluations,
            forgotten=forgotten,
            time=now,
        )

    def _apply_snapshot(self, event: e.Snapshot) -> None:
        if self._records:
            raise LedgerError(f"ledger: a snapshot of {event.records} records after {self._records} others")
        if problem := event.problem():
            raise LedgerError(f"ledger: {problem}")
        self.opened = event.opened
        self.rolled_back = event.rolled_back
        self.reissued = event.reissued
        self.base = event.base
        self.newest = event.newest
        self.cursor = event.cursor
        self._records = event.records - 1
        self.columns = TicketColumns(event)
        self.rates = PromptRates(event.rates)
        if event.opened is not None:
            self.rates.resize(event.opened.prompts)
        self.prompts = deque(event.prompts)
        self.submitted = deque(event.submitted)
        self.open = {ticket.ticket_id: dataclasses.replace(ticket) for ticket in event.open}
        self._waiting = sorted(ticket.ticket_id for ticket in event.open if ticket.state == "waiting")
        self.counts = _counts(event, self.columns)


def _running(event: e.Granted, prompt_index: int, failures: int) -> OpenTicket:
    owner = event.worker, event.incarnation, event.version, event.time
    return OpenTicket(event.ticket_id, prompt_index, event.attempt, *owner, failures, request=event.request)


def _oldest_weights(opened: e.Opened | None, n: int) -> int:
    """Return the oldest version that may sample the n-th group; -1: any."""
    return max(-1, StalenessBound(opened.batch_groups, opened.eta).oldest_weights(n)) if opened is not None else -1


def _counts(event: e.Snapshot, columns: TicketColumns) -> LedgerCounts:
    counts = LedgerCounts(event.inherited, len(columns), starts=event.starts)
    counts.attempts = counts.granted + sum(event.attempt)
    for ticket in event.open:
        counts.open[ticket.state] += 1
    counts.trained, counts.dropped_by_reason = columns.ends()
    counts.dropped = sum(counts.dropped_by_reason.values())
    counts.reissued_by_cause.update(event.reissued_by_cause)
    return counts
