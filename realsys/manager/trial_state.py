"""TrialState: everything the manager knows of a trial; journal, name store and clock change it, calls decide by it.

    journal ──restore_from──> TrialState <──observe, publish, expire── name store, clock
                                  │
                                  └── outbox: events that the shell must append before it answers a call

No I/O and no clock: ``now`` (unix seconds) is an argument.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Collection, Iterable

from realsys.manager.ledger.evaluation import Evaluation
from realsys.manager.ledger.evaluations import Evaluations, RunningProblem
from realsys.manager.ledger.events import (
    EvalEvent,
    Event,
    Granted,
    Opened,
    RolledBack,
    Snapshot,
)
from realsys.manager.ledger.ledger import Ledger
from realsys.manager.ledger.order import PromptOrder, sampling_seed
from realsys.manager.ledger.repeats import Repeats
from realsys.manager.ledger.staleness import StalenessBound, StepStaleness
from realsys.manager.ledger.tickets import OpenTicket
from realsys.manager.messages import RefusalReason
from realsys.manager.routing.holds import Holds
from realsys.manager.routing.placement import Reservations, make_strategy
from realsys.manager.routing.rates import Throughput
from realsys.manager.routing.rollout_workers import Heartbeat, Held, is_lost, observe, renewed
from realsys.manager.routing.router import Exactly, Router
from realsys.manager.routing.servers import Idle, ServerRegistry, UpdateOrder
from realsys.manager.settings import ManagerSettings
from realsys.types import ServerAddress, Ticket

NO_VERSION = -1
#: Seconds that the watch may be behind a worker that asks for tickets. A worker that ended just before its call was
#: decided has no heartbeat after them, and its tickets are reissued.
UNSEEN_GRACE_S = 10.0


class TrialState:
    """Ledger, evaluations, servers, reservations and workers of one trial."""

    def __init__(self, settings: ManagerSettings) -> None:
        self.settings = settings
        self.bound = StalenessBound(settings.batch_groups, settings.eta)
        order = PromptOrder(settings.seed, settings.split_sizes["train"], settings.total_epochs)
        self.ledger = Ledger(order, settings.max_attempts, settings.curriculum)
        self.evaluations = Evaluations(settings.max_attempts)
        self.servers = ServerRegistry(self.bound, settings.pace, settings.blame, settings.fan_out)
        self.reservations = Reservations()
        strategy = make_strategy(settings.routing)
        self.router = Router(self.servers, self.reservations, strategy, settings.kv_reuse_versions)
        self.holds = Holds(settings.holds, self.servers, self.reservations, self.evaluations)
        self.workers: dict[str, Heartbeat] = {}
        self.rollout_workers = 0  # heartbeats of RolloutWorkers
        self._observed = False  # heartbeats have been seen since the start
        self.unseen: dict[str, float] = {}  # worker -> time of a grant to an incarnation whose heartbeat is not there
        # Other allocations that are held, and those of them that have been woken for a ticket; the shell counts them.
        self.asking = 0
        self.promised = 0
        self.repeats = Repeats()
        self.unplaced: list[tuple[str, int]] = []  # attempts that ran when the manager before this one ended
        self.outbox: list[Event] = []
        # Shown on the status page; decides nothing.
        self.started = 0.0
        self.master: dict[str, object] = {}  # value of names.status, written by the MasterWorker; "done" pauses
        self.staleness: deque[StepStaleness] = deque(maxlen=20)
        self.throughput = Throughput()

    @property
    def version(self) -> int:
        """The published version v; -1 before the first."""
        return self.servers.published.version if self.servers.published else NO_VERSION

    @property
    def trainer_incarnation(self) -> str:
        """Incarnation of the trainer that rolled back last; "" before the first."""
        return self.ledger.rolled_back.incarnation if self.ledger.rolled_back else ""

    def refusal(self) -> RefusalReason | None:
        """Return why no train ticket can be granted now, None if one can (``admission``)."""
        if not self.settings.trains or self.master.get("phase") == "done":
            return "paused"
        if not self.router.routes(None):
            return "no_server"
        needed = self.settings.total_steps * self.settings.batch_groups
        if self.ledger.exhausted or (needed and self.ledger.counted >= needed):
            return "exhausted"
        weights = self.bound.oldest_weights(self.ledger.counted + 1)
        return None if weights <= self.version and self._is_served(self.minimum(weights)) else "staleness"

    def _is_served(self, minimum: int) -> bool:
        """Return True if as many servers serve ``minimum`` or a newer version as are about to.

        A version is published before servers serve it, so a ticket that needs it waits. If it waited for the first
        server only, that one would get the calls of a whole batch. The time limit of an update bounds the wait.
        """
        fresh = len(self.router.routes(minimum))
        return fresh > 0 and fresh >= self.servers.staging(minimum)

    def minimum(self, weights: int) -> int:
        """Return the oldest version that may serve a train ticket which needs ``weights`` or newer ones."""
        return max(0, weights, self.version - self.settings.eta)

    def grantable(self) -> int:
        """Return how many tickets can be granted now, at most as many as there are prompts left."""
        problems = sum(
            len(evaluation.waiting)
            for evaluation in self.evaluations.by_id.values()
            if evaluation.waiting and self.playable(evaluation) is not None
        )
        if self.refusal() is not None:
            return problems
        served = max((server.version for server in self.router.routes(None)), default=NO_VERSION)
        return problems + self.bound.headroom(self.ledger.counted, min(served, self.version))

    def playable(self, evaluation: Evaluation) -> int | None:
        """Return the version that servers serve for an evaluation now; None: it must wait."""
        return self.holds.playable(evaluation, lambda version: self.router.routes(Exactly(version)))

    def share(self) -> int:
        """Return the most tickets that one allocation may get: the same for all workers that may ask, at least one.

        A ticket that is promised to another allocation is not taken. ``refusal`` alone says whether any is granted.
        """
        grantable = self.grantable()
        equal = max(1, -(-grantable // max(self.asking + 1, self.rollout_workers)))
        return min(equal, grantable - self.promised) if self.promised else equal

    def running_attempt(self, ticket_id: str, attempt: int) -> OpenTicket | RunningProblem | None:
        """Return a running attempt of training or of an evaluation, None if it is over or unknown."""
        return self.ledger.running_attempt(ticket_id, attempt) or self.evaluations.running_attempt(ticket_id, attempt)

    # -- journal -----------------------------------------------------------------------------------------------------

    def restore_from(self, events: Iterable[Event]) -> None:
        """Replay a journal into a fresh state."""
        for event in events:
            if not isinstance(event, EvalEvent):
                self.ledger.apply(event)
            if isinstance(event, EvalEvent | RolledBack | Snapshot):
                self.evaluations.apply(event)
        if self.trainer_incarnation:
            self.servers.roll_back(self.trainer_incarnation)
        for ticket in sorted(self.ledger.running(), key=lambda ticket: ticket.news_at):
            self.unplaced.append((ticket.ticket_id, ticket.attempt))
            self.repeats.remember(ticket.worker, ticket.request, self._ticket(ticket))

    def open(self, now: float) -> None:
        """Record the settings that bind every decision, before the first decision and after ``restore_from``.

        Raises LedgerError if the journal's tickets were granted under other settings.
        """
        settings = self.settings
        self.started = now
        opened = Opened(
            prompts=settings.split_sizes["train"],
            seed=settings.seed,
            batch_groups=settings.batch_groups,
            eta=settings.eta,
            stale_policy=settings.stale_policy,
            group_size=settings.group_size,
            time=now,
            max_reissues=settings.max_reissues,
            curriculum=dataclasses.astuple(settings.curriculum) if settings.curriculum else None,
        )
        self.outbox += [event for event in (self.ledger.bind(opened), self.evaluations.resume(now)) if event]
        for ticket in self.ledger.open.values():
            # Renewals are not in the journal, so every lease starts again. A clock that was set back prolongs nothing.
            ticket.news_at = now if ticket.state == "running" else min(ticket.news_at, now)

    def snapshot(self, now: float) -> Snapshot:
        """Return the state of ledger and evaluations as one record that replaces the journal."""
        assert not self.outbox, "events that are not in the journal yet would be in it twice"
        return self.ledger.snapshot(now, *self.evaluations.snapshot())

    def _ticket(self, granted: Granted | OpenTicket) -> Ticket:
        # A resumed trial counts on from the groups before its checkpoint, so that it does not repeat their seeds.
        number = self.ledger.counts.inherited + int(granted.ticket_id)
        return Ticket(
            granted.ticket_id,
            granted.attempt,
            granted.prompt_index,
            n=self.settings.group_size,
            seed=sampling_seed(self.settings.seed, number, granted.attempt),
            version=granted.version,
            reissues=self.ledger.stale_reissues(granted.ticket_id),
            trainer_incarnation=self.trainer_incarnation,
        )

    def memory(self) -> dict[str, int]:
        """Return the resident memory in bytes of each server and RolloutWorker that has reported it."""
        servers = {server.name: int(server.load.get("memory_bytes", 0)) for server in self.servers.all()}
        workers = {name: size for name, size in self.throughput.memory.items() if name in self.workers}
        return {name: size for name, size in (workers | servers).items() if size}

    # -- name store and clock ----------------------------------------------------------------------------------------

    def observe_servers(self, addresses: Iterable[ServerAddress]) -> None:
        """Take over the current list of registered servers; free the places on servers that are gone."""
        lost = self.servers.observe(addresses)
        for name in lost:
            self.reservations.release_server(name)
        self.throughput.observe_servers([server.name for server in self.servers.all()], lost)

    def observe_workers(self, heartbeats: dict[str, str], now: float) -> list[str]:
        """Take over all heartbeat keys (worker name -> JSON). Returns the tickets of lost workers, now reissued.

        Only the tickets of workers that have come, gone or restarted are looked at; the first time all tickets, because
        workers may have ended while no manager ran.
        """
        before, self.workers = self.workers, observe(heartbeats, self.workers, now)
        self.rollout_workers = sum(beat.kind == "rollout_worker" for beat in self.workers.values())
        if self._observed:
            return self._lose_workers(renewed(before, self.workers), now)
        self._observed = True
        return self._lose(lambda held: is_lost(held, self.workers), "worker lost", now)

    def expire(self, now: float) -> list[str]:
        """Reissue running tickets without news for ``lease_s``, and those of workers that never had a heartbeat."""
        self.refresh_holds(now)
        unseen = {worker for worker, since in self.unseen.items() if now - since > UNSEEN_GRACE_S}
        for worker in unseen:
            del self.unseen[worker]
        lost = self._lose_workers(unseen, now)
        return lost + self._lose(lambda held: now - held.news_at > self.settings.lease_s, "lease lapsed", now)

    def _lose_workers(self, workers: Collection[str], now: float) -> list[str]:
        if not workers:
            return []
        return self._lose(lambda held: held.worker in workers and is_lost(held, self.workers), "worker lost", now)

    def refresh_holds(self, now: float) -> None:
        """Decide which servers keep their version for an evaluation, and which evaluations have lost theirs."""
        if not self.servers.holds and not self.evaluations.unfinished():
            return
        for event in self.holds.refresh(now):
            self.outbox.append(event)
            self._release_over()

    def _release_over(self) -> None:
        """Free the places of evaluation tickets that do not run any more."""
        for ticket_id in self.reservations.tickets():
            if ticket_id.startswith("eval-") and ticket_id not in self.evaluations.running:
                self.reservations.release(ticket_id)

    def next_order(self, name: str, incarnation: str, now: float) -> UpdateOrder | Idle | None:
        """Return the next step of a server's update task; None ends the task. A running evaluation may delay it."""
        self.refresh_holds(now)
        return self.servers.next_order(name, incarnation, now)

    def take_due(self) -> set[str]:
        """Return the servers whose tasks have something to decide, once."""
        due, self.servers.due = self.servers.due, set()
        if not self.settings.interruptible:  # a draining server waits for the end of its calls
            due.update(server.name for server in self.servers.all() if server.draining)
        return due

    def begin_update(self, order: UpdateOrder, now: float) -> bool:
        """Return True if the update may start now. If completions may not be interrupted, drain the server first."""
        if not self.settings.interruptible and (self.reservations.load(order.server)[0] or self._runs_unplaced()):
            self.servers.drain(order, now)
            return False
        self.servers.started(order, now)
        return True

    def _lose(self, is_over: Callable[[Held], bool], cause: str, now: float) -> list[str]:
        events = self.ledger.lose(is_over, cause, now)
        self.outbox += events
        tickets = [event.ticket_id for event in events] + self.evaluations.lose(is_over)
        for ticket_id in tickets:
            self.reservations.release(ticket_id)
        return tickets

    def _runs_unplaced(self) -> bool:
        """Return True while an attempt from before a restart may run on a server that this manager does not know."""
        self.unplaced = [
            (ticket_id, attempt)
            for ticket_id, attempt in self.unplaced
            if self.ledger.running_attempt(ticket_id, attempt) and not self.reservations.calls(ticket_id)
        ]
        return bool(self.unplaced)
