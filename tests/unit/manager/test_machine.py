"""Random histories of a manager against a model that knows only its invariants."""

import dataclasses
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
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

from realsys.manager.decisions import ARRIVAL_GRACE_S, ManagerSettings, ManagerState
from realsys.manager.ledger.events import EvalsResumed, Event, Outcome
from realsys.manager.ledger.prompt_order import Curriculum
from realsys.manager.messages import (
    AllocateRequest,
    Answer,
    ClaimReply,
    ClaimRequest,
    EvaluateRequest,
    FinishRequest,
    NoServer,
    NotRunning,
    OlderTrainer,
    Refusal,
    RollBackRequest,
    ScheduleReply,
    ScheduleRequest,
    TrainedReply,
    TrainedRequest,
)
from realsys.manager.routing.placement import STRATEGIES
from realsys.manager.routing.servers import Pace, Probe, UpdateOrder
from realsys.types import PublishedVersion, ServerAddress, Ticket
from tests.support.ledger.fingerprints import recount

B, ETA, LEASE_S, ATTEMPTS = 3, 1, 50.0, 3
SERVERS, WORKERS = st.integers(0, 3), st.integers(0, 2)
PATIENCE_S = 30.0
PACES = st.sampled_from([Pace(), Pace(0.3, PATIENCE_S), Pace(0.5, PATIENCE_S)])
CALLS = st.sampled_from(["0.0", "0.1", "1.0"])
OUTCOMES: st.SearchStrategy[Outcome] = st.sampled_from(["accepted", "accepted", "rejected", "filtered", "failed"])
SETTINGS = ManagerSettings(B, ETA, 2, ATTEMPTS, 1, {"train": 7, "eval": 4}, lease_s=LEASE_S)


@dataclass
class Known:
    """The model's record of a train ticket."""

    state: str
    attempt: int
    prompt: int
    worker: str
    granted: float
    news: float
    failures: int = 0
    version: int = -1  # it is trained in
    weights: int = -1  # oldest version that may sample it
    stale: int = 0  # reissues because its group was too old


@dataclass
class Truth:
    """The real state of a server: its version, and whether the manager may trust it."""

    address: ServerAddress
    version: int | None = None
    trusted: bool = True
    reporters: set[str] = field(default_factory=set)  # workers that have reported it since its last proof
    draining: bool = False
    began: float | None = None


