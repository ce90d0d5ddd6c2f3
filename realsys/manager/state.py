"""ManagerState: what the manager decides, one method per call that changes the trial, as one pure state machine.

    call ──> method ──> reply, or Refusal
               └──> events in ``outbox``: the shell appends them to the journal before it answers the call

Invariants that are kept here: ``admission``, ``one-end``, ``claim-before-train``, ``monotonic``, ``fenced-weights`` and
``blame-needs-evidence``. A method raises before it has changed anything.
"""

from __future__ import annotations

from realsys.manager import messages as m
from realsys.manager.ledger.evaluations import RunningProblem
from realsys.manager.ledger.events import MOST_PROBLEMS, EvalStarted
from realsys.manager.ledger.staleness import StepStaleness
from realsys.manager.ledger.tickets import OpenTicket
from realsys.manager.refusals import BadCall, NoServer, NotRunning, OlderTrainer
from realsys.manager.routing.rates import memory_sums
from realsys.manager.routing.rollout_workers import incarnation_of
from realsys.manager.routing.router import Demand, Exactly
from realsys.manager.trial_state import TrialState
from realsys.types import Ticket

RETRY_AFTER_S = 0.5
#: Seconds that a finished group may take to reach the master. Its DP head acknowledged it before the finish was sent,
#: so only the notice from there to the master is under way.
ARRIVAL_GRACE_S = 10.0


class ManagerState(TrialState):
    """The decisions of the GserverManager."""

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

        Raises NotRunning for an attempt that is over, NoServer if no server may take the request now.
        """
        for ticket_id, number, call in request.released:
            if self.running_attempt(ticket_id, number) is not None:  # else the places are those of a later attempt
                self.reservations.release_call(ticket_id, call)
        attempt = self.running_attempt(request.ticket_id, request.attempt)
        if attempt is None:
            raise NotRunning(f"ticket {request.ticket_id} attempt {request.attempt} is not running: cancel it")
        attempt.news_at = now  # renews the lease
        minimum = self._minimum(attempt)
        held = self.reservations.get(request.ticket_id, request.call)
        if request.failed_server is not None and held is not None and held.server == request.failed_server:
            request.avoid = held.server
            self.servers.report(held.server, held.epoch, attempt.worker, request.failure or "a call failed", now)
            self.reservations.release_call(request.ticket_id, request.call)
            held = None
        request.failed_server = None  # a held call is decided again, and must not report the failure twice
        reply = self.router.place(request, minimum, held, attempt.worker, now)
        if reply is None:
            raise NoServer(self.servers.explain())
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
        )

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
        return m.RollBackReply(self.ledger.reissued, self.evaluations.ever_started())

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
