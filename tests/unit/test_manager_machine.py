"""Random histories of arrivals, finishes, deaths, updates and restarts against a model that knows only the rules.

In both roll-out modes, with updates in the middle of answers and with draining, and with every routing strategy.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from realsys.admission.events import Event, Outcome
from realsys.admission.manager import ManagerSettings, ManagerState, NoServer, NotRunning
from realsys.admission.messages import (
    AllocateRequest,
    Answer,
    EvaluateRequest,
    FinishRequest,
    ScheduleReply,
    ScheduleRequest,
    TrainedRequest,
)
from realsys.admission.routing import STRATEGIES
from realsys.admission.servers import Pace, UpdateOrder
from realsys.types import PublishedVersion, ServerAddress, Ticket

B, ETA, LEASE_S, ATTEMPTS = 3, 1, 50.0, 3
SERVERS, WORKERS = st.integers(0, 3), st.integers(0, 2)
PATIENCE_S = 30.0
PACES = st.sampled_from([Pace(), Pace(0.3, PATIENCE_S), Pace(0.5, PATIENCE_S)])
OUTCOMES: st.SearchStrategy[Outcome] = st.sampled_from(["accepted", "accepted", "rejected", "failed"])
SETTINGS = ManagerSettings(B, ETA, 2, ATTEMPTS, 1, {"train": 7, "eval": 4}, lease_s=LEASE_S)


@dataclass
class Known:
    """What the model knows of a train ticket."""

    state: str
    attempt: int
    prompt: int
    worker: str
    granted: float
    news: float
    failures: int = 0


@dataclass
class Truth:
    """What a server really is: its version, and whether the manager may trust it."""

    address: ServerAddress
    version: int | None = None
    trusted: bool = True
    draining: bool = False
    began: float | None = None


class ManagerMachine(RuleBasedStateMachine):
    orders: Bundle[UpdateOrder] = Bundle("orders")
    tickets: Bundle[Ticket] = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.now, self.version, self.births, self.evals = 0.0, -1, 0, 0
        self.settings = SETTINGS
        self.state = ManagerState(SETTINGS)
        self.unplaced: set[tuple[str, int]] = set()  # attempts that ran when the manager restarted
        self.journal: list[Event] = []
        self.model: dict[str, Known] = {}
        self.servers: dict[str, Truth] = {}
        self.workers: dict[str, str] = {}
        self.eval_total = 0

    # -- helpers -------------------------------------------------------------------------------------------------------

    def commit(self) -> None:
        self.journal += self.state.outbox
        self.state.outbox = []

    def counted(self) -> int:
        return sum(known.state in ("running", "finished", "trained") for known in self.model.values())

    def serves(self, truth: Truth, minimum: int) -> bool:
        return truth.trusted and truth.version is not None and minimum <= truth.version <= self.version

    def takes_new(self, minimum: int) -> bool:
        return any(self.serves(truth, minimum) and not truth.draining for truth in self.servers.values())

    def holds_slot(self, truth: Truth) -> bool:
        serving = self.serves(truth, self.version - ETA)
        return serving and truth.began is not None and self.now - truth.began < PATIENCE_S

    def register(self) -> None:
        self.state.observe_servers([truth.address for truth in self.servers.values()])

    def observe_workers(self) -> None:
        beats = {name: f'{{"kind": "rollout_worker", "incarnation": "{i}"}}' for name, i in self.workers.items()}
        lost = self.state.observe_workers(beats, self.now)
        self.mark_lost(lost)
        self.commit()

    def mark_lost(self, lost: list[str]) -> None:
        for ticket_id in lost:
            if not ticket_id.startswith("eval-"):
                assert self.model[ticket_id].state == "running"
                self.model[ticket_id].state = "waiting"

    # -- servers and versions ------------------------------------------------------------------------------------------

    @initialize(pace=PACES, interruptible=st.booleans(), routing=st.sampled_from(sorted(STRATEGIES)))
    def begin(self, pace: Pace, interruptible: bool, routing: str) -> None:
        self.settings = dataclasses.replace(SETTINGS, pace=pace, interruptible=interruptible, routing=routing)
        self.state = ManagerState(self.settings)
        self.publish()
        self.worker_starts(0)
        for index in range(3):
            self.server_joins(index)
        self.all_servers_update()

    @rule(index=SERVERS)
    def server_joins(self, index: int) -> None:
        """New, or restarted before anyone noticed that it had died."""
        self.births += 1
        name = f"generation_server/{index}"
        self.servers[name] = Truth(ServerAddress(name, f"http://h:{self.births}", 1, "h", str(self.births)))
        self.register()
        assert self.state.reservations.load(name) == (0, 0)

    @precondition(lambda self: len(self.servers) > 1)
    @rule(index=SERVERS)
    def server_leaves(self, index: int) -> None:
        self.servers.pop(f"generation_server/{index}", None)
        self.register()

    @precondition(lambda self: self.version * B <= 6 + self.counted())
    @rule()
    def publish(self) -> None:
        self.version += 1
        assert self.state.publish(PublishedVersion(self.version, "m", f"/v{self.version}", self.version))
        assert not self.state.publish(PublishedVersion(self.version - 1, "m", "/old", 0)), "versions never go back"

    @rule(target=orders, index=SERVERS)
    def order(self, index: int) -> UpdateOrder | object:
        truth = self.servers.get(f"generation_server/{index}")
        if truth is None:
            return multiple()
        order = self.state.servers.next_order(truth.address.name, truth.address.incarnation, self.now)
        if not isinstance(order, UpdateOrder):
            return multiple()
        assert order.target.version == self.version and order.url == truth.address.url
        if self.settings.pace.fraction < 1 and self.serves(truth, self.version - ETA) and truth.began is None:
            serving = [other for other in self.servers.values() if self.serves(other, self.version - ETA)]
            slots = max(1, int(self.settings.pace.fraction * len(serving)))
            assert sum(self.holds_slot(other) for other in serving) < slots, "more servers update than may at a time"
        began = self.state.begin_update(order, self.now)
        truth.began = self.now if truth.began is None else truth.began
        if not began:
            assert not self.settings.interruptible
            truth.draining = True
            return multiple()
        if not self.settings.interruptible:
            assert self.state.reservations.load(order.server) == (0, 0), "an update in the middle of an answer"
            assert not any(self.runs_unseen(*attempt) for attempt in self.unplaced), "an answer whose place is unknown"
        return order

    def runs_unseen(self, ticket_id: str, attempt: int) -> bool:
        known = self.model[ticket_id]
        running = known.state == "running" and known.attempt == attempt
        return running and self.state.reservations.get(ticket_id) is None

    @precondition(lambda self: self.version * B <= 6 + self.counted())
    @rule(target=orders)
    def rollout_begins(self) -> object:
        """A version comes out and every server that may begins with it, or drains for it; some never end."""
        self.publish()
        orders = [self.order(int(name[-1])) for name in list(self.servers)]
        return multiple(*(order for order in orders if isinstance(order, UpdateOrder)))

    @rule(order=consumes(orders), success=st.booleans())
    def update_ends(self, order: UpdateOrder, success: bool) -> None:
        """Possibly long after a newer version was published, or after the server was replaced."""
        truth = self.servers.get(order.server)
        current = truth is not None and truth.address.incarnation == order.incarnation
        if success:
            assert self.state.servers.succeeded(order, 0.1, {}) == current
        else:
            assert self.state.servers.failed(order, "disk on fire", self.now) == current
        if truth is not None and current:
            truth.draining, truth.began = False, None
            if success:
                truth.version = order.target.version
                truth.trusted = truth.trusted or order.target.version == self.version
            else:
                truth.trusted = False

    @rule()
    def all_servers_update(self) -> None:
        """However they are paced: if none of them hangs, every server that serves gets there without the clock."""
        hanging = any(self.holds_slot(truth) for truth in self.servers.values())
        for _ in range(len(self.servers)):
            for name in list(self.servers):
                order = self.order(int(name[-1]))
                if isinstance(order, UpdateOrder):
                    self.update_ends(order, True)
        if self.settings.interruptible and not hanging:
            assert all(t.version == self.version for t in self.servers.values() if t.trusted)

    # -- workers and the clock -----------------------------------------------------------------------------------------

    @rule(index=WORKERS)
    def worker_starts(self, index: int) -> None:
        """Also a restart, seen only as a new incarnation."""
        self.births += 1
        self.lose_worker(f"rollout_worker/{index}", str(self.births))

    @precondition(lambda self: len(self.workers) > 1)
    @rule(index=WORKERS)
    def worker_dies(self, index: int) -> None:
        self.lose_worker(f"rollout_worker/{index}", None)

    def lose_worker(self, name: str, incarnation: str | None) -> None:
        held = {i for i, known in self.model.items() if known.state == "running" and known.worker == name}
        self.workers.pop(name, None)
        if incarnation is not None:
            self.workers[name] = incarnation
        self.observe_workers()
        assert all(self.model[ticket_id].state == "waiting" for ticket_id in held)

    @rule(seconds=st.sampled_from([1.0, 20.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        lapsed = {i for i, k in self.model.items() if k.state == "running" and self.now - k.news > LEASE_S}
        lost = self.state.expire(self.now)
        assert {ticket_id for ticket_id in lost if not ticket_id.startswith("eval-")} == lapsed
        self.mark_lost(lost)
        self.commit()

    # -- rollouts ------------------------------------------------------------------------------------------------------

    @rule(target=tickets, index=WORKERS, count=st.integers(1, 5))
    def allocate(self, index: int, count: int) -> object:
        worker = sorted(self.workers)[index % len(self.workers)]
        routable = self.takes_new(self.version - ETA)
        reply = self.state.allocate(AllocateRequest(worker, count), self.now)
        self.commit()
        for ticket in reply.tickets:
            if ticket.kind == "train":
                assert routable, "granted without a server that may answer"
                self.granted(ticket, worker)
        if not reply.tickets:
            assert reply.reason == ("staleness" if routable else "no_server")
        return multiple(*reply.tickets)

    @rule(target=tickets, index=WORKERS, count=st.integers(2, 5))
    def rollouts_begin(self, index: int, count: int) -> object:
        """Granted and sent to their servers, where they stay for now."""
        reply = self.allocate(index, count)
        for ticket in reply.values if isinstance(reply, MultipleResults) else [reply]:
            self.schedule(ticket, False)
        return reply

    def granted(self, ticket: Ticket, worker: str) -> None:
        assert self.counted() // B <= self.version + ETA, "floor((N - 1) / B) <= v + eta, N with the candidate"
        old = self.model.get(ticket.ticket_id)
        waiting = [ticket_id for ticket_id, known in self.model.items() if known.state == "waiting"]
        if old is None:
            assert not waiting and ticket.attempt == 0, "a waiting ticket goes before a new one"
            assert all(ticket.ticket_id > ticket_id for ticket_id in self.model)
        else:
            assert ticket.ticket_id == min(waiting) and ticket.attempt == old.attempt + 1
            assert ticket.prompt_index == old.prompt
        failures = old.failures if old else 0
        self.model[ticket.ticket_id] = Known(
            "running", ticket.attempt, ticket.prompt_index, worker, self.now, self.now, failures
        )

    def running(self, ticket: Ticket) -> bool:
        if ticket.kind == "eval":
            return self.state.evaluations.running(ticket.ticket_id, ticket.attempt) is not None
        known = self.model[ticket.ticket_id]
        return known.state == "running" and known.attempt == ticket.attempt

    @rule(target=tickets, outcome=OUTCOMES, count=st.integers(1, 5))
    def whole_rollouts(self, outcome: Outcome, count: int) -> object:
        """The usual life: granted, sent to a server, finished."""
        reply = self.allocate(0, count)
        for ticket in reply.values if isinstance(reply, MultipleResults) else [reply]:
            self.schedule(ticket, False)
            self.finish(ticket, outcome)
        return reply

    @rule(ticket=tickets, failed=st.booleans())
    def schedule(self, ticket: Ticket, failed: bool) -> None:
        held = self.state.reservations.get(ticket.ticket_id)
        running = self.running(ticket)
        request = ScheduleRequest(ticket.ticket_id, ticket.attempt, 10, 20, ticket.n)
        if failed and held is not None:
            request.failed_server = held.server
        reply = self.state.schedule(request, self.now)
        self.commit()
        if not running:
            assert isinstance(reply, NotRunning)
            return
        if failed and held is not None and self.state.servers.get(held.server).quarantined:  # type: ignore[union-attr]
            self.servers[held.server].trusted = False
        if ticket.kind == "train":
            self.model[ticket.ticket_id].news = self.now
        if isinstance(reply, ScheduleReply):
            truth = self.servers[reply.server]
            minimum = self.version - ETA if ticket.kind == "train" else 0
            assert self.serves(truth, minimum), "sent to a dead, untrusted or stale server"
            stays = held is not None and not failed and held.server == reply.server
            assert not truth.draining or stays, "a new ticket on a server that is drained"
            assert (reply.url, reply.version) == (truth.address.url, truth.version)
            place = self.state.reservations.get(ticket.ticket_id)
            assert place is not None and place.server == reply.server
        else:
            assert isinstance(reply, NoServer)
            if ticket.kind == "train":
                assert not self.takes_new(self.version - ETA)

    @rule(ticket=tickets, outcome=OUTCOMES)
    def finish(self, ticket: Ticket, outcome: Outcome) -> None:
        answers = [] if outcome == "failed" else [Answer(5.0, True, 20, "stop", 0, 0)] * ticket.n
        request = FinishRequest(ticket.ticket_id, ticket.attempt, "w", outcome, "why", answers)
        running = self.running(ticket)
        reply = self.state.finish(request, self.now)
        self.commit()
        if not running:
            return
        assert reply.known and self.state.reservations.get(ticket.ticket_id) is None
        if ticket.kind == "eval":
            return
        known = self.model[ticket.ticket_id]
        known.failures += outcome == "failed"
        retry = outcome == "failed" and known.failures < ATTEMPTS
        assert reply.retry == retry
        known.state = {"accepted": "finished", "rejected": "dropped", "failed": "waiting" if retry else "dropped"}[
            outcome
        ]

    @rule(data=st.data(), early=st.booleans(), repeat=st.booleans())
    def train(self, data: st.DataObject, early: bool, repeat: bool) -> None:
        """A batch; ``early``: also groups whose finish has not arrived; ``repeat``: the call is sent twice."""
        states = ("finished", "running", "waiting") if early else ("finished",)
        ready = sorted(ticket_id for ticket_id, known in self.model.items() if known.state in states)
        batch = data.draw(st.lists(st.sampled_from(ready), max_size=B, unique=True)) if ready else []
        request = TrainedRequest(self.version + 1, self.version + 1, batch, staleness={"0": len(batch)})
        assert self.state.trained(request, self.now).trained == len(batch)
        if repeat:
            assert self.state.trained(request, self.now).trained == 0
        self.commit()
        for ticket_id in batch:
            assert self.model[ticket_id].state != "trained"
            self.model[ticket_id].state = "trained"

    @rule(data=st.data(), reason=st.sampled_from(["stale", "filtered"]))
    def drop(self, data: st.DataObject, reason: str) -> None:
        ready = sorted(ticket_id for ticket_id, known in self.model.items() if known.state == "finished")
        if ready:
            ticket_id = data.draw(st.sampled_from(ready))
            reply = self.state.trained(TrainedRequest(1, 1, dropped=[(ticket_id, reason)]), self.now)
            self.commit()
            assert reply.dropped == 1
            self.model[ticket_id].state = "dropped"

    @rule()
    def evaluate(self) -> None:
        if self.evals < 2:
            self.evals += 1
            self.eval_total += self.state.evaluate(EvaluateRequest(f"e{self.evals}", "eval", 9), self.now).started.total
            self.commit()

    # -- restart -------------------------------------------------------------------------------------------------------

    @rule()
    def manager_restarts(self) -> None:
        before = self.state
        events = [msgspec.json.decode(msgspec.json.encode(event), type=Event) for event in self.journal]
        self.state = ManagerState(self.settings)
        self.state.restore_from(events)
        assert self.state.ledger.counts == before.ledger.counts or before.ledger.counts.anomalies
        assert self.state.ledger.cursor == before.ledger.cursor
        assert self.state.ledger.open.keys() == before.ledger.open.keys()
        for known in self.model.values():
            known.news = known.granted  # renewals are not journalled
        self.state.publish(PublishedVersion(self.version, "m", f"/v{self.version}", self.version))
        for truth in self.servers.values():
            truth.version, truth.trusted, truth.draining, truth.began = None, True, False, None
        self.unplaced = {(i, known.attempt) for i, known in self.model.items() if known.state == "running"}
        self.register()
        self.observe_workers()

    # -- what must always hold -----------------------------------------------------------------------------------------

    @invariant()
    def counts_are_those_of_a_recount(self) -> None:
        counts = Counter(known.state for known in self.model.values())
        by_state = self.state.ledger.counts.by_state()
        assert by_state == {state: counts[state] for state in by_state}
        assert self.state.ledger.counted == self.counted()
        assert sum(self.state.ledger.counts.dropped_by_reason.values()) == counts["dropped"]

    @invariant()
    def reservations_belong_to_running_tickets(self) -> None:
        reservations, running = self.state.reservations, 0
        for name in self.servers:
            assert reservations.load(name) == reservations.recount().get(name, (0, 0))
            running += reservations.load(name)[0]
        assert reservations.recount().keys() <= self.servers.keys(), "a place on a server that is gone"
        places = [t for t, known in self.model.items() if known.state == "running" and reservations.get(t)]
        evals = [
            problem.ticket_id
            for evaluation in self.state.evaluations.all().values()
            for problem in evaluation.running.values()
            if reservations.get(problem.ticket_id)
        ]
        assert len(reservations) == len(places) + len(evals)

    @invariant()
    def no_problem_of_an_evaluation_is_lost(self) -> None:
        total = 0
        for evaluation in self.state.evaluations.all().values():
            parts = [set(evaluation.waiting), set(evaluation.running), evaluation.done]
            assert sum(map(len, parts)) == len(set.union(*parts)) == evaluation.started.total
            total += evaluation.started.total
        assert total == self.eval_total


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
