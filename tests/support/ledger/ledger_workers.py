"""Actions of workers and network in the small trial of ``ledger_world``, with their effect on the model."""

import contextlib
from dataclasses import dataclass

from realsys.manager.ledger.events import Outcome
from realsys.manager.messages import AllocateRequest, FinishRequest, NoServer, ScheduleRequest
from realsys.types import SampleMeta, Ticket
from tests.support.ledger.fingerprints import ledger_key
from tests.support.ledger.ledger_world import LEASE_S, Attempt, Truth, WorldState


@dataclass
class Workers(WorldState):
    """A method for each of their actions, by its name."""

    def _allocate(self, worker: str, request: str = "", lost: bool = False) -> None:
        counted = self._counted()
        reply = self.manager.allocate(AllocateRequest(worker, 1, request_id=request), 0.0)
        (ticket,) = reply.tickets
        bounds = self.bounds
        assert counted // bounds.batch <= self.manager.version + bounds.eta, f"N={counted + 1} is over the bound"
        old = self.truth.get(ticket.ticket_id)
        assert old in (None, "waiting"), f"{ticket.ticket_id} is granted, and {old}"
        prompt = self.prompts.setdefault(ticket.ticket_id, ticket.prompt_index)
        assert prompt == ticket.prompt_index, f"{ticket.ticket_id} is of prompt {ticket.prompt_index}, and of {prompt}"
        waiting = [t for t, state in self.truth.items() if state == "waiting"]
        assert not waiting or ticket.ticket_id == min(waiting), "what waits longest goes first"
        self.truth[ticket.ticket_id] = "running"
        if not lost:
            self._begin(ticket, worker)

    def _begin(self, ticket: Ticket, worker: str) -> None:
        oldest = self.manager.version
        for call in ("0.0", "1.0"):  # two episodes at the same time
            request = ScheduleRequest(ticket.ticket_id, ticket.attempt, 1, 1, call=call)
            with contextlib.suppress(NoServer):
                oldest = self.manager.schedule(request, 0.0).version
        self.attempts[ticket.ticket_id, ticket.attempt] = Attempt(ticket, worker, oldest)

    def _reply_lost(self, worker: str) -> None:
        self.unanswered[worker] = f"{worker} {self.faults}"
        self._allocate(worker, self.unanswered[worker], lost=True)

    def _asks_again(self, worker: str) -> None:
        request = self.unanswered.pop(worker)
        before = len(self.journal), ledger_key(self.manager.ledger)
        held = [t for t in self._running() if t.worker == worker]
        can = self.manager.refusal() is None
        reply = self.manager.allocate(AllocateRequest(worker, 1, request_id=request), 0.0)
        for ticket in reply.tickets:
            fresh = self.truth.get(ticket.ticket_id) != "running"
            assert fresh or any(t.ticket_id == ticket.ticket_id and t.attempt == ticket.attempt for t in held)
            assert not fresh or can
            self.truth[ticket.ticket_id] = "running"
            self._begin(ticket, worker)
        if all(ticket.ticket_id in {t.ticket_id for t in held} for ticket in reply.tickets):
            assert (len(self.journal), ledger_key(self.manager.ledger)) == before, "a repetition changed the ledger"

    def _deliver(self, group: SampleMeta) -> None:
        if group.trainer_incarnation != self._incarnation() or self.phase in ("down", "rolled back"):
            return  # the DP heads and the master refuse it, or are not there
        self.oldest[group.ticket_id, group.attempt] = group.version_min
        self.intake.add([group])

    def _arrive(self, ticket_id: str, number: int) -> None:
        attempt = self.attempts[ticket_id, number]
        attempt.pushed = True
        self._deliver(self._group(attempt))

    def _arrives_twice(self, ticket_id: str, number: int) -> None:
        self._arrive(ticket_id, number)
        self.strays.append(self._group(self.attempts[ticket_id, number]))

    def _never_arrives(self, ticket_id: str, number: int) -> None:
        """Acknowledged, and then lost between its DP head and the master."""
        self.attempts[ticket_id, number].pushed = True

    def _arrives_late(self, ticket_id: str, number: int) -> None:
        """Acknowledged, but the master learns of it later."""
        attempt = self.attempts[ticket_id, number]
        attempt.pushed = True
        self.strays.append(self._group(attempt))

    def _stray_arrives(self, number: int) -> None:
        self._deliver(self.strays.pop(number))

    def _finish(self, ticket_id: str, number: int, outcome: Outcome = "accepted", twice: bool = False) -> None:
        attempt = self.attempts.pop((ticket_id, number))
        request = FinishRequest(ticket_id, number, attempt.worker, outcome, "why")
        if twice:
            self.echoes.append(request)
        self._finish_call(request)

    def _finish_call(self, request: FinishRequest) -> None:
        ticket = self.manager.ledger.open.get(request.ticket_id)
        runs = self.manager.ledger.running_attempt(request.ticket_id, request.attempt)
        failures = ticket.failures if ticket else 0
        reply = self.manager.finish(request, 0.0)
        if not runs:
            return  # changes nothing: the truth stays, and is compared
        assert reply.known
        retry = request.outcome == "failed" and failures + 1 < self.bounds.attempts
        assert reply.retry == retry
        ends: dict[Outcome, Truth] = {
            "accepted": "finished",
            "rejected": "dropped",
            "filtered": "dropped",
            "failed": "waiting" if retry else "dropped",
        }
        self.truth[request.ticket_id] = ends[request.outcome]

    def _finishes_twice(self, ticket_id: str, number: int) -> None:
        self._finish(ticket_id, number, twice=True)

    def _fails(self, ticket_id: str, number: int) -> None:
        self._finish(ticket_id, number, "failed")

    def _fails_though_stored(self, ticket_id: str, number: int) -> None:
        """The push was not acknowledged in time, and has arrived or will."""
        self.strays.append(self._group(self.attempts[ticket_id, number]))
        self._finish(ticket_id, number, "failed")

    def _rejected(self, ticket_id: str, number: int) -> None:
        self._finish(ticket_id, number, "rejected")

    def _filtered(self, ticket_id: str, number: int) -> None:
        self._finish(ticket_id, number, "filtered")

    def _lapse(self, ticket_id: str) -> None:
        """Every other running attempt has sent news, this one has not."""
        for ticket in self._running():
            if ticket.ticket_id != ticket_id:
                ticket.news_at = 2 * LEASE_S
        assert self.manager.expire(2 * LEASE_S) == [ticket_id]
        self.truth[ticket_id] = "waiting"
        for ticket in self._running():
            ticket.news_at = 0.0

    _lapses_though_alive = _lapse

    def _dies(self, worker: str) -> None:
        """Restart the worker; the manager notices later."""
        self.births[worker] += 1
        self.unanswered.pop(worker, None)
        self.attempts = {key: a for key, a in self.attempts.items() if a.worker != worker}

    def _dies_in_push(self, worker: str) -> None:
        self.strays += [self._group(a) for a in self.attempts.values() if a.worker == worker and not a.pushed]
        self._dies(worker)

    def _death_noticed(self, worker: str) -> None:
        before = self.manager.workers[worker].incarnation
        held = {t.ticket_id for t in self._running() if (t.worker, t.incarnation) == (worker, before)}
        assert set(self._observe_workers()) == held
        self.truth |= dict.fromkeys(held, "waiting")
