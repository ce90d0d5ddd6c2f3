"""The rollout ledger: where every train ticket is, as a pure function of events.

                grant                     finish accepted             claim             trained
    waiting ────────────> running ───────────────────────> finished ─────────> claimed ─────────> trained at version k
       ^                  │  │  └── finish rejected/failed ──> dropped(reason)    ^
       │                  │  └── the group may outrun its finish (from waiting, too)
       └── failed, lost ──┴── never arrived, rolled back ── (from finished; from the others only by a roll-back)

Every ticket ends exactly once in one line of training, that is between two roll-backs. A group may reach the trainer
though its attempt counts as failed, so the two must agree before it is trained: what has ended otherwise cannot be
claimed, and what is claimed does not end otherwise. Decisions (``grant``,
``finish``, ...) check, apply and return events; ``apply`` (``ledger_state``) alone replays a journal. ``counted`` is N
of the admission inequality without the candidate: running + finished + claimed + trained, and in a trial
that continues from a checkpoint the groups that were trained before it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from realsys.manager.ledger.events import (
    Claimed,
    Dropped,
    Finished,
    Granted,
    Opened,
    Outcome,
    Reissued,
    RolledBack,
    Trained,
)
from realsys.manager.ledger.ledger_state import LedgerState
from realsys.manager.ledger.order import PromptOrder
from realsys.manager.ledger.tickets import OpenTicket, ticket_name
from realsys.manager.messages import DataPosition


@dataclass(frozen=True, slots=True)
class Finish:
    """What ``finish`` decided. ``event`` is None when nothing changed."""

    known: bool
    retry: bool = False
    event: Finished | None = None


class Ledger(LedgerState):
    """The decisions: each applies the events it returns."""

    def __init__(self, order: PromptOrder, max_attempts: int) -> None:
        super().__init__()
        self._order, self._max_attempts = order, max_attempts

    # -- questions ---------------------------------------------------------------------------------------------------

    @property
    def counted(self) -> int:
        """N without the candidate: running + finished + claimed + trained, here or before the checkpoint."""
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

    def touch(self, ticket_id: str, attempt: int, now: float) -> bool:
        """News of a running attempt renews its lease. False if it is not running (any more)."""
        if not self.is_running(ticket_id, attempt):
            return False
        self.open[ticket_id].news_at = now
        return True

    def require(self, tickets: Iterable[str]) -> None:
        """Raises ValueError for a ticket that was never granted."""
        for ticket_id in tickets:
            if self._number(ticket_id) is None:
                problem = "was never granted: the ledger has lost its end, or it is of another trial"
                raise ValueError(f"ticket {ticket_id} {problem}")

    # -- decisions: each applies the events it returns ---------------------------------------------------------------

    def grant(self, worker: str, incarnation: str, version: int, now: float, request: str = "") -> Granted | None:
        """The next attempt: lost and failed tickets first, oldest first; then given-back prompts; then new ones."""
        found = self._next()
        if found is None:
            return None
        event = Granted(*found, worker, incarnation, version, now, request)
        self.apply(event)
        return event

    def finish(
        self,
        ticket_id: str,
        attempt: int,
        outcome: Outcome,
        reason: str,
        now: float,
        versions: tuple[int, int] = (-1, -1),
    ) -> Finish:
        """End of an attempt. Not known if superseded or never granted; a repetition is known and changes nothing.

        ``versions``: of the answers' oldest and newest tokens.
        """
        number = self._number(ticket_id)
        if number is None or self._attempt[number] != attempt:
            return Finish(known=False)
        ticket = self.open.get(ticket_id)
        if ticket is None or ticket.state in ("finished", "claimed"):
            return Finish(known=True)
        if ticket.state == "waiting":
            # The attempt failed before (a repetition) or its lease lapsed; another attempt is under way either way.
            return Finish(known=False, retry=True)
        retry = outcome == "failed" and ticket.failures + 1 < self._max_attempts
        event = Finished(ticket_id, attempt, outcome, reason[:512], retry, now, *versions)
        self.apply(event)
        return Finish(known=True, retry=retry, event=event)

    def claim(
        self, version: int, tickets: Sequence[str], now: float, incarnation: str = ""
    ) -> tuple[Claimed | None, list[str]]:
        """The trainer wants to train these. Also: which of them have ended; then none is claimed.

        No event either if all were claimed before. Raises ValueError for a ticket that was never granted.
        """
        self.require(tickets)
        if gone := [name for name in dict.fromkeys(tickets) if name not in self.open]:
            return None, gone
        fresh = [name for name in dict.fromkeys(tickets) if self.open[name].state != "claimed"]
        if not fresh:
            return None, []
        event = Claimed(version, fresh, now, incarnation)
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
    ) -> Trained | None:
        """These are in the weights now. Repetitions are left out; None when nothing is left.

        ``oldest``: of each ticket, the version of its oldest token; or empty. Raises ValueError for another number, and
        for a ticket that was not claimed.
        """
        if oldest and len(oldest) != len(tickets):
            raise ValueError(f"oldest has {len(oldest)} versions for {len(tickets)} trained tickets")
        fresh: dict[str, int] = {}
        for i, ticket_id in enumerate(tickets):
            number, ticket = self._number(ticket_id), self.open.get(ticket_id)
            if ticket is not None and ticket.state == "claimed":
                fresh.setdefault(ticket_id, oldest[i] if oldest else -1)
            elif number is None or self._outcome[number] != version:
                was = self.state_of(ticket_id)
                raise ValueError(f"ticket {ticket_id} trained at version {version}, though it is {was}, not claimed")
        if not fresh:
            return None
        event = Trained(version, step, list(fresh), now, list(fresh.values()) if oldest else [], incarnation)
        self.apply(event)
        return event

    def drop(self, ticket_id: str, reason: str, now: float, *, requeue: bool = False) -> Dropped | None:
        """The trainer gave a group back. None if the ticket has ended already."""
        if ticket_id not in self.open:
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

    def never_arrived(self, held: Collection[str], before: float, now: float) -> list[Reissued]:
        """Re-issue what finished before ``before`` and is not among ``held``, the tickets that the trainer has.

        Whichever attempt it has of a ticket: one is enough.
        """
        missing = [
            ticket
            for ticket in self.open.values()
            if ticket.state == "finished" and ticket.news_at < before and ticket.ticket_id not in held
        ]
        events = [Reissued(ticket.ticket_id, ticket.attempt, "never arrived", now) for ticket in missing]
        for event in events:
            self.apply(event)
        return events

    def roll_back(self, version: int, step: int, incarnation: str, checkpoint: str, now: float) -> RolledBack:
        """Training starts from ``version``: what was trained later, is buffered or runs is lost and issued again.

        Raises ValueError for a version that this ledger cannot go back to.
        """
        if version < self.base:
            raise ValueError(f"version {version}: this trial began at {self.base}, from a checkpoint of another one")
        if version > max(self.newest, 0):
            raise ValueError(
                f"version {version}: the ledger ends at {max(self.newest, 0)}: it is older than the checkpoint "
                f"{checkpoint or 'that was loaded'}, or of another trial; remove the younger checkpoints, or start anew"
            )
        event = RolledBack(version, step, incarnation, checkpoint, now)
        self.apply(event)
        return event

    def bind(self, opened: Opened) -> Opened | None:
        """What the decisions are bound by from now on; None if they were before.

        Raises LedgerError if the tickets that there are cannot be those of this order of prompts.
        """
        if self.opened is not None and msgspec.structs.replace(self.opened, time=opened.time) == opened:
            return None
        self.apply(opened)
        return opened

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
