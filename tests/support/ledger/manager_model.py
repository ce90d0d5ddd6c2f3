"""Model of a manager that knows only its invariants. The rules that drive it are in the test."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant

from realsys.manager.decisions import ManagerSettings, ManagerState
from realsys.manager.ledger.events import Event, Outcome
from realsys.manager.messages import AllocateRequest, OlderTrainer, RollBackRequest, TrainedReply, TrainedRequest
from realsys.manager.routing.servers import Pace
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