class ManagerModel(RuleBasedStateMachine):
    """The manager under test, its model, and the invariants of both."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.version, self.births, self.evals = 0.0, -1, 0, 0
        self.trainings, self.newest = 0, 0  # starts of the training side; the newest version that was trained
        self.settings = SETTINGS
        self.state = ManagerState(SETTINGS)
        self.unplaced: set[tuple[str, int]] = set()  # attempts that ran when the manager restarted
        self.journal: list[Event] = []
        self.model: dict[str, Known] = {}
        self.servers: dict[str, Truth] = {}
        self.workers: dict[str, str] = {}
        self.eval_total = 0
        self.eval_attempts: set[tuple[str, int]] = set()  # all that were granted

    # -- helpers -------------------------------------------------------------------------------------------------------

    def commit(self) -> None:
        self.journal += self.state.outbox
        self.state.outbox = []

    @property
    def trainer_incarnation(self) -> str:
        return f"{self.trainings:019d}"

    def published(self, version: int) -> PublishedVersion:
        return PublishedVersion(version, self.trainer_incarnation, f"/v{version}.{self.trainer_incarnation}", version)

    def counted(self) -> int:
        return sum(known.state in ("running", "finished", "claimed", "trained") for known in self.model.values())

    def serves(self, truth: Truth, minimum: int) -> bool:
        return truth.trusted and truth.version is not None and minimum <= truth.version <= self.version

    def takes_new(self, minimum: int, without: Collection[str] = ()) -> bool:
        takes = (name for name, truth in self.servers.items() if self.serves(truth, minimum) and not truth.draining)
        return any(name not in without for name in takes)

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

    def training_starts(self, version: int, repeat: bool = False) -> None:
        self.trainings += 1
        kept = {i for i, k in self.model.items() if k.state in ("waiting", "dropped") or 0 <= k.version <= version}
        lost = self.model.keys() - kept
        evals = self.state.evaluations.by_id.items()
        kept = {i for i, e in evals if e.is_finished and e.newest_version <= version}
        request = RollBackRequest(version, version, self.trainer_incarnation)
        for _ in range(1 + repeat):
            assert self.state.roll_back(request, self.now).reissued == len(lost)
        self.commit()
        for ticket_id in lost:
            known = self.model[ticket_id]
            known.failures = 0 if known.state == "trained" else known.failures
            known.state, known.version = "waiting", -1
        assert self.state.evaluations.by_id.keys() == kept
        self.eval_total = sum(e.started.total for e in self.state.evaluations.by_id.values())
        self.version, self.newest, self.unplaced = max(0, version), max(0, version), set()
        for truth in self.servers.values():
            truth.version, truth.draining = None, False
        if self.workers:
            assert self.state.allocate(AllocateRequest(min(self.workers), 1), self.now).reason == "no_server"
        older = PublishedVersion(99, f"{self.trainings - 1:019d}", "/dead", 99)
        assert not self.state.servers.publish(older), "weights of a dead incarnation"
        assert self.state.servers.publish(self.published(self.version))
        for truth in self.servers.values():
            server = self.state.servers.get(truth.address.name)
            assert server is not None
            truth.began = server.began  # kept by an update that is under way, ended for a drain

    def trained(self, request: TrainedRequest) -> TrainedReply:
        older = TrainedRequest(9, 9, list(self.model), incarnation=f"{self.trainings - 1:019d}", held=[])
        with pytest.raises(OlderTrainer):
            self.state.trained(older, self.now)
        reply = self.state.trained(request, self.now)
        self.commit()
        return reply

    # -- what must always hold -----------------------------------------------------------------------------------------

    @invariant()
    def counts_are_those_of_a_recount(self) -> None:
        counts = Counter(known.state for known in self.model.values())
        by_state = self.state.ledger.counts.by_state()
        assert by_state == {state: counts[state] for state in by_state}
        assert self.state.ledger.counted == self.counted()
        assert sum(self.state.ledger.counts.dropped_by_reason.values()) == counts["dropped"]
        assert set(counts) <= by_state.keys()

    @invariant()
    def reservations_belong_to_running_tickets(self) -> None:
        reservations = self.state.reservations
        tickets = [t for t, known in self.model.items() if known.state == "running"]
        tickets += self.state.evaluations.running
        loads = recount(reservations, tickets)
        assert all(reservations.load(name) == loads.get(name, (0, 0)) for name in self.servers)
        assert loads.keys() <= self.servers.keys(), "a place on a server that is gone"
        assert len(reservations) == sum(len(reservations.calls(ticket)) for ticket in tickets)

    @invariant()
    def no_problem_of_an_evaluation_is_lost(self) -> None:
        total = 0
        running = [(p.evaluation, p.ticket.prompt_index) for p in self.state.evaluations.running.values()]
        for evaluation in self.state.evaluations.by_id.values():
            runs = [index for owner, index in running if owner is evaluation]
            indices = [*evaluation.waiting, *runs, *evaluation.saved.done]
            assert evaluation.saved.lost or sorted(indices) == [*range(evaluation.started.total)]
            assert not (evaluation.saved.lost and runs)
            assert evaluation.saved.version_min == evaluation.saved.version_max, "one-version"
            total += evaluation.started.total
        assert total == self.eval_total


# ---- Rules of the manager's random histories for all that is around it: servers, versions, workers, the clock


class SurroundingsMachine(ManagerModel):
    """Servers come, go, update and are probed; workers start and die; time passes."""

    orders: Bundle[UpdateOrder] = Bundle("orders")

    # -- servers and versions ------------------------------------------------------------------------------------------

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
        assert self.state.servers.publish(self.published(self.version))
        assert not self.state.servers.publish(self.published(self.version - 1)), "versions never go back"

    @rule(target=orders, index=SERVERS)
    def order(self, index: int) -> UpdateOrder | object:
        truth = self.servers.get(f"generation_server/{index}")
        if truth is None:
            return multiple()
        order = self.state.next_order(truth.address.name, truth.address.incarnation, self.now)
        self.commit()
        if not isinstance(order, UpdateOrder):
            return multiple()
        assert order.target.version == self.version and order.url == truth.address.url
        assert not self.evaluates(truth.address.name), "an update in the middle of an evaluation's completion"
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

    def evaluates(self, name: str) -> bool:
        """Return True if a completion of an evaluation is sampled there, with the version that the server serves."""
        server, reservations = self.state.servers.get(name), self.state.reservations
        if server is None or self.state.servers.current(server) is None:
            return False
        return any(
            place.server == name and place.version == problem.ticket.version
            for problem in self.state.evaluations.running.values()
            for call in reservations.calls(problem.ticket_id)
            if (place := reservations.get(problem.ticket_id, call)) is not None
        )

    def runs_unseen(self, ticket_id: str, attempt: int) -> bool:
        known = self.model[ticket_id]
        running = known.state == "running" and known.attempt == attempt
        return running and not self.state.reservations.calls(ticket_id)

    @precondition(lambda self: self.version * B <= 6 + self.counted())
    @rule(target=orders)
    def rollout_begins(self) -> object:
        """Publish a version, and every server that may begins with it, or drains for it; some never end."""
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
            if (
                order.target.incarnation != self.trainer_incarnation
            ):  # it began before training started again: proves nothing
                truth.version = None if success else truth.version
            elif success:
                truth.version = order.target.version
                self.proved(truth)

    def proved(self, truth: Truth) -> None:
        truth.trusted, truth.reporters = True, set()

    @rule(index=SERVERS, answers=st.booleans(), restarted=st.booleans())
    def probe(self, index: int, answers: bool, restarted: bool) -> None:
        """The due probe of a server. ``restarted``: it answers, with other weights than it had."""
        truth = self.servers.get(f"generation_server/{index}")
        if truth is None:
            return
        name = truth.address.name
        probe = self.state.servers.next_probe(name, truth.address.incarnation, self.now)
        if not isinstance(probe, Probe):
            assert truth.trusted or self.state.servers.get(name).health.probe_at > self.now  # type: ignore[union-attr]
            return
        if not answers:
            assert self.state.servers.silent(probe, "timeout", self.now)
            truth.trusted, truth.reporters = False, set()
            return
        truth.version = None if restarted else truth.version
        published = self.published(-1 if truth.version is None else truth.version)
        self.state.servers.answered(probe, str(published.version), published.locator, self.now)
        self.proved(truth)

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
            kept = self.state.servers.holds  # for an evaluation
            due = {s.name for s in self.state.servers.all() if s.retry_at <= self.now and s.name not in kept}
            assert all(t.version == self.version for n, t in self.servers.items() if t.trusted and n in due)

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


# ---- Random histories of arrivals, finishes, deaths, updates, restarts and roll-backs against a model of the rules


class RolloutMachine(SurroundingsMachine):
    """Tickets are granted, placed and finished."""

    tickets: Bundle[Ticket] = Bundle("tickets")

    @rule(target=tickets, index=WORKERS, count=st.integers(1, 5))
    def allocate(self, index, count):
        worker = sorted(self.workers)[index % len(self.workers)]
        routable = self.takes_new(self.version - ETA)
        reply = self.state.allocate(AllocateRequest(worker, count), self.now)
        self.commit()
        for ticket in reply.tickets:
            if ticket.kind == "train":
                assert routable, "granted without a server that may answer"
                self.granted(ticket, worker)
            else:
                attempt = ticket.ticket_id, ticket.attempt
                assert attempt not in self.eval_attempts, "an attempt number comes twice"
                self.eval_attempts.add(attempt)
        if not reply.tickets:
            assert reply.reason == ("staleness" if routable else "no_server")
        return multiple(*reply.tickets)

    @rule(target=tickets, index=WORKERS, count=st.integers(2, 5))
    def rollouts_begin(self, index, count):
        """Granted and sent to their servers, where they stay for now."""
        reply = self.allocate(index, count)
        for ticket in reply.values if isinstance(reply, MultipleResults) else [reply]:
            self.schedule(ticket, "0.0", False, None)
        return reply

    def granted(self, ticket, worker):
        assert self.counted() // B <= self.version + ETA, "floor((N - 1) / B) <= v + eta, N with the candidate"
        weights = self.counted() // B - ETA
        assert self.takes_new(max(weights, self.version - ETA)), "granted before a server has the weights that it needs"
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
            "running", ticket.attempt, ticket.prompt_index, worker, self.now, self.now, failures, weights=weights
        )
        assert ticket.reissues == (old.stale if old else 0)
        self.model[ticket.ticket_id].stale = ticket.reissues

    def running(self, ticket):
        if ticket.kind == "eval":
            return self.state.evaluations.running_attempt(ticket.ticket_id, ticket.attempt) is not None
        known = self.model[ticket.ticket_id]
        return known.state == "running" and known.attempt == ticket.attempt

    @rule(target=tickets, outcome=OUTCOMES, count=st.integers(1, 5))
    def whole_rollouts(self, outcome, count):
        """The usual life: granted, sent to a server, finished."""
        reply = self.allocate(0, count)
        for ticket in reply.values if isinstance(reply, MultipleResults) else [reply]:
            self.schedule(ticket, "0.0", False, None)
            self.finish(ticket, outcome)
        return reply

    @rule(ticket=tickets, call=CALLS, failed=st.booleans(), ended=st.none() | st.tuples(tickets, CALLS))
    def schedule(self, ticket, call, failed, ended):
        """A call of an agent. ``ended``: it also releases this call, possibly of an attempt that is long over."""
        reservations = self.state.reservations
        request = ScheduleRequest(ticket.ticket_id, ticket.attempt, 10, 20, ticket.n, call=call)
        expected: dict[str, set[str]] = {ticket.ticket_id: set(reservations.calls(ticket.ticket_id))}
        if ended is not None:
            other, name = ended
            request.released = [(other.ticket_id, other.attempt, name)]
            ends = {name} if self.running(other) else set()
            expected[other.ticket_id] = set(reservations.calls(other.ticket_id)) - ends
        held = reservations.get(ticket.ticket_id, call) if call in expected[ticket.ticket_id] else None
        running = self.running(ticket)
        if failed and held is not None:
            request.failed_server = held.server
        reply: ScheduleReply | Refusal
        try:
            reply = self.state.schedule(request, self.now)
        except Refusal as refusal:
            reply = refusal
        self.commit()
        mine = {call} if isinstance(reply, ScheduleReply) else set()
        for ticket_id, calls in expected.items():
            found = set(reservations.calls(ticket_id))
            assert mine <= found or ticket_id != ticket.ticket_id
            assert found - {call} == calls - {call}, "a call that nothing was said of has moved"
        if not running:
            assert isinstance(reply, NotRunning)
            return
        avoided = {name for name in self.servers if self.state.servers.avoids(self.worker_of(ticket), name)}
        if failed and held is not None:
            truth = self.servers[held.server]
            truth.reporters.add(self.worker_of(ticket))
            if self.state.servers.get(held.server).quarantined:  # type: ignore[union-attr]
                assert not truth.trusted or len(truth.reporters) > 1, "one report has removed a server"
                self.proved(truth)
                truth.trusted = False
        if ticket.kind == "train":
            self.model[ticket.ticket_id].news = self.now
        if isinstance(reply, ScheduleReply):
            truth = self.servers[reply.server]
            minimum = self.version - ETA if ticket.kind == "train" else 0
            if ticket.kind == "train" and self.takes_new(weights := self.model[ticket.ticket_id].weights):
                minimum = max(minimum, weights)
            assert self.serves(truth, minimum), "sent to a dead, untrusted or stale server"
            assert reply.server not in avoided, "sent to the server that its worker has reported"
            stays = held is not None and not failed and held.server == reply.server
            assert not truth.draining or stays, "a new ticket on a server that is drained"
            assert (reply.url, reply.version) == (truth.address.url, truth.version)
            place = reservations.get(ticket.ticket_id, call)
            assert place is not None and place.server == reply.server
        else:
            assert isinstance(reply, NoServer)
            if ticket.kind == "train":
                assert not self.takes_new(self.version - ETA, avoided)

    def worker_of(self, ticket):
        attempt = self.state.running_attempt(ticket.ticket_id, ticket.attempt)
        return attempt.worker if attempt is not None else ""

    @rule(ticket=tickets, outcome=OUTCOMES, correct=st.integers(0, 2))
    def finish(self, ticket, outcome, correct=2):
        answers = [] if outcome == "failed" else [Answer(5.0, True, 20, "stop", 0, 0)] * ticket.n
        request = FinishRequest(ticket.ticket_id, ticket.attempt, "w", outcome, "why", answers)
        request.correct, request.judged = correct, 2
        running = self.running(ticket)
        reply = self.state.finish(request, self.now)
        self.commit()
        if not running:
            return
        assert reply.known and not self.state.reservations.calls(ticket.ticket_id)
        if ticket.kind == "eval":
            return
        known = self.model[ticket.ticket_id]
        if outcome == "accepted":
            known.news = known.granted = self.now  # its time to arrive starts here
        known.failures += outcome == "failed"
        retry = outcome == "failed" and known.failures < ATTEMPTS
        assert reply.retry == retry
        ends = {"accepted": "finished", "failed": "waiting" if retry else "dropped"}
        known.state = ends.get(outcome, "dropped")


class ManagerMachine(RolloutMachine):
    """Trainers claim, train and give up tickets; trainer and manager start again."""

    @initialize(
        pace=PACES,
        interruptible=st.booleans(),
        routing=st.sampled_from(sorted(STRATEGIES)),
        curriculum=st.sampled_from([None, Curriculum(200, 800, 0.2)]),
    )
    def begin(self, pace, interruptible, routing, curriculum):
        choices: dict[str, Any] = {"interruptible": interruptible, "routing": routing, "curriculum": curriculum}
        self.settings = dataclasses.replace(SETTINGS, pace=pace, **choices)
        self.state = ManagerState(self.settings)
        self.state.open(self.now)
        self.training_starts(-1)
        self.worker_starts(0)
        for index in range(3):
            self.server_joins(index)
        self.all_servers_update()

    @rule(data=st.data(), repeat=st.booleans())
    def claim(self, data, repeat):
        """A batch that arrived, whatever its tickets are taken for; ``repeat``: the call is sent twice."""
        ids = sorted(self.model)
        batch = data.draw(st.lists(st.sampled_from(ids), max_size=B, unique=True)) if ids else []
        gone = [ticket_id for ticket_id in batch if self.model[ticket_id].state in ("dropped", "trained")]
        request = ClaimRequest(self.version + 1, batch, self.trainer_incarnation)
        for _ in range(1 + repeat):
            assert self.state.claim(request, self.now) == ClaimReply(gone)
        self.commit()
        for ticket_id in [] if gone else batch:
            self.model[ticket_id].state = "claimed"

    @rule(data=st.data(), repeat=st.booleans())
    def train(self, data, repeat):
        """Train some of the claimed tickets; ``repeat``: the call is sent twice."""
        ready = sorted(ticket_id for ticket_id, known in self.model.items() if known.state == "claimed")
        batch = data.draw(st.lists(st.sampled_from(ready), max_size=B, unique=True)) if ready else []
        request = TrainedRequest(
            self.version + 1,
            self.version + 1,
            batch,
            oldest=[self.version] * len(batch),
            incarnation=self.trainer_incarnation,
        )
        assert self.trained(request).trained == len(batch)
        if repeat:
            assert self.trained(request).trained == 0
        for ticket_id in batch:
            assert self.model[ticket_id].state != "trained"
            self.model[ticket_id].state, self.model[ticket_id].version = "trained", self.version + 1
            self.newest = self.version + 1

    @rule(data=st.data(), repeat=st.booleans())
    def too_old(self, data, repeat):
        """A group came too old, whatever its ticket is taken for; ``repeat``: the call is sent twice."""
        ids = sorted(self.model)
        ticket_id = data.draw(st.sampled_from(ids)) if ids else None
        if ticket_id is None:
            return
        known = self.model[ticket_id]
        attempt = data.draw(st.integers(0, known.attempt))
        counts = attempt == known.attempt and known.state in ("running", "finished")
        request = TrainedRequest(1, 1, stale=[(ticket_id, attempt)], incarnation=self.trainer_incarnation)
        assert self.trained(request).reissued == counts
        if repeat:
            assert self.trained(request).reissued == 0
        if counts:
            known.state = "waiting"
            known.stale += 1

    @rule(data=st.data(), reason=st.sampled_from(["success_rate", "masked"]))
    def drop(self, data, reason):
        ready = sorted(ticket_id for ticket_id, known in self.model.items() if known.state == "finished")
        if ready:
            ticket_id = data.draw(st.sampled_from(ready))
            request = TrainedRequest(1, 1, dropped=[(ticket_id, reason)], incarnation=self.trainer_incarnation)
            assert self.trained(request).dropped == 1
            self.model[ticket_id].state = "dropped"

    @rule(data=st.data())
    def groups_are_missed(self, data):
        """The master lists the groups that it holds; a missing one that finished a while ago never arrived."""
        finished = sorted(ticket_id for ticket_id, known in self.model.items() if known.state == "finished")
        kept = data.draw(st.sets(st.sampled_from(finished))) if finished else set()
        held = [(ticket_id, self.model[ticket_id].attempt) for ticket_id in kept]
        missed = {i for i in finished if i not in kept and self.model[i].news < self.now - ARRIVAL_GRACE_S}
        request = TrainedRequest(0, 0, incarnation=self.trainer_incarnation, held=held)
        assert set(self.trained(request).lost) == missed
        assert self.trained(request).lost == []
        for ticket_id in missed:
            self.model[ticket_id].state = "waiting"

    @rule()
    def evaluate(self):
        if self.evals < 2:
            self.evals += 1
            request = EvaluateRequest(f"e{self.evals}", "eval", 9, incarnation=self.trainer_incarnation)
            self.eval_total += self.state.evaluate(request, self.now).total
            self.commit()

    # -- restarts ------------------------------------------------------------------------------------------------------

    @rule(back=st.integers(0, 4), repeat=st.booleans())
    def training_restarts(self, back, repeat):
        """From a checkpoint of some version; all that is younger never happened. It publishes immediately."""
        self.training_starts(max(-1, self.newest - back), repeat)

    @rule(compacted=st.booleans())
    def manager_restarts(self, compacted):
        """Also from a journal that was compacted before: the state is the same."""
        before = self.state
        if compacted:
            self.journal = [before.snapshot(self.now)]
            for known in self.model.values():
                known.granted = known.news  # a snapshot has the renewals, too
        events = [msgspec.json.decode(msgspec.json.encode(event), type=Event) for event in self.journal]
        self.state = ManagerState(self.settings)
        self.state.restore_from(events)
        if compacted:
            assert self.state.snapshot(self.now) == self.journal[0]
        assert self.state.ledger.counts == before.ledger.counts
        assert self.state.ledger.cursor == before.ledger.cursor
        assert self.state.ledger.rates.values == before.ledger.rates.values
        assert self.state.ledger.open.keys() == before.ledger.open.keys()
        self.state.open(self.now)
        resumed = bool(self.state.evaluations.unfinished())
        assert [type(event) for event in self.state.outbox] == [EvalsResumed] * resumed, "nothing else has changed"
        self.commit()
        for known in self.model.values():
            known.news = known.news if known.state == "finished" else self.now  # every lease starts again
        self.state.servers.publish(self.published(self.version))
        for truth in self.servers.values():
            truth.version, truth.trusted, truth.draining, truth.began = None, True, False, None
        self.unplaced = {(i, known.attempt) for i, known in self.model.items() if known.state == "running"}
        self.register()
        self.observe_workers()


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
