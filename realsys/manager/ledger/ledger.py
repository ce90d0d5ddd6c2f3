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

Decisions (``grant``, ``finish``, ...) check, apply and return events; ``apply`` (``ledger_state``) alone replays a
journal. ``counted`` is N of the admission inequality without the candidate: running, finished, claimed and trained
groups, with those that were trained before the checkpoint that a trial resumes from.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import msgspec

from realsys.manager.ledger import events as e
from realsys.manager.ledger.ledger_state import STALE, LedgerState
from realsys.manager.ledger.order import Curriculum, PromptOrder
from realsys.manager.ledger.tickets import OpenTicket, ticket_name
from realsys.manager.messages import DataPosition, FinishReply
from realsys.manager.refusals import BadCall


class Ledger(LedgerState):
    """The decisions: each applies the events that it returns."""

    def __init__(self, order: PromptOrder, max_attempts: int, curriculum: Curriculum | None = None) -> None:
        super().__init__()
        self._order = order
        self._max_attempts = max_attempts
        self._curriculum = curriculum
        self._found = (-1, -1, -1)  # (cursor, revision of the rates, next position): the last search

    @property
    def counted(self) -> int:
        """N of ``admission`` without the candidate."""
        return self.counts.counted

    @property
    def epoch(self) -> int:
        """Number of the pass over the prompts, from 0."""
        return self.cursor // self._order.size

    @property
    def exhausted(self) -> bool:
        """True when no ticket waits and the epochs are used up."""
        return not self.counts.open["waiting"] and not self.prompts and self._next_position() is None

    def position(self) -> DataPosition:
        """Return the position in the data: a trial that resumes there misses no prompt and repeats none."""
        pending = [self.open[ticket_id].prompt_index for ticket_id in sorted(self.open)]
        rates = self.rates.measured() if self._curriculum is not None else []
        return DataPosition(self.cursor, [*pending, *self.prompts], self._order.size, self._order.seed, rates)

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

        Returns None when all prompts are used up.
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
        if not fresh:
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
        prompt = None if position is None else self._order.at(position)
        return None if prompt is None or position is None else (new, 0, prompt, position)

    def _next_position(self) -> int | None:
        """Return the position of the next new prompt, None if the epochs are used up.

        The curriculum passes over positions, but never over a whole epoch.
        """
        cursor, revision, position = self._found
        if self._curriculum is None:
            position = self.cursor
        elif (cursor, revision) != (self.cursor, self.rates.revision):
            position = self._search(self._curriculum)
            self._found = self.cursor, self.rates.revision, position
        return position if self._order.at(position) is not None else None

    def _search(self, curriculum: Curriculum) -> int:
        for position in range(self.cursor, self.cursor + self._order.size):
            prompt = self._order.at(position)
            if prompt is None or curriculum.takes(self._order.seed, position, self.rates.of(prompt)):
                return position
        return self.cursor
