"""ManagerState: what the manager knows of a trial, and what it decides, as one pure state machine.

    journal ──restore_from──> ManagerState <──observe, publish, expire── name store, clock
                                  │
    call ──> method ──> reply, or Refusal
               └──> events in ``outbox``: the process appends them to the journal before it answers the call

Invariants that are kept here: ``admission``, ``one-end``, ``claim-before-train``, ``monotonic``, ``fenced-weights`` and
``blame-needs-evidence``. A method raises before it has changed anything. No I/O and no clock: ``now`` (unix seconds) is
an argument.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import msgspec

from realsys.config.allocation import lent_servers, own_servers
from realsys.config.dataflow import is_supervised, takes_prompts
from realsys.config.schema import Config
from realsys.config.schema_data import CurriculumConfig
from realsys.manager import messages as m
from realsys.manager.ledger.events import (
    MOST_PROBLEMS,
    EvalEvent,
    EvalStarted,
    Event,
    Granted,
    Opened,
    Order,
    Pinned,
    RolledBack,
    Snapshot,
)
from realsys.manager.ledger.ledger import Ledger
from realsys.manager.ledger.pinned_evaluations import Evaluation, Evaluations, RunningProblem
from realsys.manager.ledger.prompt_order import Curriculum, PromptOrder
from realsys.manager.ledger.staleness import StalenessBound, StepStaleness
from realsys.manager.ledger.tickets import OpenTicket, Repeats
from realsys.manager.messages import MAX_REISSUES, BadCall, NoServer, NotRunning, OlderTrainer, RefusalReason
from realsys.manager.routing.health import BlameRules
from realsys.manager.routing.lending import Progress, Shift
from realsys.manager.routing.pinned_servers import HOLD_S, HoldRules, Holds
from realsys.manager.routing.placement import Demand, Exactly, Reservations, Router, make_strategy
from realsys.manager.routing.rollout_workers import (
    HeldAttempt,
    Throughput,
    WorkerHeartbeat,
    incarnation_of,
    is_lost,
    memory_sums,
    observe,
    renewed,
)
from realsys.manager.routing.servers import FanOut, Idle, Pace, ServerRegistry, UpdateOrder
from realsys.types import PublishedVersion, ServerAddress, Ticket, sampling_seed

RETRY_AFTER_S = 0.5
#: Seconds that a finished group may take to reach the master. Its DP head acknowledged it before the finish was sent,
#: so only the notice from there to the master is under way.
ARRIVAL_GRACE_S = 10.0
NO_VERSION = -1
#: Seconds that the watch may be behind a worker that asks for tickets. A worker that ended just before its call was
#: decided has no heartbeat after them, and its tickets are reissued.
UNSEEN_GRACE_S = 10.0


CURRICULUM_FLOOR = 0.1  # probability of a prompt outside of the curriculum: it is measured again every tenth epoch
ROLLING_SHARE = 0.5  # of the serving servers, at least one, that update together in rolling mode
TURN_S = 30.0  # after it the next servers no longer wait for one that still updates; a drained one has update_timeout_s


@dataclass(frozen=True, slots=True)
class ManagerSettings:
    """The part of the configuration that the manager decides by."""

    batch_groups: int
    eta: int
    group_size: int  # episodes that start for a ticket
    max_attempts: int
    seed: int
    split_sizes: dict[str, int]  # prompts per split; "train" is required
    total_epochs: int = 0
    total_steps: int = 0  # grants end at total_steps * batch_groups; 0: no limit
    lease_s: float = 3600.0
    routing: str = "sticky"
    kv_reuse_versions: int = 0
    interruptible: bool = True
    pace: Pace = field(default_factory=Pace)
    blame: BlameRules = field(default_factory=BlameRules)
    fan_out: FanOut = field(default_factory=FanOut)
    stale_policy: str = "train"
    trains: bool = True  # False: no train ticket is granted, because nothing is trained or a supervised run has none
    max_reissues: int = MAX_REISSUES  # reissues that a ticket may have because its group was too old
    curriculum: Curriculum | None = None
    holds: HoldRules = field(default_factory=HoldRules)
    order: Order = "shuffled"  # of the new prompts
    lent: frozenset[str] = frozenset()  # servers that use devices of ranks in turn with them
    own_servers: int = 1  # the others

    @classmethod
    def of(cls, config: Config, split_sizes: dict[str, int]) -> ManagerSettings:
        """Take the settings from the configuration. ``split_sizes``: prompts per split."""
        manager = config.manager
        rolling, interruptible = manager.weight_update_mode == "rolling", config.asynchronous.interruptible
        trains = takes_prompts(config)
        return cls(
            batch_groups=config.train.batch_groups,
            eta=config.asynchronous.max_staleness,
            group_size=config.rollout.sampled_episodes,
            max_attempts=config.rollout.max_attempts,
            seed=config.seed,
            # Without train tickets there may be no prompt to train on, and the order of the prompts needs one.
            split_sizes=split_sizes if trains else split_sizes | {"train": max(1, split_sizes["train"])},
            total_epochs=config.train.total_epochs,
            total_steps=config.train.total_steps,
            trains=trains,
            stale_policy=config.asynchronous.stale_policy,
            curriculum=_curriculum(config.data.curriculum),
            order="none" if is_supervised(config) or config.is_service else config.data.order,
            lease_s=manager.rollout_lease_s,
            routing=manager.routing,
            kv_reuse_versions=config.asynchronous.kv_reuse_versions,
            interruptible=interruptible,
            pace=Pace(ROLLING_SHARE, TURN_S if interruptible else manager.update_timeout_s) if rolling else Pace(),
            fan_out=FanOut(config.weights.storage_readers),
            # A trainer that waits for a batch gives up after request_timeout_s.
            holds=HoldRules(seconds=min(HOLD_S, config.cluster.request_timeout_s / 2)),
            lent=lent_servers(config),
            own_servers=own_servers(config),
        )


def _curriculum(config: CurriculumConfig) -> Curriculum | None:
    if not config.enabled:
        return None
    return Curriculum(round(1000 * config.min), round(1000 * config.max), CURRICULUM_FLOOR)


class ManagerState:
    """Ledger, evaluations, servers, reservations and workers of one trial, and the decisions about them."""

    def __init__(self, settings: ManagerSettings) -> None:
        self.settings = settings
        self.bound = StalenessBound(settings.batch_groups, settings.eta)
        order = PromptOrder(settings.seed, settings.split_sizes["train"], settings.total_epochs)
        self.ledger = Ledger(order, settings.max_attempts, settings.curriculum)
        self.evaluations = Evaluations(settings.max_attempts)
        self.servers = ServerRegistry(self.bound, settings.pace, settings.blame, settings.fan_out, settings.lent)
        self.reservations = Reservations()
        strategy = make_strategy(settings.routing)
        self.router = Router(self.servers, self.reservations, strategy, settings.kv_reuse_versions)
        self.holds = Holds(settings.holds, self.servers, self.reservations, self.evaluations)
        self.workers: dict[str, WorkerHeartbeat] = {}
        self.rollout_workers = 0  # heartbeats of RolloutWorkers
        self._observed = False  # heartbeats have been seen since the start
        self.unseen: dict[str, float] = {}  # worker -> time of a grant to an incarnation whose heartbeat is not there
        # Other allocations that are held, and those of them that have been woken for a ticket: the commit loop counts.
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
        if needed and self.ledger.counted >= needed:
            return "exhausted"
        if self.ledger.exhausted:
            return "nothing_submitted" if self.ledger.by_script else "exhausted"
        weights = self.bound.oldest_weights(self.ledger.counted + 1)
        if weights > self.version or not self._is_served(self.minimum(weights)):
            return "staleness"
        return "asleep" if self._have_their_share() else None

    def _have_their_share(self) -> bool:
        """Return True if the awake servers have their share of the groups, while lent servers sleep and will wake.

        A version is published while they sleep. If all its tickets went to the others, these would have too many
        completions, and the lent servers would wake to nothing. While a batch is ready, the trainer keeps the devices.
        """
        servers = self.servers.all() if self.servers.lending.lent else []
        asleep = [server.name for server in servers if self.servers.rests(server) and not server.quarantined]
        if not asleep or self.ledger.counts.open["finished"] >= self.settings.batch_groups:
            return False
        running = self.ledger.counts.open["running"]
        groups = running + self.bound.headroom(self.ledger.counted, self.version)
        waiting = sum(self.reservations.load(name)[0] for name in asleep) / self.settings.group_size
        return running - waiting >= groups * (1 - len(asleep) / len(servers))

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
        tickets = self.bound.headroom(self.ledger.counted, min(served, self.version))
        return problems + (min(tickets, self.ledger.available) if self.ledger.by_script else tickets)

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
            order=settings.order,
        )
        self.outbox += [event for event in (self.ledger.bind(opened), self.evaluations.resume(now)) if event]
        for ticket in self.ledger.open.values():
            # Renewals are not in the journal, so every lease starts again. A clock that was set back prolongs nothing.
            ticket.news_at = now if ticket.state == "running" else min(ticket.news_at, now)

    def snapshot(self, now: float) -> Snapshot:
        """Return the state of ledger and evaluations as one record that replaces the journal."""
        assert not self.outbox, "events that are not in the journal yet would be in it twice"
        snapshot = self.ledger.snapshot(now, *self.evaluations.snapshot())
        return msgspec.structs.replace(snapshot, pins=dict(self.evaluations.pins))

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
        if self.servers.lending.turn == "servers":
            self._fill()
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
        """Decide which servers keep their version for an evaluation or a pin. An evaluation may have lost its own."""
        pins = self.servers.pinned or self.evaluations.pins
        if not pins and not self.servers.holds and not self.evaluations.unfinished():
            return
        for event in self.holds.refresh(now):
            self.outbox.append(event)
            self._release_over()

    def _release_over(self) -> None:
        """Free the places of evaluation tickets that do not run any more."""
        for ticket_id in self.reservations.tickets():
            if ticket_id.startswith("eval-") and ticket_id not in self.evaluations.running:
                self.reservations.release(ticket_id)

    def next_order(self, name: str, incarnation: str, now: float) -> UpdateOrder | Shift | Idle | None:
        """Return the next step of a server's update task; None ends the task. A running evaluation may delay it."""
        self.refresh_holds(now)
        order = self.servers.next_order(name, incarnation, now)
        if isinstance(order, Shift) and order.sleeps and self._evaluates_on(name):
            return Idle(now + 1.0)  # its end changes no server
        return order

    def _evaluates_on(self, server: str) -> bool:
        """Return True while a completion of an evaluation runs on the server: it would continue with other weights."""
        tickets = [
            problem.ticket_id for each in self.evaluations.unfinished() for problem in self.evaluations.running_of(each)
        ]
        places = (self.reservations.get(ticket, call) for ticket in tickets for call in self.reservations.calls(ticket))
        return any(place is not None and place.server == server for place in places)

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

    def _lose(self, is_over: Callable[[HeldAttempt], bool], cause: str, now: float) -> list[str]:
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

    # -- calls of the RolloutWorkers ---------------------------------------------------------------------------------

    def allocate(self, request: m.AllocateRequest, now: float) -> m.AllocateReply:
        """Grant up to ``max_tickets``: problems of evaluations first, then train tickets while ``admission`` allows.

        A worker gets its share of what can be granted. It may ask again immediately.
        """
        runs = self.running_attempt
        if before := self.repeats.find(request.worker, request.request_id, lambda *attempt: runs(*attempt) is not None):
            return m.AllocateReply(before)
        if self.repeats.is_over(request.worker, request.request_id):
            return m.AllocateReply([], "superseded", RETRY_AFTER_S)
        incarnation = request.incarnation or incarnation_of(request.worker, self.workers)
        if incarnation != incarnation_of(request.worker, self.workers):
            self.unseen[request.worker] = now
        self.refresh_holds(now)
        tickets: list[Ticket] = []
        reason: m.RefusalReason | None = None
        most = min(request.max_tickets, self.share())
        while len(tickets) < most and reason is None:
            ticket = self.evaluations.grant(request.worker, incarnation, self.playable, now)
            if ticket is None and (reason := self.refusal()) is None:
                event = self.ledger.grant(request.worker, incarnation, self.version, now, request.request_id)
                assert event is not None, "refusal() said that there is a prompt"
                self.outbox.append(event)
                ticket = self._ticket(event)
            if ticket is not None:
                tickets.append(ticket)
                self.repeats.remember(request.worker, request.request_id, ticket)
        if tickets:
            return m.AllocateReply(tickets)
        return m.AllocateReply([], reason or self.refusal() or "staleness", RETRY_AFTER_S)

    def schedule(self, request: m.ScheduleRequest, now: float) -> m.ScheduleReply:
        """Choose a server and reserve a place on it. A failure that it reports is counted first.

        Raises NotRunning for an attempt that is over, BadCall for a policy that is not pinned while others are, and
        NoServer if no server may take the request now, or before the first pin.
        """
        for ticket_id, number, call in request.released:
            if self.running_attempt(ticket_id, number) is not None:  # else the places are those of a later attempt
                self.reservations.release_call(ticket_id, call)
        attempt = self.running_attempt(request.ticket_id, request.attempt)
        if attempt is None:
            raise NotRunning(f"ticket {request.ticket_id} attempt {request.attempt} is not running: cancel it")
        attempt.news_at = now  # renews the lease
        pins = self.evaluations.pins
        pin = pins.get(request.policy)
        if request.policy and pin is None and not request.or_trained:
            if not pins:  # agents run before a training loop pins its first version
                raise NoServer(f"policy {request.policy!r} is not pinned, and no other one is")
            raise BadCall(f"policy {request.policy!r} is not pinned: {', '.join(sorted(pins))} is")
        minimum = pin or self._minimum(attempt)
        held = self.reservations.get(request.ticket_id, request.call)
        if request.failed_server is not None and held is not None and held.server == request.failed_server:
            request.avoid = held.server
            self.servers.report(held.server, held.epoch, attempt.worker, request.failure or "a call failed", now)
            self.reservations.release_call(request.ticket_id, request.call)
            held = None
        request.failed_server = None  # a held call is decided again, and must not report the failure twice
        reply = self.router.place(request, minimum, held, attempt.worker, now)
        if reply is None:
            wanted = f"policy {request.policy!r} is pinned to version {pin.version} ({pin.locator}): " if pin else ""
            raise NoServer(wanted + self.servers.explain())
        if isinstance(attempt, RunningProblem):
            self.refresh_holds(now)  # the call may have left a server that waits for it
        return reply

    def touch(self, request: m.TouchRequest, now: float) -> m.TouchReply:
        """Renew the leases of the attempts that a worker names: an agent's tool may run for longer than a lease."""
        self.throughput.observe_memory(request.worker, request.memory_bytes)
        over = []
        for ticket_id, number in request.running:
            attempt = self.running_attempt(ticket_id, number)
            if attempt is not None and attempt.worker == request.worker:
                attempt.news_at = now
            else:
                over.append(ticket_id)
        return m.TouchReply(over)

    def _minimum(self, attempt: OpenTicket | RunningProblem) -> Demand:
        """Return the oldest version that may serve this attempt; None: any that training may use.

        A ticket was granted when a server served weights that are new enough for it. If that server is gone, the
        others may serve it: tokens that are one version too old are better than a wait.
        """
        if isinstance(attempt, RunningProblem):
            return Exactly(attempt.ticket.version)
        minimum = self.minimum(attempt.weights)
        return minimum if self.router.routes(minimum) else None

    def finish(self, request: m.FinishRequest, now: float) -> m.FinishReply:
        """End an attempt. Frees its reservations only if it is the current attempt."""
        problem = self.evaluations.running_attempt(request.ticket_id, request.attempt)
        if problem is not None:
            answer = request.answers[0] if request.answers and request.outcome != "failed" else None
            answered = self.evaluations.finish(problem, answer, request.reason or "")
            self.outbox += [answered] if answered else []
            reply, changed = m.FinishReply(True, retry=answered is None), True
        else:
            attempt = request.ticket_id, request.attempt, request.outcome
            verdicts = min(request.correct, request.judged), request.judged
            reply, end = self.ledger.finish(*attempt, request.reason or "", now, request.versions(), verdicts)
            self.outbox += [end] if end else []
            changed = end is not None
        if reply.known:
            released = self.reservations.release(request.ticket_id)
            if changed or released:  # not for a repetition of the call
                self.throughput.count(request, released, now)
                self.router.lengths.add(answer.length for answer in request.answers)
        if problem is not None:
            self.refresh_holds(now)
        return reply

    # -- calls of the trainer ----------------------------------------------------------------------------------------

    def submit(self, request: m.SubmitRequest, now: float) -> m.SubmitReply:
        """Append prompts that the training script has chosen (``data.order=script``).

        Raises BadCall for a call that contradicts the ledger or the order, and what ``_require_current`` raises.
        """
        self._require_current(request.incarnation)
        event = self.ledger.submit(request.start, request.prompts, now)
        self.outbox += [event] if event else []
        return m.SubmitReply(self.ledger.total_submitted, self.ledger.cursor)

    def claim(self, request: m.ClaimRequest, now: float) -> m.ClaimReply:
        """Claim a batch before its training (``claim-before-train``); its reservations end, finished or not.

        Raises BadCall for a ticket that was never granted, and what ``_require_current`` raises.
        """
        self._require_current(request.incarnation)
        event, ended = self.ledger.claim(request.version, request.tickets, now, request.incarnation)
        if event is not None:
            self.outbox.append(event)
            for ticket_id in event.tickets:
                self.reservations.release(ticket_id)
        return m.ClaimReply(ended)

    def trained(self, request: m.TrainedRequest, now: float) -> m.TrainedReply:
        """End tickets as trained or dropped (``one-end``), and reissue those that never arrived.

        Raises BadCall for a call that contradicts itself or the ledger, and what ``_require_current`` raises.
        """
        self._require_current(request.incarnation)
        self.ledger.require(ticket_id for ticket_id, _ in (*request.dropped, *request.stale))
        event = self.ledger.trained(
            request.version, request.step, request.trained, now, request.oldest, request.incarnation
        )
        if event is not None:
            self.outbox.append(event)
        dropped = 0
        for ticket_id, reason in request.dropped:
            drop = self.ledger.drop(ticket_id, reason, now)
            if drop is not None:
                self.outbox.append(drop)
                self.reservations.release(ticket_id)
                dropped += 1
        stale = self.ledger.reissue_stale(request.stale, now)
        self.outbox += stale
        for reissued in stale:
            self.reservations.release(reissued.ticket_id)
        lost = []
        if request.held is not None:
            lost = self.ledger.never_arrived({ticket for ticket, _ in request.held}, now - ARRIVAL_GRACE_S, now)
            self.outbox += lost
        if request.staleness:
            if self.staleness and self.staleness[-1].version == request.version:
                self.staleness.pop()  # the call is a repetition
            self.staleness.append(StepStaleness(request.step, request.version, dict(request.staleness)))
        return m.TrainedReply(
            trained=len(event.tickets) if event else 0,
            dropped=dropped,
            lost=[event.ticket_id for event in lost],
            in_use=self.servers.in_use(),
            reissued=len(stale),
            lost_tokens=dict(self.throughput.lost_tokens),
            lost_lengths=dict(self.throughput.lost_lengths),
            verdict_failures=dict(self.throughput.verdict_failures),
            filtered=self.ledger.counts.filtered(),
            memory=memory_sums(self.memory()),
            pins=dict(self.evaluations.pins),
        )

    def move_devices(self, request: m.DevicesRequest, now: float) -> m.DevicesReply:
        """Let the servers have the devices that they share with the trainer, or take them away (``one-at-a-time``).

        An evaluation that no other server can serve ends first, for as long as it may delay weights. Raises what
        ``_require_current`` raises.
        """
        self._require_current(request.incarnation)
        lending = self.servers.lending
        if request.turn == "servers":
            lending.give_back(now, self.throughput.groups.total)
            self.servers.turn_changed()
            return m.DevicesReply(True, lending.reason)
        if lending.turn != "trainer":
            takes, reason = self._takes(request, now)
            if not takes:
                lending.reason = reason
                return m.DevicesReply(False, reason)
            lending.take(now, reason)
            self.servers.turn_changed()
        if awake := self.servers.awake():
            return m.DevicesReply(False, f"{', '.join(awake[:20])} must fall asleep")
        lending.asleep(now)
        return m.DevicesReply(True, lending.reason)

    def _takes(self, request: m.DevicesRequest, now: float) -> tuple[bool, str]:
        """Return whether the trainer may have the devices now, and why."""
        lending = self.servers.lending
        if lending.turn == "unknown" or not request.batch:
            return True, "the trainer starts"
        if len(lending.lent) == len(self.servers.all()):
            unfinished = [evaluation.started.eval_id for evaluation in self.evaluations.unfinished()]
            lending.evaluates_since = (lending.evaluates_since or now) if unfinished else None
            if lending.evaluates_since is not None and now < lending.evaluates_since + self.settings.holds.seconds:
                return False, f"evaluation {unfinished[0]} runs, and no other server can sample it"
        counts, batch = self.ledger.counts.open, self.settings.batch_groups
        missing = batch - counts["finished"] % batch
        rate = (self.throughput.groups.total - lending.groups) / max(1e-3, now - lending.began)
        return lending.decide(Progress(missing, counts["running"], rate, self._fill()))

    def _fill(self) -> float:
        """Return how full the lent servers are, as a share of the most in this turn."""
        lending = self.servers.lending
        return lending.fill(sum(self.reservations.load(name)[0] for name in lending.lent))

    def roll_back(self, request: m.RollBackRequest, now: float) -> m.RollBackReply:
        """Start a trainer from ``request.version``: reissue every ticket that is not in the weights of that version.

        Nothing is granted until it has published. Raises OlderTrainer, and BadCall for a version that is not there.
        """
        last = self.ledger.rolled_back
        if last is None or request.incarnation != last.incarnation:
            self._refuse_older(request.incarnation)
            event = self.ledger.roll_back(request.version, request.step, request.incarnation, request.checkpoint, now)
            self.outbox.append(event)
            self.evaluations.apply(event)
            self.servers.roll_back(event.incarnation)
            self.reservations.release_all()
            self.repeats.forget_tickets()
            for step in [step for step in self.staleness if step.version > event.version]:
                self.staleness.remove(step)
        elif request.version != last.version:
            raise BadCall(f"{last.incarnation} has rolled back to {last.version}, not to {request.version}")
        return m.RollBackReply(self.ledger.reissued, self.evaluations.ever_started(), dict(self.evaluations.pins))

    def pin(self, request: m.PinRequest, now: float) -> m.PinReply:
        """Keep the published version under a name: at least one server stays at it while the others update.

        Raises BadCall without a version, with a transport whose versions end with their trainer, and with too few
        servers; and what ``_require_current`` raises.
        """
        self._require_current(request.incarnation)
        held, own = self.servers.published, self.settings.own_servers
        if held is None or request.name == m.POLICY:
            reason = "no version is published yet" if held is None else "it is the name of the policy in training"
            raise BadCall(f"{request.name!r} cannot be pinned: {reason}")
        if held.transport != "disk":
            problem = f"weights.transport={held.transport} does not keep older versions: use disk"
            raise BadCall(f"{request.name!r} cannot be pinned: {problem}")
        needed = 1 + len({*(self.evaluations.pins | {request.name: held}).values()})
        if needed > own:
            problem = f"it needs {needed} servers that share no devices with ranks, and allocation has {own}"
            raise BadCall(f"{request.name!r} cannot be pinned: {problem}: begin it with serve.d{needed}+")
        self._set_pin(request.name, held, now)
        return m.PinReply(held.version)

    def unpin(self, request: m.PinRequest, now: float) -> m.PinReply:
        """End a pin; calls of it that run end first. Raises what ``_require_current`` raises."""
        self._require_current(request.incarnation)
        held = self.evaluations.pins.get(request.name)
        self._set_pin(request.name, None, now)
        return m.PinReply(held.version if held else NO_VERSION)

    def _set_pin(self, name: str, held: PublishedVersion | None, now: float) -> None:
        if self.evaluations.pins.get(name) != held:
            event = Pinned(name, held, now)
            self.outbox.append(event)
            self.evaluations.apply(event)
            self.refresh_holds(now)

    def evaluate(self, request: m.EvaluateRequest, now: float) -> m.EvaluateReply:
        """Start an evaluation, or find the one with this id.

        Raises BadCall for an unknown split, and what ``_require_current`` raises unless the caller is a user.
        """
        if not request.by_user:
            self._require_current(request.incarnation)
        size = self.settings.split_sizes.get(request.split)
        if not size:
            splits = ", ".join(f"{name} ({n})" for name, n in self.settings.split_sizes.items())
            raise BadCall(f"split {request.split!r} has no prompts: use one of {splits}")
        total = min(request.n, size, MOST_PROBLEMS // request.samples)
        if request.eval_id not in self.evaluations.by_id:
            event = EvalStarted(
                request.eval_id,
                request.split,
                total,
                request.seed,
                max(0, self.version),
                now,
                request.samples,
                request.set,
                request.max_failed,
                request.by_user,
            )
            self.evaluations.apply(event)
            self.outbox.append(event)
        return m.EvaluateReply(self.evaluations.find(request.eval_id).started.total)

    def cancel_evaluation(self, request: m.CancelRequest, now: float) -> m.CancelReply:
        """End an evaluation of a user, and free the places of its completions.

        Raises NotFound for an unknown one, BadCall for one of the trainer, which waits for it.
        """
        evaluation = self.evaluations.find(request.eval_id)
        if not evaluation.started.by_user:
            raise BadCall(f"evaluation {request.eval_id!r} was requested by the trainer, which waits for it")
        if evaluation.is_finished:
            return m.CancelReply(False)
        self.outbox.append(self.evaluations.lose_version(evaluation, "cancelled by its user", False, now))
        self._release_over()
        self.refresh_holds(now)
        return m.CancelReply(True)

    def _require_current(self, incarnation: str) -> None:
        """Raise OlderTrainer or BadCall unless the caller is the trainer that rolled back last (``monotonic``)."""
        self._refuse_older(incarnation)
        if self.trainer_incarnation and incarnation > self.trainer_incarnation:
            raise BadCall(f"trainer {incarnation} has not called /roll_back: {self.trainer_incarnation} has")

    def _refuse_older(self, incarnation: str) -> None:
        if incarnation < self.trainer_incarnation:
            caller = f"trainer {incarnation or 'without incarnation'}"
            raise OlderTrainer(f"{caller} must end: {self.trainer_incarnation} has started since")
