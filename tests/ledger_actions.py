"""What can happen in the small trial of ``ledger_world``: each action and fault, with what the model makes of it."""

from __future__ import annotations

from dataclasses import dataclass

from realsys.admission.events import Outcome
from realsys.admission.manager import OlderTraining
from realsys.admission.messages import (
    AllocateRequest,
    FinishRequest,
    RollBackRequest,
    ScheduleReply,
    ScheduleRequest,
    TrainedReply,
    TrainedRequest,
)
from realsys.admission.servers import UpdateOrder
from realsys.buffer.replay import SequenceBuffer
from realsys.types import PublishedVersion, SampleMeta, Ticket
from tests.ledger_world import (
    COPIER,
    FILTERED,
    IN_GENERATION,
    LATE,
    LEASE_S,
    LEDGER_KEY,
    SERVER,
    Act,
    Attempt,
    Truth,
    WorldState,
    keep,
)


@dataclass
class World(WorldState):
    """A method for each action, by its name."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for action in ("manager_restarts", "master_starts", "publishes_again", "server_updates", "checkpoints"):
            self.apply(Act(action))

    # -- what can happen -----------------------------------------------------------------------------------------------

    def enabled(self) -> list[Act]:
        acts = self._workers_act() + self._master_acts()
        order = self.manager.servers.next_order(SERVER, str(self.births[SERVER]), 0.0)
        if isinstance(order, UpdateOrder):
            acts.append(Act("server_updates"))
        acts += [Act("stray_arrives", (number,)) for number in range(len(self.strays))]
        acts += [Act("echo", (number,)) for number in range(len(self.echoes))]
        return acts + [act for act in self._faults() if self._may(act.name)]

    def _may(self, fault: str) -> bool:
        return self.faults > 0 and (not self.bounds.kinds or fault in self.bounds.kinds)

    def _workers_act(self) -> list[Act]:
        acts = []
        for worker in self._workers():
            if worker in self.unanswered:
                acts.append(Act("asks_again", (worker,)))
            elif self.manager.refusal() is None:
                acts.append(Act("allocate", (worker,)))
            if self._is_unnoticed(worker):
                acts.append(Act("death_noticed", (worker,)))
        acts += [Act("finish" if a.pushed else "arrive", key) for key, a in self.attempts.items()]
        alive = {(a.ticket.ticket_id, a.ticket.attempt) for a in self.attempts.values()}
        for ticket in self._running():  # a lease lasts longer than it takes to notice that a worker died
            if (ticket.ticket_id, ticket.attempt) not in alive and not self._is_unnoticed(ticket.worker):
                acts.append(Act("lapse", (ticket.ticket_id,)))
        return acts

    def _master_acts(self) -> list[Act]:
        acts = [Act("tell_drops")] if self.drops else []
        if self.phase == "training":
            acts.append(Act("publish"))
        elif self.phase == "published":
            acts.append(Act("tell_trained"))
        elif self.phase == "down":
            acts.append(Act("master_starts"))
        elif self.phase == "rolled back":
            acts.append(Act("publishes_again"))
        elif self.phase == "idle":
            if self.checkpoint < self.version and self._may("master_crashes"):
                acts.append(Act("checkpoints"))
            if "finished" in self.truth.values():
                acts.append(Act("tells_what_it_holds"))
            if self.buffer.ready_groups >= self.bounds.batch or self._stale():
                acts.append(Act("take"))
            elif self._can_never_fill():
                acts.append(Act("give_up"))
        return acts

    def _faults(self) -> list[Act]:
        acts = [Act("manager_restarts", (), 1), Act("server_dies", (), 1)]
        for key, attempt in self.attempts.items():
            names = IN_GENERATION if not attempt.pushed else ["finishes_twice"]
            acts += [Act(name, key, 1) for name in names]
            if self.manager.ledger.is_running(*key):
                acts.append(Act("lapses_though_alive", (key[0],), 1))
        for worker in self._workers():
            if any(attempt.worker == worker for attempt in self.attempts.values()):
                acts += [Act("dies", (worker,), 1), Act("dies_in_push", (worker,), 1)]
            if worker not in self.unanswered and self.manager.refusal() is None:
                acts.append(Act("reply_lost", (worker,), 1))
        if self.phase == "published":
            acts.append(Act("told_twice", (), 1))
        if self.phase in ("idle", "training", "published"):
            acts.append(Act("master_crashes", (), 1))
        return acts

    def apply(self, action: Act) -> None:
        """Raises AssertionError when the real parts answer what the model says they must not."""
        before = COPIER.dump(self.manager.ledger)
        self.faults -= action.cost
        getattr(self, "_" + action.name)(*action.args)
        self._commit(before)
        self._deliver_what_cannot_matter()

    def _deliver_what_cannot_matter(self) -> None:
        """Calls for tickets that have ended change nothing, now or ever: none of them needs an order of its own."""
        late = [key for key, a in self.attempts.items() if a.pushed and self.truth[key[0]] in ("trained", "dropped")]
        calls = [FinishRequest(*key, self.attempts.pop(key).worker, "accepted") for key in late]
        for call in [*calls, *self.echoes]:
            if isinstance(call, FinishRequest) and self.truth[call.ticket_id] in ("trained", "dropped"):
                self._finish_call(call)
                self.echoes = [echo for echo in self.echoes if echo is not call]
        assert not self.manager.outbox, "a ticket that has ended can be finished"

    # -- workers and the network ---------------------------------------------------------------------------------------

    def _allocate(self, worker: str, request: str = "", lost: bool = False) -> None:
        counted = self._counted()
        reply = self.manager.allocate(AllocateRequest(worker, 1, request_id=request), 0.0)
        (ticket,) = reply.tickets
        bounds = self.bounds
        assert counted // bounds.batch <= self.manager.version + bounds.eta, f"N={counted + 1} is over the bound"
        old = self.truth.get(ticket.ticket_id)
        assert old in (None, "waiting"), f"{ticket.ticket_id} is granted, and {old}"
        waiting = [t for t, state in self.truth.items() if state == "waiting"]
        assert not waiting or ticket.ticket_id == min(waiting), "what waits longest goes first"
        self.truth[ticket.ticket_id] = "running"
        if not lost:
            self._begin(ticket, worker)

    def _begin(self, ticket: Ticket, worker: str) -> None:
        reply = self.manager.schedule(ScheduleRequest(ticket.ticket_id, ticket.attempt, 1, 1), 0.0)
        oldest = reply.version if isinstance(reply, ScheduleReply) else self.manager.version
        self.attempts[ticket.ticket_id, ticket.attempt] = Attempt(ticket, worker, oldest)

    def _reply_lost(self, worker: str) -> None:
        self.unanswered[worker] = f"{worker} {self.faults}"
        self._allocate(worker, self.unanswered[worker], lost=True)

    def _asks_again(self, worker: str) -> None:
        request = self.unanswered.pop(worker)
        before = len(self.journal), LEDGER_KEY.of(self.manager.ledger)
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
            assert (len(self.journal), LEDGER_KEY.of(self.manager.ledger)) == before, "a repetition changed the ledger"

    def _deliver(self, group: SampleMeta) -> None:
        if group.training != self._incarnation() or self.phase in ("down", "rolled back"):
            return  # the DP heads and the master refuse it, or are not there
        added = self.buffer.add([group])
        self.drops += [(ticket_id, group.attempt, reason) for ticket_id, reason in added.dropped]

    def _arrive(self, ticket_id: str, number: int) -> None:
        attempt = self.attempts[ticket_id, number]
        attempt.pushed = True
        self._deliver(self._group(attempt))

    def _filtered(self, ticket_id: str, number: int) -> None:
        attempt = self.attempts[ticket_id, number]
        attempt.pushed = True
        self._deliver(self._group(attempt, FILTERED))

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
        runs = self.manager.ledger.is_running(request.ticket_id, request.attempt)
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

    def _echo(self, number: int) -> None:
        request = self.echoes.pop(number)
        if isinstance(request, FinishRequest):
            self._finish_call(request)
        elif isinstance(request, UpdateOrder):
            self.manager.servers.succeeded(request, 0.0, {})
        elif request.incarnation < self._incarnation():
            assert isinstance(self.manager.trained(request, LATE), OlderTraining)
        else:
            request.held = None  # what it said is said again by every later call
            reply = self._trained_call(request)
            if self.phase != "down":  # else it is the last call of the master that crashed
                assert (reply.trained, reply.dropped) == (0, 0), "a repeated /trained changed something"
            elif reply.trained:
                self.truth |= dict.fromkeys(request.trained, "trained")

    def _lapse(self, ticket_id: str) -> None:
        """Every other running attempt has sent news, this one has not."""
        ledger = self.manager.ledger
        for ticket in self._running():
            if ticket.ticket_id != ticket_id:
                assert ledger.touch(ticket.ticket_id, ticket.attempt, 2 * LEASE_S)
        assert self.manager.expire(2 * LEASE_S) == [ticket_id]
        self.truth[ticket_id] = "waiting"
        for ticket in self._running():
            ticket.news_at = 0.0

    _lapses_though_alive = _lapse

    def _dies(self, worker: str) -> None:
        """It is started again at once; the manager hears of it later."""
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

    # -- servers and the manager ---------------------------------------------------------------------------------------

    _manager_restarts = WorldState._start_manager

    def _put_version(self) -> None:
        self.published = PublishedVersion(self.version, self._incarnation(), "", self.version)
        assert self.manager.publish(self.published)
        for version, training in ((self.version, self.training), (self.version - 1, self.training), (99, 0)):
            older = PublishedVersion(version, f"{training:04d}", "", version)
            assert not self.manager.publish(older), f"after {self.published} comes {older}"

    def _server_updates(self) -> None:
        servers = self.manager.servers
        order = servers.next_order(SERVER, str(self.births[SERVER]), 0.0)
        assert isinstance(order, UpdateOrder) and order.target == self.published
        assert self.manager.begin_update(order, 0.0) and servers.succeeded(order, 0.0, {})

    def _server_dies(self) -> None:
        self.births[SERVER] += 1
        self._observe_server()
        assert self.manager.refusal() in ("no_server", "paused")

    # -- the master ----------------------------------------------------------------------------------------------------

    def _take(self) -> None:
        taken = self.buffer.take(self.bounds.batch, self.version, self.bounds.eta, "drop")
        attempts = {sample.ticket_id: sample.attempt for sample in taken.clear}
        self.drops += [(ticket_id, attempts[ticket_id], reason) for ticket_id, reason in taken.dropped]
        self.batch = [sample for group in taken.groups for sample in group]
        for sample in self.batch:
            assert 0 <= self.version - sample.version_min <= self.bounds.eta, f"{sample} is too old"
            before = [k for k, tickets in enumerate(self.weights, 1) if sample.ticket_id in tickets]
            assert not before, f"{sample.ticket_id} is trained again, after version {before}"
        if self.batch:
            assert len({sample.ticket_id for sample in self.batch}) == self.bounds.batch
            self.phase = "training"

    def _publish(self) -> None:
        self.version += 1
        self.weights.append([sample.ticket_id for sample in self.batch])
        self._put_version()
        self.phase = "published"

    def _tell_trained(self, twice: bool = False) -> None:
        request = self._request(trained=[s.ticket_id for s in self.batch], oldest=[s.version_min for s in self.batch])
        if twice:
            self.echoes.append(request)
        reply = self._trained_call(request)
        assert (reply.trained, reply.dropped) == (len(self.batch), 0)
        self.truth |= dict.fromkeys(request.trained, "trained")
        self.batch = []
        self.phase = "done" if self.version == self.bounds.steps else "idle"

    def _told_twice(self) -> None:
        self._tell_trained(twice=True)

    def _tell_drops(self) -> None:
        drops, self.drops = self.drops, []
        self._trained_call(self._request(dropped=[(ticket_id, reason) for ticket_id, _, reason in drops], held=None))
        for ticket_id, _, _ in drops:
            if self.truth[ticket_id] != "trained":
                self.truth[ticket_id] = "dropped"

    def _trained_call(self, request: TrainedRequest) -> TrainedReply:
        reply = self.manager.trained(request, LATE)
        assert isinstance(reply, TrainedReply)
        for ticket_id in reply.lost:
            assert self.truth[ticket_id] == "finished" and ticket_id not in request.trained
            self.truth[ticket_id] = "waiting"
        return reply

    def _tells_what_it_holds(self) -> None:
        self._trained_call(self._request())

    def _checkpoints(self) -> None:
        self.checkpoint = self.version

    def _master_crashes(self) -> None:
        """With the whole training side: what it held is gone. A server may be updating, a call may be on its way."""
        order = self.manager.servers.next_order(SERVER, str(self.births[SERVER]), 0.0)
        if isinstance(order, UpdateOrder) and self.manager.begin_update(order, 0.0):
            self.echoes.append(order)
        if self.phase == "published":
            self.echoes.append(self._request(trained=[sample.ticket_id for sample in self.batch]))
        self.buffer, self.batch, self.drops = SequenceBuffer(1, keep), [], []
        self.phase = "down"

    def _master_starts(self) -> None:
        """From its checkpoint: what is not in there must be rolled out again, whatever became of it."""
        self.training += 1
        self.version = max(self.checkpoint, 0)
        self.weights = self.weights[: self.version]
        request = RollBackRequest(self.checkpoint, self.checkpoint, self._incarnation())
        assert not isinstance(self.manager.roll_back(request, 0.0), OlderTraining)
        before = len(self.manager.outbox)
        assert not isinstance(self.manager.roll_back(request, 0.0), OlderTraining)
        assert len(self.manager.outbox) == before, "a repeated /roll_back changed something"
        if self.published is not None:  # seen late, or by a manager that has just started
            assert not self.manager.publish(self.published), "a publication of the side before"
        kept = {ticket_id for tickets in self.weights for ticket_id in tickets}
        for ticket_id, state in self.truth.items():
            if state != "dropped" and ticket_id not in kept:
                self.truth[ticket_id] = "waiting"
        self.phase = "rolled back"

    def _publishes_again(self) -> None:
        self._put_version()
        self.phase = "idle"

    def _give_up(self) -> None:
        self.phase = "stuck"
