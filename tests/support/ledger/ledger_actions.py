"""Actions and faults of the small trial of ``ledger_world``, with their effect on the model."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from realsys.manager.ledger.events import Outcome
from realsys.manager.messages import (
    AllocateRequest,
    BadCall,
    ClaimReply,
    ClaimRequest,
    FinishRequest,
    NoServer,
    OlderTrainer,
    RollBackRequest,
    ScheduleRequest,
    SubmitReply,
    SubmitRequest,
    TrainedReply,
    TrainedRequest,
)
from realsys.manager.routing.servers import UpdateOrder
from realsys.types import PublishedVersion, SampleMeta, Ticket
from tests.support.ledger.fingerprints import ledger_key
from tests.support.ledger.ledger_world import (
    COPIER,
    IN_GENERATION,
    LATE,
    LEASE_S,
    SERVER,
    Act,
    Attempt,
    Truth,
    WorldState,
)


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


@dataclass
class WithMaster(Workers):
    """The master's actions: a batch from its proposal to its training, and the master's end and start."""

    def _put_version(self) -> None:
        self.published = PublishedVersion(self.version, self._incarnation(), "", self.version)
        assert self.manager.servers.publish(self.published)
        for version, training in (
            (self.version, self.trainer_incarnation),
            (self.version - 1, self.trainer_incarnation),
            (99, 0),
        ):
            older = PublishedVersion(version, f"{training:04d}", "", version)
            assert not self.manager.servers.publish(older), f"after {self.published} comes {older}"

    def _echo(self, number: int) -> None:
        request = self.echoes.pop(number)
        if isinstance(request, FinishRequest):
            self._finish_call(request)
        elif isinstance(request, UpdateOrder):
            self.manager.servers.succeeded(request, 0.0, {})
        elif request.incarnation < self._incarnation():
            calls: dict[type, Any] = {ClaimRequest: self.manager.claim, SubmitRequest: self.manager.submit}
            call = calls.get(type(request), self.manager.trained)
            with pytest.raises(OlderTrainer):
                call(request, LATE)
        elif isinstance(request, ClaimRequest):
            self._claim_again(request)
        elif isinstance(request, SubmitRequest):
            if request.start == len(self.sequence):  # the only one that arrives of a master that crashed
                self._submit_call(request)
            else:
                self.manager.submit(request, LATE)
                assert not self.manager.outbox, "a repeated /submit changed something"
        elif self.phase == "down" and any(self.truth.get(name) != "claimed" for name in request.trained):
            pass  # refused, and no process reads the reply
        else:
            request.held = None  # every later call repeats it
            reply = self._trained_call(request)
            if self.phase != "down":  # else it is the last call of the master that crashed
                assert (reply.trained, reply.dropped) == (0, 0), "a repeated /trained changed something"
            elif reply.trained:
                self.truth |= dict.fromkeys(request.trained, "trained")

    def _claim_again(self, request: ClaimRequest) -> None:
        """No process reads its reply. If the master has crashed, it may be the only one that arrives."""
        if not self.truth.keys() >= set(request.tickets):
            return
        reply = self.manager.claim(request, LATE)
        if self.phase == "down" and not reply.gone:
            self.truth |= dict.fromkeys(request.tickets, "claimed")
        else:
            assert not self.manager.outbox, "a repeated /claim changed something"

    def _submits(self, twice: bool = False) -> None:
        request = self._next_submission()
        if twice:
            self.echoes.append(request)
        self._submit_call(request)

    def _submits_twice(self) -> None:
        self._submits(twice=True)

    def _crashes_in_submit(self) -> None:
        self.echoes.append(self._next_submission())
        self._master_crashes()

    def _next_submission(self) -> SubmitRequest:
        return SubmitRequest(self._incarnation(), len(self.sequence), [len(self.sequence)])

    def _submit_call(self, request: SubmitRequest) -> None:
        self.sequence += request.prompts
        reply, self.syncs = self.manager.submit(request, 0.0), True
        assert reply == SubmitReply(len(self.sequence), self.manager.ledger.cursor)

    def _take(self) -> None:
        self.asked = self.intake.propose(self.version)
        for ticket_id in self.asked:
            before = [k for k, tickets in enumerate(self.weights, 1) if ticket_id in tickets]
            assert not before, f"{ticket_id} is trained again, after version {before}"
        if self.asked:
            assert len(set(self.asked)) == self.bounds.batch
            self.phase = "asking"

    def _claim(self, twice: bool = False) -> None:
        """Tickets that have ended must not be trained."""
        tickets = self.asked
        request = ClaimRequest(self.version + 1, tickets, self._incarnation())
        if not self.truth.keys() >= set(tickets):
            self._refused(lambda: self.manager.claim(request, 0.0))
            return
        ended = [ticket_id for ticket_id in tickets if self.truth[ticket_id] in ("dropped", "trained")]
        assert self.manager.claim(request, 0.0) == ClaimReply(ended)
        if twice:
            self.echoes.append(request)
        taken = self.intake.conclude(ended)
        self.asked = []
        if taken is None:
            self.phase = "idle"
        else:
            self.batch = taken.samples
            for sample in self.batch:
                lag = self.version - sample.version_min
                assert 0 <= lag <= (lag if self.bounds.policy == "train" else self.bounds.eta), f"{sample} is too old"
            self.truth |= dict.fromkeys(tickets, "claimed")
            self.phase = "training"

    def _claims_twice(self) -> None:
        self._claim(twice=True)

    def _publish(self) -> None:
        self.version += 1
        self.weights.append([sample.ticket_id for sample in self.batch])
        self._put_version()
        self.phase = "published"

    def _tell_trained(self, twice: bool = False) -> None:
        request = self._request(trained=[s.ticket_id for s in self.batch], oldest=[s.version_min for s in self.batch])
        if any(self.truth.get(ticket_id) != "claimed" for ticket_id in request.trained):
            self._refused(lambda: self._trained_call(request))
            return
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
        departures = self.intake.depart()
        request = self._request(dropped=departures.dropped, stale=departures.stale, held=None)
        if any(ticket_id not in self.truth for ticket_id, _ in [*departures.dropped, *departures.stale]):
            self._refused(lambda: self._trained_call(request))
            return
        attempts = {ticket_id: ticket.attempt for ticket_id, ticket in self.manager.ledger.open.items()}
        self._trained_call(request)
        self.intake.reported(departures)
        for ticket_id, _ in departures.dropped:
            if self.truth[ticket_id] != "trained":
                self.truth[ticket_id] = "dropped"
        for ticket_id, attempt in departures.stale:
            if self.truth[ticket_id] in ("running", "finished") and attempts[ticket_id] == attempt:
                self.truth[ticket_id] = "waiting"

    def _trained_call(self, request: TrainedRequest) -> TrainedReply:
        reply = self.manager.trained(request, LATE)
        self.syncs = bool(request.trained or request.dropped or request.stale)
        for ticket_id in reply.lost:
            assert self.truth[ticket_id] == "finished" and ticket_id not in request.trained
            self.truth[ticket_id] = "waiting"
        return reply

    def _tells_what_it_holds(self) -> None:
        self._trained_call(self._request())

    def _refused(self, call: Callable[[], object]) -> None:
        """The manager does not know the tickets: the trainer ends, and starts from its checkpoint."""
        try:
            call()
        except BadCall:
            self._master_crashes()
        else:
            raise AssertionError("what the ledger has never heard of is passed over")

    def _checkpoints(self) -> None:
        self.checkpoint, self.syncs = self.version, True

    def _master_crashes(self) -> None:
        """Crash the whole trainer: its groups are lost. A server may be updating, and a call may be under way."""
        order = self.manager.next_order(SERVER, str(self.births[SERVER]), 0.0)
        if isinstance(order, UpdateOrder) and self.manager.begin_update(order, 0.0):
            self.echoes.append(order)
        if self.phase == "asking":
            self.echoes.append(ClaimRequest(self.version + 1, self.asked, self._incarnation()))
        if self.phase == "published":
            self.echoes.append(self._request(trained=[sample.ticket_id for sample in self.batch]))
        self.asked, self.batch = [], []
        self._new_intake()
        self.phase = "down"

    def _master_starts(self) -> None:
        """Start from the checkpoint: every ticket that is not in it must be rolled out again."""
        self.trainer_incarnation += 1
        self._new_intake()
        self.version = max(self.checkpoint, 0)
        self.weights = self.weights[: self.version]
        request = RollBackRequest(self.checkpoint, self.checkpoint, self._incarnation())
        self.manager.roll_back(request, 0.0)
        self.syncs = True
        before = len(self.manager.outbox)
        self.manager.roll_back(request, 0.0)
        assert len(self.manager.outbox) == before, "a repeated /roll_back changed something"
        if self.bounds.script:  # a new script asks how far the one before it came
            assert self.manager.submit(SubmitRequest(self._incarnation()), 0.0).total == len(self.sequence)
        if self.published is not None:  # seen late, or by a manager that has just started
            assert not self.manager.servers.publish(self.published), "a publication of the side before"
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


@dataclass
class World(WithMaster):
    """A method for each action, by its name."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for action in ("manager_restarts", "master_starts", "publishes_again", "server_updates", "checkpoints"):
            self.apply(Act(action))

    # -- what can happen -----------------------------------------------------------------------------------------------

    def enabled(self) -> list[Act]:
        acts = self._workers_act() + self._master_acts()
        order = self.manager.next_order(SERVER, str(self.births[SERVER]), 0.0)
        if isinstance(order, UpdateOrder):
            acts.append(Act("server_updates"))
        acts += [Act("stray_arrives", (number,)) for number in range(len(self.strays))]
        acts += [Act("echo", (number,)) for number in range(len(self.echoes))]
        return acts + [act for act in self._faults() if self._may(act.name)]

    def _may(self, fault: str) -> bool:
        return self.faults > 0 and (not self.bounds.kinds or fault in self.bounds.kinds)

    def _may_submit(self) -> bool:
        ahead = len(self.sequence) < self.bounds.prompts
        return self.bounds.script and (ahead or self.manager.refusal() == "nothing_submitted")

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
        acts = [Act("tell_drops")] if self.intake.departures else []
        if self.phase == "asking":
            acts.append(Act("claim"))
        elif self.phase == "training":
            acts.append(Act("publish"))
        elif self.phase == "published":
            acts.append(Act("tell_trained"))
        elif self.phase == "down":
            acts.append(Act("master_starts"))
        elif self.phase == "rolled back":
            acts.append(Act("publishes_again"))
        elif self.phase == "idle":
            ends = ("master_crashes", "machine_fails", "manager_loses_its_tail")
            if self.checkpoint < self.version and any(map(self._may, ends)):
                acts.append(Act("checkpoints"))
            if "finished" in self.truth.values():
                acts.append(Act("tells_what_it_holds"))
            if self._may_submit():
                acts.append(Act("submits"))
            if self.intake.buffer.ready_groups >= self.bounds.batch or self._has_too_old():
                acts.append(Act("take"))
            elif self._can_never_fill():
                acts.append(Act("give_up"))
        return acts

    def _faults(self) -> list[Act]:
        acts = [Act("manager_restarts", (), 1), Act("server_dies", (), 1)]
        for kept in range(self.synced, len(self.journal) + 1):
            acts += [Act("machine_fails", (kept,), 1), Act("manager_loses_its_tail", (kept,), 1)]
        for key, attempt in self.attempts.items():
            names = IN_GENERATION if not attempt.pushed else ["finishes_twice"]
            acts += [Act(name, key, 1) for name in names]
            if self.manager.ledger.running_attempt(*key):
                acts.append(Act("lapses_though_alive", (key[0],), 1))
        for worker in self._workers():
            if any(attempt.worker == worker for attempt in self.attempts.values()):
                acts += [Act("dies", (worker,), 1), Act("dies_in_push", (worker,), 1)]
            if worker not in self.unanswered and self.manager.refusal() is None:
                acts.append(Act("reply_lost", (worker,), 1))
        if self.phase == "idle" and self._may_submit():
            acts += [Act("submits_twice", (), 1), Act("crashes_in_submit", (), 1)]
        if self.phase == "asking":
            acts.append(Act("claims_twice", (), 1))
        if self.phase == "published":
            acts.append(Act("told_twice", (), 1))
        if self.phase in ("idle", "asking", "training", "published"):
            acts.append(Act("master_crashes", (), 1))
        return acts

    def apply(self, action: Act) -> None:
        """Raises AssertionError when the real parts answer what the model says they must not."""
        before = COPIER.dump(self.manager.ledger)
        self.faults -= action.cost
        getattr(self, "_" + action.name)(*action.args)
        if action.name in ("machine_fails", "manager_loses_its_tail"):
            before = COPIER.dump(self._replayed())
        self._commit(before)
        self._deliver_what_cannot_matter()

    def _deliver_what_cannot_matter(self) -> None:
        """Calls for tickets that have ended change nothing, now or ever: their order does not matter."""
        ended = {ticket_id for ticket_id, state in self.truth.items() if state in ("trained", "dropped")}
        late = [key for key, a in self.attempts.items() if a.pushed and key[0] in ended]
        calls = [FinishRequest(*key, self.attempts.pop(key).worker, "accepted") for key in late]
        for call in [*calls, *self.echoes]:
            if isinstance(call, FinishRequest) and call.ticket_id in ended:
                self._finish_call(call)
                self.echoes = [echo for echo in self.echoes if echo is not call]
        assert not self.manager.outbox, "a ticket that has ended can be finished"

    # -- servers and the manager ---------------------------------------------------------------------------------------

    _manager_restarts = WorldState._start_manager

    def _machine_fails(self, kept: int) -> None:
        """With all that ran on it; of the journal only ``kept`` records are on the disk."""
        self.births = {name: born + 1 for name, born in self.births.items()}
        self.attempts, self.unanswered, self.strays, self.echoes = {}, {}, [], []
        self._master_crashes()
        self.echoes, self.published = [], None
        self._loses_records(kept)

    def _manager_loses_its_tail(self, kept: int) -> None:
        """Its machine fails, and no other. Of an attempt whose grant it has forgotten the group may arrive, or not."""
        self._loses_records(kept)
        known = self.manager.ledger.open
        for key, attempt in list(self.attempts.items()):
            ticket = known.get(key[0])
            if self.truth.get(key[0]) in ("trained", "dropped") or (ticket and ticket.attempt >= key[1]):
                continue
            del self.attempts[key]
            if not attempt.pushed:
                self.strays.append(self._group(attempt))

    def _loses_records(self, kept: int) -> None:
        """The model continues with the records that are left; the checks count the prompts."""
        self.journal = self.journal[:kept]
        self._start_manager()
        ledger, known = self.manager.ledger, dict[str, Truth]()
        for ticket_id in self.truth:
            if ticket := ledger.open.get(ticket_id):
                known[ticket_id] = ticket.state
            elif end := ledger.ended(ticket_id):
                known[ticket_id] = "trained" if end.startswith("trained") else "dropped"
        self.truth = known

    def _server_updates(self) -> None:
        servers = self.manager.servers
        order = self.manager.next_order(SERVER, str(self.births[SERVER]), 0.0)
        assert isinstance(order, UpdateOrder) and order.target == self.published
        assert self.manager.begin_update(order, 0.0) and servers.succeeded(order, 0.0, {})

    def _server_dies(self) -> None:
        self.births[SERVER] += 1
        self._observe_server()
        assert self.manager.refusal() in ("no_server", "paused")
