"""ManagerState: admission, ledger, servers, reservations and evaluations of one trial, as one pure state machine.

    HTTP calls, name-store changes, clock ──> methods ──> answers, and events for the journal (``outbox``)

No I/O and no clock: ``now`` (unix seconds) is an argument. The shell must write the outbox to the journal before it
answers the call that filled it. ``restore_from`` replays a journal after a restart.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable

from realsys.manager.evaluations import PREFIX, Evaluation, Evaluations
from realsys.manager.ledger.events import (
    MOST_PROBLEMS,
    EvalAnswered,
    EvalStarted,
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
from realsys.manager.messages import (
    AllocateReply,
    AllocateRequest,
    ClaimReply,
    ClaimRequest,
    EvaluateRequest,
    FinishReply,
    FinishRequest,
    Refusal,
    RollBackReply,
    RollBackRequest,
    ScheduleReply,
    ScheduleRequest,
    TrainedReply,
    TrainedRequest,
)
from realsys.manager.refusals import NoServer, NotRunning, OlderTraining
from realsys.manager.routing.placement import Reservation, Reservations, make_strategy
from realsys.manager.routing.rates import RateWindow
from realsys.manager.routing.rollout_workers import Heartbeat, Held, incarnation_of, is_lost, observe
from realsys.manager.routing.router import Router
from realsys.manager.routing.servers import ServerRegistry, UpdateOrder
from realsys.manager.settings import ManagerSettings
from realsys.types import PublishedVersion, ServerAddress, Ticket

STALE = "stale"  # a drop whose reason starts with this gives the prompt a fresh ticket
NO_VERSION = -1
#: Seconds that a finished group may take to show up among what the master holds. It was acknowledged by its DP head
#: before its finish was sent, so only the notice from there to the master is under way.
ARRIVAL_GRACE_S = 10.0


class ManagerState:
    """Everything the GserverManager decides. Invariants: ARCHITECTURE section 5, items 1, 3, 5 and 6."""

    def __init__(self, settings: ManagerSettings, *, backoff_s: float = 0.5, backoff_max_s: float = 30.0) -> None:
        self.settings = settings
        self.bound = StalenessBound(settings.batch_groups, settings.eta)
        order = PromptOrder(settings.seed, settings.split_sizes["train"], settings.total_epochs)
        self.ledger = Ledger(order, settings.max_attempts)
        self.evaluations = Evaluations(settings.max_attempts)
        self.servers = ServerRegistry(self.bound, settings.pace, backoff_s=backoff_s, backoff_max_s=backoff_max_s)
        self.reservations = Reservations()
        self.router = Router(self.servers, self.reservations, make_strategy(settings.routing))
        self.workers: dict[str, Heartbeat] = {}
        self.outbox: list[Event] = []
        self.master: dict[str, object] = {}  # what the MasterWorker says in names.status
        self.staleness: deque[StepStaleness] = deque(maxlen=20)
        self.generated = RateWindow()
        self.generated_by_server: dict[str, RateWindow] = {}
        self.finished_groups = RateWindow()
        self.answers: Counter[str] = Counter()  # by finish reason
        self._repeats = Repeats()
        self._unseen: list[tuple[str, int]] = []  # attempts that ran when a predecessor of this manager ended

    @property
    def version(self) -> int:
        """The published version v; -1 before the first."""
        return self.servers.published.version if self.servers.published else NO_VERSION

    @property
    def trainer_incarnation(self) -> str:
        """Incarnation of the training side; "" before the first has started."""
        return self.ledger.rolled_back.incarnation if self.ledger.rolled_back else ""

    def restore_from(self, events: Iterable[Event]) -> None:
        """Replay a journal into a fresh state. Running tickets keep the lease they had."""
        for event in events:
            if not isinstance(event, EvalStarted | EvalAnswered):
                self.ledger.apply(event)
            if isinstance(event, EvalStarted | EvalAnswered | RolledBack | Snapshot):
                self.evaluations.apply(event)
        if self.trainer_incarnation:
            self.servers.roll_back(self.trainer_incarnation)
        for ticket in sorted(self.ledger.running(), key=lambda ticket: ticket.news_at):
            self._unseen.append((ticket.ticket_id, ticket.attempt))
            self._repeats.remember(ticket.worker, ticket.request, self._ticket(ticket))

    def open(self, now: float) -> None:
        """Put into the journal what the decisions are bound by. Raises LedgerError if the tickets are of another data.

        Before anything else is decided, after ``restore_from``.
        """
        settings = self.settings
        opened = Opened(
            prompts=settings.split_sizes["train"],
            seed=settings.seed,
            batch_groups=settings.batch_groups,
            eta=settings.eta,
            stale_policy=settings.stale_policy,
            group_size=settings.group_size,
            time=now,
        )
        if event := self.ledger.bind(opened):
            self.outbox.append(event)
        for ticket in self.ledger.open.values():  # a clock that was set back must not put off when they are missed
            ticket.news_at = min(ticket.news_at, now)

    def snapshot(self, now: float) -> Snapshot:
        """Everything that a replay of the journal would lead to, as one record to replace it."""
        assert not self.outbox, "events that are not in the journal yet would be in it twice"
        return self.ledger.snapshot(now, *self.evaluations.snapshot())

    # -- admission ---------------------------------------------------------------------------------------------------

    def refusal(self) -> Refusal | None:
        """Why no train ticket can be granted now, None if one can."""
        if self.master.get("phase") == "done":
            return "paused"
        if not self.router.routes(None):
            return "no_server"
        needed = self.settings.total_steps * self.settings.batch_groups
        if self.ledger.exhausted or (needed and self.ledger.counted >= needed):
            return "exhausted"
        return None if self.bound.admits(self.ledger.counted + 1, self.version) else "staleness"

    def allocate(self, request: AllocateRequest, now: float) -> AllocateReply:
        """Grant up to ``max_tickets``: problems of evaluations first, then train tickets while admission allows."""
        if before := self._repeats.find(request.worker, request.request_id, self._runs):
            return AllocateReply(before)
        incarnation = request.incarnation or incarnation_of(request.worker, self.workers)
        tickets: list[Ticket] = []
        reason: Refusal | None = None
        while len(tickets) < request.max_tickets and reason is None:
            ticket = self.evaluations.grant(request.worker, incarnation, self.router.serves, self.version, now)
            if ticket is None and (reason := self.refusal()) is None:
                ticket = self._grant_train(request, incarnation, now)
            if ticket is not None:
                tickets.append(ticket)
                self._repeats.remember(request.worker, request.request_id, ticket)
        return AllocateReply(tickets) if tickets else AllocateReply([], reason, retry_after_s=0.5)

    def _grant_train(self, request: AllocateRequest, incarnation: str, now: float) -> Ticket:
        event = self.ledger.grant(request.worker, incarnation, self.version, now, request.request_id)
        assert event is not None, "refusal() said that there is a prompt"
        self.outbox.append(event)
        return self._ticket(event)

    def _runs(self, ticket_id: str, attempt: int) -> bool:
        if ticket_id.startswith(PREFIX):
            return self.evaluations.running(ticket_id, attempt) is not None
        return self.ledger.is_running(ticket_id, attempt)

    def _ticket(self, granted: Granted | OpenTicket) -> Ticket:
        # Numbered on from the groups before a checkpoint: a resumed trial must not draw its first numbers again.
        number = self.ledger.counts.inherited + int(granted.ticket_id)
        return Ticket(
            granted.ticket_id,
            granted.attempt,
            granted.prompt_index,
            n=self.settings.group_size,
            seed=sampling_seed(self.settings.seed, number, granted.attempt),
            version=granted.version,
            trainer_incarnation=self.trainer_incarnation,
        )

    # -- routing -----------------------------------------------------------------------------------------------------

    def schedule(self, request: ScheduleRequest, now: float) -> ScheduleReply | NoServer | NotRunning:
        """Choose a server and reserve a place on it. A reported failure puts that server in quarantine first."""
        for ticket_id, attempt, call in request.released:
            if self._runs(ticket_id, attempt):  # else the places are those of a later attempt
                self.reservations.release_call(ticket_id, call)
        minimum: int | None = None
        if request.ticket_id.startswith(PREFIX):
            minimum = self.evaluations.touch(request.ticket_id, request.attempt, now)
            known = minimum is not None
        else:
            known = self.ledger.touch(request.ticket_id, request.attempt, now)
        if not known:
            return NotRunning(f"ticket {request.ticket_id} attempt {request.attempt} is not running: give it up")
        held = self.reservations.get(request.ticket_id, request.call)
        if request.failed_server is not None and held is not None and held.server == request.failed_server:
            self.servers.report_failure(held.server, held.epoch, request.failure or "a rollout reported a failure", now)
            self.reservations.release_call(request.ticket_id, request.call)
            held = None
        reply = self.router.place(request, minimum, held)
        return reply if reply is not None else NoServer(self.explain_no_server())

    def explain_no_server(self) -> str:
        """One line on each server, for the error."""
        states = [
            f"{s.name} {s.state} at {s.verified.version if s.verified else 'no version'}"
            + (f" ({s.error})" if s.error else "")
            for s in self.servers.all()
        ]
        return f"no routable server at version {self.version}, eta {self.bound.eta}: " + (
            "; ".join(states) or "none registered"
        )

    # -- ends --------------------------------------------------------------------------------------------------------

    def finish(self, request: FinishRequest, now: float) -> FinishReply:
        """The end of an attempt. Frees its reservations only if it is the current attempt."""
        reason = request.reason or ""
        if request.ticket_id.startswith(PREFIX):
            answer = request.answers[0] if request.answers and request.outcome != "failed" else None
            known, retry, event = self.evaluations.finish(request.ticket_id, request.attempt, answer)
            changed = known
            if event is not None:
                self.outbox.append(event)
        else:
            result = self.ledger.finish(
                request.ticket_id, request.attempt, request.outcome, reason, now, request.versions()
            )
            known, retry, changed = result.known, result.retry, result.event is not None
            if result.event is not None:
                self.outbox.append(result.event)
        if known:
            held = self.reservations.release(request.ticket_id)
            if changed or held:  # not for a repetition of the call
                self._count_answers(request, held, now)
        return FinishReply(known, retry)

    def _count_answers(self, request: FinishRequest, held: list[Reservation], now: float) -> None:
        tokens = sum(answer.length for answer in request.answers)
        self.generated.add(tokens, now)
        self.finished_groups.add(1, now)
        self.answers.update(answer.finish_reason for answer in request.answers)
        for server, count in (request.servers or {place.server: tokens for place in held[:1]}).items():
            if self.servers.get(server) is not None:
                self.generated_by_server.setdefault(server, RateWindow()).add(count, now)

    def claim(self, request: ClaimRequest, now: float) -> ClaimReply | OlderTraining:
        """The trainer is about to train these. They have been generated, so their reservations end, finish or not.

        Raises ValueError for a ticket that was never granted, and for a training side that has not rolled back.
        """
        if older := self._replaced(request.incarnation):
            return older
        event, gone = self.ledger.claim(request.version, request.tickets, now, request.incarnation)
        if event is not None:
            self.outbox.append(event)
            for ticket_id in event.tickets:
                self.reservations.release(ticket_id)
        return ClaimReply(gone)

    def trained(self, request: TrainedRequest, now: float) -> TrainedReply | OlderTraining:
        """The trainer's verdict.

        Raises ValueError for a call that contradicts itself or the ledger, and for a training side that has not rolled
        back.
        """
        if older := self._replaced(request.incarnation):
            return older
        self.ledger.require(ticket_id for ticket_id, _ in request.dropped)
        event = self.ledger.trained(
            request.version, request.step, request.trained, now, request.oldest, request.incarnation
        )
        if event is not None:
            self.outbox.append(event)
        dropped = 0
        for ticket_id, reason in request.dropped:
            drop = self.ledger.drop(ticket_id, reason, now, requeue=reason.startswith(STALE))
            if drop is not None:
                self.outbox.append(drop)
                self.reservations.release(ticket_id)
                dropped += 1
        lost = []
        if request.held is not None:
            lost = self.ledger.never_arrived({ticket for ticket, _ in request.held}, now - ARRIVAL_GRACE_S, now)
            self.outbox += lost
        if request.staleness:
            if self.staleness and self.staleness[-1].version == request.version:
                self.staleness.pop()  # told again
            self.staleness.append(StepStaleness(request.step, request.version, dict(request.staleness)))
        return TrainedReply(len(event.tickets) if event else 0, dropped, [event.ticket_id for event in lost])

    def roll_back(self, request: RollBackRequest, now: float) -> RollBackReply | OlderTraining:
        """A training side starts from ``request.version``: only what is in the weights of that version counts.

        Nothing is granted until it has published. Raises ValueError for a version that cannot be gone back to.
        """
        if request.incarnation < self.trainer_incarnation:
            return self._older(request.incarnation)
        known = self.ledger.rolled_back
        if known is not None and request.incarnation == known.incarnation:
            if request.version != known.version:
                raise ValueError(f"{known.incarnation} has rolled back to {known.version}, not to {request.version}")
            return RollBackReply(self.ledger.reissued, self.evaluations.asked())
        event = self.ledger.roll_back(request.version, request.step, request.incarnation, request.checkpoint, now)
        self.outbox.append(event)
        self.evaluations.apply(event)
        self.servers.roll_back(event.incarnation)
        self.reservations.release_all()
        self._repeats.clear()
        self.staleness = deque((s for s in self.staleness if s.version <= event.version), self.staleness.maxlen)
        return RollBackReply(self.ledger.reissued, self.evaluations.asked())

    def _replaced(self, incarnation: str) -> OlderTraining | None:
        """None if the training side that speaks is the current one. Raises ValueError if it has not rolled back."""
        if incarnation < self.trainer_incarnation:
            return self._older(incarnation)
        if self.trainer_incarnation and incarnation > self.trainer_incarnation:
            raise ValueError(f"training side {incarnation} has not called /roll_back; {self.trainer_incarnation} has")
        return None

    def _older(self, incarnation: str) -> OlderTraining:
        name = f"training side {incarnation or 'without incarnation'}"
        return OlderTraining(f"{name} must end: {self.trainer_incarnation} has started since")

    def evaluate(self, request: EvaluateRequest, now: float) -> Evaluation | OlderTraining:
        """Start an evaluation, or find the one with this id. Raises ValueError for an unknown split, and for a training
        side that has not rolled back.
        """
        if older := self._replaced(request.incarnation):
            return older
        size = self.settings.split_sizes.get(request.split)
        if not size:
            known = ", ".join(f"{name} ({n})" for name, n in self.settings.split_sizes.items())
            raise ValueError(f"split {request.split!r} has no prompts; there are: {known}")
        total = min(request.n, size, MOST_PROBLEMS)
        event = self.evaluations.start(request.eval_id, request.split, total, request.seed, max(0, self.version), now)
        if event is not None:
            self.outbox.append(event)
        evaluation = self.evaluations.get(request.eval_id)
        assert evaluation is not None
        return evaluation

    # -- name store and clock ----------------------------------------------------------------------------------------

    def observe_servers(self, addresses: Iterable[ServerAddress]) -> None:
        """The current list of registered servers; places on servers that are gone are freed."""
        for name in self.servers.observe(addresses):
            self.reservations.release_server(name)
            self.generated_by_server.pop(name, None)

    def publish(self, published: PublishedVersion) -> bool:
        """A newer version; counts for admission at once. False if it is not newer."""
        return self.servers.publish(published)

    def observe_workers(self, heartbeats: dict[str, str], now: float) -> list[str]:
        """All heartbeat keys (worker name -> JSON). Re-issues the running tickets of workers that are gone."""
        self.workers = observe(heartbeats, self.workers, now)
        return self._lose(lambda held: is_lost(held, self.workers), "worker lost", now)

    def expire(self, now: float) -> list[str]:
        """Re-issue running tickets without news for ``lease_s``; returns them."""
        return self._lose(lambda held: now - held.news_at > self.settings.lease_s, "lease lapsed", now)

    def _lose(self, lost: Callable[[Held], bool], cause: str, now: float) -> list[str]:
        events = self.ledger.lose(lost, cause, now)
        self.outbox += events
        tickets = [event.ticket_id for event in events] + self.evaluations.lose(lost)
        for ticket_id in tickets:
            self.reservations.release(ticket_id)
        return tickets

    def begin_update(self, order: UpdateOrder, now: float) -> bool:
        """Whether the update may start now. If answers must not be interrupted, the server is drained first."""
        if not self.settings.interruptible and (self.reservations.load(order.server)[0] or self._unplaced()):
            self.servers.drain(order, now)
            return False
        self.servers.started(order, now)
        return True

    def _unplaced(self) -> bool:
        """Whether an attempt from before a restart of the manager still runs, on a server that is not known here."""
        self._unseen = [
            (ticket_id, attempt)
            for ticket_id, attempt in self._unseen
            if self.ledger.is_running(ticket_id, attempt) and not self.reservations.calls(ticket_id)
        ]
        return bool(self._unseen)
