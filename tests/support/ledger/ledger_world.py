"""A trial in the small: the real ManagerState, IntakeState and StuckCheck, and a model of everything around them.

    allocate ──> attempt at a worker ──> group arrives ──> finish       faults: failed, rejected, filtered, lapsed,
                                            │                           died, repeated, late, restarted, crashed
           take a batch ──> publish ──> tell the manager

Each action updates the model (``truth``, ``weights``) by hand, and the model is compared with the real parts. Time
stands still: an event that needs it (a lease that lapses, the grace of a finish) happens at any moment.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from realsys.algorithm.sequence_buffer import StalePolicy
from realsys.cluster.journal import encode_record
from realsys.manager.audit import Auditor
from realsys.manager.decisions import ManagerSettings, ManagerState
from realsys.manager.ledger.events import EvalEvent, Event, Order, Resumed, Snapshot
from realsys.manager.ledger.journal import decode_record
from realsys.manager.ledger.ledger import Ledger
from realsys.manager.ledger.prompt_order import PromptOrder
from realsys.manager.ledger.staleness import StalenessBound
from realsys.manager.messages import TrainedRequest
from realsys.manager.operations import status
from realsys.manager.routing.health import BlameRules
from realsys.manager.routing.pinned_servers import HoldRules
from realsys.manager.routing.placement import LoadGate
from realsys.manager.routing.servers import FanOut, Pace
from realsys.train.master.intake_decisions import IntakeSettings, IntakeState, StuckCheck
from realsys.types import PublishedVersion, SampleMeta, ServerAddress, Ticket
from tests.support.ledger.fingerprints import KEY, ledger_key, manager_key, recount
from tests.support.ledger.state_explorer import Copier, Passed

Truth = Literal["running", "finished", "waiting", "claimed", "dropped", "trained"]
LEASE_S = 100.0
LATE = 1000.0  # every grace of a finish is over
SERVER = "generation_server/0"
#: Faults of a rollout that generates.
IN_GENERATION = ["fails", "fails_though_stored", "rejected", "filtered"]
IN_GENERATION += ["arrives_twice", "arrives_late", "never_arrives"]


@dataclass(frozen=True)
class Act:
    """One thing that happens. ``cost`` 1: a fault."""

    name: str
    args: tuple[Any, ...] = ()
    cost: int = 0

    def __str__(self) -> str:
        return f"{self.name}{self.args if self.args else ''}"


FAULTS = """manager_restarts server_dies fails fails_though_stored rejected filtered arrives_twice arrives_late
    never_arrives finishes_twice lapses_though_alive dies dies_in_push reply_lost claims_twice told_twice
    master_crashes"""


@dataclass(frozen=True)
class Bounds:
    """Size of the trial. ``faults``: how many in one history, of the kinds named (all if empty)."""

    batch: int = 1
    eta: int = 0
    prompts: int = 2
    workers: int = 1
    steps: int = 2
    faults: int = 1
    epochs: int = 1
    attempts: int = 2
    policy: StalePolicy = "drop"
    reissues: int = 1  # of a ticket because its group was too old
    script: bool = False  # the master submits the prompts, ``prompts`` of them ahead of need
    resumed: bool = False  # resumes another trial's checkpoint of version 1, with one prompt pending
    kinds: frozenset[str] = frozenset()

    def settings(self) -> ManagerSettings:
        sizes = {"train": self.prompts, "eval": 1}
        epochs = 0 if self.script else self.epochs
        made = ManagerSettings(self.batch, self.eta, 1, self.attempts, 1, sizes, epochs, self.steps, LEASE_S)
        order: Order = "script" if self.script else "shuffled"
        return replace(made, stale_policy=self.policy, max_reissues=self.reissues, order=order)

    def intake(self) -> IntakeSettings:
        return IntakeSettings(self.batch, self.eta, self.policy, self.reissues, 10, timeout_s=LATE)

    def order(self) -> PromptOrder:
        return PromptOrder(1, self.prompts, self.epochs)

    def __str__(self) -> str:
        sizes = f"B{self.batch} eta{self.eta} {self.prompts} prompts {self.workers} workers {self.steps} steps"
        sizes += " resumed" * self.resumed + " script" * self.script + f" {self.policy}" * (self.policy != "drop")
        kinds = "every fault" if self.kinds == frozenset(FAULTS.split()) else " ".join(sorted(self.kinds))
        return f"{sizes} {self.faults} x {kinds}"


def bounds(kinds: str = FAULTS, **sizes: Any) -> Bounds:
    return Bounds(kinds=frozenset(kinds.split()), **sizes)


@dataclass
class Attempt:
    """A rollout at its worker. ``oldest``: version of its first token. ``pushed``: acknowledged, so finish comes."""

    ticket: Ticket
    worker: str
    oldest: int
    pushed: bool = False


#: The model's own fields that tell no two states apart.
_BOOKKEEPING = {"bounds", "passed", "manager", "journal", "synced", "syncs", "prompts", "oldest"}
#: settings: frozen, so the copies of a state share them
_SETTINGS = (
    ManagerSettings,
    IntakeSettings,
    StalenessBound,
    BlameRules,
    FanOut,
    LoadGate,
    HoldRules,
    Pace,
    PromptOrder,
)
COPIER = Copier(Bounds, Passed, *_SETTINGS)


@dataclass
class WorldState:
    """The state of the trial, and what must hold of it. ``World`` adds what can happen."""

    bounds: Bounds
    manager: ManagerState = field(init=False)
    intake: IntakeState = field(init=False)
    faults: int = 0
    truth: dict[str, Truth] = field(default_factory=dict)
    prompts: dict[str, int] = field(default_factory=dict)  # prompt of each ticket, even of a lost record
    journal: list[bytes] = field(default_factory=list)
    synced: int = 0  # records that survive the machine
    syncs: bool = False  # the action under way is answered after an fsync
    sequence: list[int] = field(default_factory=list)  # prompts that the manager has accepted from the script
    # workers and the network
    births: dict[str, int] = field(default_factory=dict)  # incarnation of each worker and of the server
    attempts: dict[tuple[str, int], Attempt] = field(default_factory=dict)
    unanswered: dict[str, str] = field(default_factory=dict)  # worker -> request whose reply was lost
    strays: list[SampleMeta] = field(default_factory=list)  # groups that arrive some time, or never
    echoes: list[Any] = field(default_factory=list)  # calls that reach the manager once more, some time
    # the master
    phase: Literal["down", "rolled back", "idle", "asking", "training", "published", "done", "stuck"] = "down"
    version: int = 0  # version of its weights
    trainer_incarnation: int = 0
    checkpoint: int = -1  # version of the newest
    published: PublishedVersion | None = None  # value in the name store
    asked: list[str] = field(default_factory=list)  # tickets of the batch that is to be claimed
    batch: list[SampleMeta] = field(default_factory=list)
    oldest: dict[tuple[str, int], int] = field(default_factory=dict)  # (ticket, attempt) -> version of its tokens
    weights: list[list[str]] = field(default_factory=list)  # tickets that each version trained
    passed: Passed = field(default_factory=Passed)

    def __post_init__(self) -> None:
        self.births = {SERVER: 1, **dict.fromkeys(self._workers(), 1)}
        self._new_intake()
        self.faults = self.bounds.faults
        self.manager = ManagerState(self.bounds.settings())
        if self.bounds.resumed:
            batch, at = self.bounds.batch, self.bounds.order().at
            pending = at(batch)
            assert pending is not None
            self.journal = [encode_record(Resumed("/c", 1, batch, batch + 1, [pending], 0.0))]
            self.weights, self.checkpoint = [[]], 1
            self._start_manager()
            self.journal += map(encode_record, self.manager.outbox)
            self.manager.outbox.clear()

    # -- what must always hold -----------------------------------------------------------------------------------------

    def key(self) -> bytes:
        """Unsynced records tell two states apart only while they may be lost."""
        loses = self.faults and self.bounds.kinds & {"machine_fails", "manager_loses_its_tail"}
        may_be_lost = self.journal[self.synced :] if loses else []
        return KEY.digest((self._fields(), manager_key(self.manager), may_be_lost))

    def _fields(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _BOOKKEEPING}

    def check(self) -> None:
        ledger = self.manager.ledger
        counts, truth = ledger.counts, Counter(self.truth.values())
        states = counts.by_state()
        assert states == {state: truth[state] for state in states}, f"{states}, but in truth {dict(truth)}"
        assert sum(states.values()) == counts.granted == len(self.truth) and min(states.values()) >= 0
        assert ledger.counted == self._counted(), "N is not what the states add up to"
        assert sum(counts.dropped_by_reason.values()) == counts.dropped
        assert min([*counts.dropped_by_reason.values(), *counts.reissued_by_cause.values(), 0]) >= 0
        for ticket_id, state in self.truth.items():
            end = ledger.ended(ticket_id)
            assert (end is None) == (state not in ("dropped", "trained")), f"{ticket_id}: {end}, {state}"
            told = [k for k, tickets in enumerate(self.weights, 1) if ticket_id in tickets]
            if state == "trained":
                assert [end] == [f"trained@{k}" for k in told], f"{ticket_id}: {end}, in the weights of {told}"
        self._check_prompts()
        self._check_reservations()
        self.passed.once(self._check_snapshot, COPIER.dump(ledger))
        self.passed.once(self._check_audit, repr(self._told()).encode(), *self.journal)

    def _check_prompts(self) -> None:
        """Each prompt of the epoch is to come, pending, or has had its one end."""
        ledger = self.manager.ledger
        position = ledger.position()
        if self.bounds.script:
            ended = [
                ledger.columns.prompt[int(t)] for t, state in self.truth.items() if state in ("trained", "dropped")
            ]
            assert position.cursor == len(self.sequence)
            assert sorted([*position.pending, *ended]) == self.sequence, f"{position.pending} and {ended}"
            return
        order, before = self.bounds.order(), self.bounds.batch if self.bounds.resumed else 0
        ahead = [order.at(p) for p in range(position.cursor, self.bounds.prompts * self.bounds.epochs)]
        ended = [ledger.columns.prompt[int(t)] for t, state in self.truth.items() if state in ("trained", "dropped")]
        found = sorted([*ahead, *position.pending, *ended, *map(order.at, range(before))])  # type: ignore[type-var]
        assert found == sorted([*range(self.bounds.prompts)] * self.bounds.epochs), f"prompts {found}"

    def _check_reservations(self) -> None:
        reservations = self.manager.reservations
        held = [t for t in self.truth if reservations.calls(t)]
        assert sum(len(reservations.calls(t)) for t in held) == len(reservations)
        assert reservations.load(SERVER) == recount(reservations, self.truth).get(SERVER, (0, 0))
        assert all(self.truth[t] == "running" for t in held), f"places of {held} are not given back"

    def _check_snapshot(self) -> None:
        """A compacted journal leads to the same ledger."""
        ledger = self.manager.ledger
        line = encode_record(ledger.snapshot(0.0, [], {}))
        snapshot = decode_record(line)
        assert isinstance(snapshot, Snapshot)
        compacted = Ledger(self.bounds.order(), self.bounds.attempts)
        compacted.apply(snapshot)
        assert ledger_key(compacted) == ledger_key(ledger), "the snapshot leads elsewhere"

    def _check_audit(self) -> None:
        """`realsys audit` finds nothing, whatever happened."""
        auditor = Auditor()
        for number, event in enumerate(self._events(), 1):
            auditor.observe(event, number)
        auditor.compare_steps(self._told())
        failed = {check.name: check.problems for check in auditor.report().checks if not check.ok}
        assert not failed, f"the audit says {failed}"

    def _commit(self, before: bytes) -> None:
        """Check that the new records turn the ledger before the action into the ledger now."""
        events, self.manager.outbox = self.manager.outbox, []
        if self.syncs:
            self.syncs, self.synced = False, len(self.journal) + len(events)
        if not events and COPIER.dump(self.manager.ledger) == before:
            return
        ledger: Ledger = COPIER.load(before)
        for event in events:
            record = encode_record(event)
            self.journal.append(record)
            copy = decode_record(record)
            assert copy == event, f"the journal reads {copy} for {event}"
            if not isinstance(copy, EvalEvent):
                ledger.apply(copy)  # type: ignore[arg-type]
        assert ledger_key(ledger) == ledger_key(self.manager.ledger), f"not what the journal says: {events}"

    def _told(self) -> dict[int, list[str]]:
        """Return the tickets of each version whose training the manager knows."""
        return {k: t for k, t in enumerate(self.weights, 1) if t and self.truth.get(t[0]) == "trained"}

    # -- questions -----------------------------------------------------------------------------------------------------

    def is_final(self) -> bool:
        return self.phase in ("done", "stuck")

    def _counted(self) -> int:
        inherited = self.bounds.batch if self.bounds.resumed else 0
        return inherited + sum(state not in ("waiting", "dropped") for state in self.truth.values())

    def _workers(self) -> list[str]:
        return [f"rollout_worker/{i}" for i in range(self.bounds.workers)]

    def _running(self) -> list[Any]:
        return list(self.manager.ledger.running())

    def _is_unnoticed(self, worker: str) -> bool:
        return self.manager.workers[worker].incarnation != str(self.births[worker])

    def _incarnation(self) -> str:
        return f"{self.trainer_incarnation:04d}"

    def _new_intake(self) -> None:
        self.intake = IntakeState(self.bounds.intake(), self._incarnation())

    def _has_too_old(self) -> bool:
        """Return True if the next look at the buffer finds a group without a token that may be trained."""
        held = self.intake.buffer.held().items()
        too_old = any(self.oldest[attempt] < self.version - self.bounds.eta for attempt in held)
        return self.bounds.policy != "train" and too_old

    def _can_never_fill(self) -> bool:
        """Apply the rule of a running master to two consecutive statuses of the manager."""
        check, seen = StuckCheck(self.bounds.batch, 10), status(self.manager, 0.0, 0.0)
        ready = self.intake.buffer.ready_groups
        return check.check(seen, ready) is None and bool(check.check(seen, ready))

    def _group(self, attempt: Attempt) -> SampleMeta:
        ticket = attempt.ticket
        return SampleMeta(
            f"{ticket.ticket_id}.{ticket.attempt}/0.0",
            ticket.ticket_id,
            ticket.attempt,
            2,
            1,
            1.0,
            False,
            attempt.oldest,
            attempt.oldest,
            0,
            trainer_incarnation=ticket.trainer_incarnation,
            reissues=ticket.reissues,
        )

    def _request(self, **fields: Any) -> TrainedRequest:
        request = TrainedRequest(self.version, self.version, incarnation=self._incarnation(), held=self.intake.held())
        return msgspec.structs.replace(request, **fields)

    # -- the manager ---------------------------------------------------------------------------------------------------

    def _start_manager(self) -> None:
        """First start, or a restart: everything from the journal and the name store."""
        self.manager = ManagerState(self.bounds.settings())
        self.manager.restore_from(self._events())
        self.manager.open(0.0)
        if self.published is not None:
            current = self.published.incarnation == self.manager.trainer_incarnation
            assert self.manager.servers.publish(self.published) == current, "weights of a training side that is gone"
        self._observe_server()
        lost = self._observe_workers()
        self.truth |= dict.fromkeys(lost, "waiting")

    def _events(self) -> list[Event]:
        events = [decode_record(line) for line in self.journal]
        assert None not in events
        return events  # type: ignore[return-value]

    def _replayed(self) -> Ledger:
        """The ledger that the journal leads to."""
        ledger = Ledger(self.bounds.order(), self.bounds.attempts)
        for event in self._events():
            if not isinstance(event, EvalEvent):
                ledger.apply(event)
        return ledger

    def _observe_workers(self) -> list[str]:
        beats = {w: f'{{"kind": "rollout_worker", "incarnation": "{self.births[w]}"}}' for w in self._workers()}
        return self.manager.observe_workers(beats, 0.0)

    def _observe_server(self) -> None:
        born = str(self.births[SERVER])
        self.manager.observe_servers([ServerAddress(SERVER, "http://h:1", 1, "h", born)])
