"""Model of a manager that knows only its invariants. The rules that drive it are in the test."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from realsys.manager.decisions import ManagerSettings, ManagerState
from realsys.manager.ledger.events import Event, Outcome
from realsys.manager.messages import AllocateRequest, OlderTrainer, RollBackRequest, TrainedReply, TrainedRequest
from realsys.manager.routing.servers import Pace, Probe, UpdateOrder
from realsys.types import PublishedVersion, ServerAddress
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
