"""Random histories of arrivals, finishes, deaths, updates, restarts and roll-backs against a model of the rules.

In both roll-out modes, with updates in the middle of answers and with draining, and with every routing strategy.
"""

import dataclasses
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, initialize, multiple, rule

from realsys.manager.decisions import ARRIVAL_GRACE_S, ManagerState
from realsys.manager.ledger.events import EvalsResumed, Event
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
    Refusal,
    ScheduleReply,
    ScheduleRequest,
    TrainedRequest,
)
from realsys.manager.routing.placement import STRATEGIES
from realsys.types import Ticket
from tests.support.ledger.manager_model import (
    ATTEMPTS,
    CALLS,
    ETA,
    OUTCOMES,
    PACES,
    SETTINGS,
    WORKERS,
    B,
    Known,
    SurroundingsMachine,
)


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
