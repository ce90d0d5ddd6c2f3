"""Evaluations during training: tickets of kind "eval", outside the staleness quota, each completion sampled once.

    EvalStarted ──> waiting ──grant──> running ──finish──> EvalAnswered
                       ^                  │
                       └── failed, lost ──┘          EvalLost: all of them wait again, or the evaluation has ended

one-version   All completions of an evaluation are of one version, at or after the one that was published when it was
              requested. ``pinned`` is that version, from the first grant on, or from the moment at which a server
              keeps it (``realsys.manager.routing.pinned_servers``). A completion of another version counts as failed.

When the trainer rolls back, unfinished evaluations and those of undone versions are discarded; the trainer starts them
anew. An unfinished evaluation of a user begins again with a version that the trainer publishes next; a finished one
stays. A completion whose attempts all failed has no verdict, which is not a wrong one
(``error-is-not-data``). An evaluation with more failures than it may have is incomplete: it has no accuracy.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from realsys.errors import LedgerError
from realsys.manager.ledger.events import (
    EvalAnswered,
    EvalEvent,
    EvalHeld,
    EvalLost,
    EvalsResumed,
    EvalStarted,
    EvaluationState,
    Pinned,
    RolledBack,
    Snapshot,
)
from realsys.manager.messages import Answer, EvaluationReply, NotFound
from realsys.types import PublishedVersion, Ticket, sampling_seed

MOST_RESTARTS = 2  # an evaluation whose version is lost more often has ended
MAX_CAUSE = 300  # characters of the cause of a failure


@dataclass(slots=True)
class RunningProblem:
    """A granted ticket of an evaluation: one completion of one problem."""

    ticket: Ticket
    evaluation: Evaluation
    worker: str
    incarnation: str
    news_at: float

    @property
    def ticket_id(self) -> str:
        return self.ticket.ticket_id

    @property
    def unit(self) -> int:
        return self.evaluation.unit(self.ticket.prompt_index, self.ticket.sample)


class Evaluations:
    """All evaluations of a trial, oldest first, and their running tickets. The journal's events restore the progress.

    ``running`` by ticket id is not journalled: after a restart the completions wait again, with other attempt numbers.
    ``pins``: versions that the trainer has pinned, by name. Nothing but another pin changes them, no roll-back either.
    """

    def __init__(self, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._discarded: dict[str, int] = {}  # eval_id -> blocks of attempt numbers before a roll-back discarded it
        self.by_id: dict[str, Evaluation] = {}
        self.running: dict[str, RunningProblem] = {}
        self.pins: dict[str, PublishedVersion] = {}

    def find(self, eval_id: str) -> Evaluation:
        """Return an evaluation. Raises NotFound if no trainer started it."""
        if eval_id not in self.by_id:
            raise NotFound(f"no evaluation {eval_id!r} was asked for")
        return self.by_id[eval_id]

    def ever_started(self) -> list[str]:
        """Return the ids of all evaluations of trainers, with those that a roll-back discarded."""
        of_trainers = {name for name, evaluation in self.by_id.items() if not evaluation.started.by_user}
        return sorted(of_trainers | self._discarded.keys())

    def unfinished(self) -> list[Evaluation]:
        return [evaluation for evaluation in self.by_id.values() if not evaluation.is_finished]

    def running_of(self, evaluation: Evaluation) -> Iterator[RunningProblem]:
        return (problem for problem in self.running.values() if problem.evaluation is evaluation)

    def apply(self, event: EvalEvent | RolledBack | Snapshot) -> None:
        """Apply one event of the journal. Raises LedgerError for an event of an unknown evaluation."""
        match event:
            case EvalStarted():
                first = ATTEMPTS * self._discarded.get(event.eval_id, 0)
                self.by_id[event.eval_id] = restored(EvaluationState(event, first_attempt=first))
            case EvalAnswered():
                self._apply_answered(event)
            case EvalHeld():
                evaluation = self._known(event)
                evaluation.saved.held, evaluation.saved.held_since = event.held, event.time
                evaluation.pinned = event.held.version
            case EvalLost():
                self._apply_lost(event)
            case RolledBack():
                for eval_id, evaluation in list(self.by_id.items()):
                    if evaluation.started.by_user:
                        self._roll_back(evaluation, event.version)
                    elif not evaluation.is_finished or evaluation.newest_version > event.version:
                        del self.by_id[eval_id]
                        self._discarded[eval_id] = next_block(evaluation.saved) // ATTEMPTS
                self.running.clear()
            case EvalsResumed():
                for evaluation in self.unfinished():
                    evaluation.saved.first_attempt = next_block(evaluation.saved)
            case Pinned():
                self.pins.pop(event.name, None)
                if event.held is not None:
                    self.pins[event.name] = event.held
            case Snapshot():
                self.pins = dict(event.pins)
                self._discarded = dict(event.forgotten)
                self.by_id = {state.started.eval_id: restored(copied(state)) for state in event.evaluations}

    def resume(self, now: float) -> EvalsResumed | None:
        """Begin after a replay of the journal. Returns None if no evaluation is unfinished."""
        if not self.unfinished():
            return None
        event = EvalsResumed(now)
        self.apply(event)
        return event

    def snapshot(self) -> tuple[list[EvaluationState], dict[str, int]]:
        """Return copies for a snapshot of the journal: the evaluations, and the blocks of the discarded ones."""
        return [copied(evaluation.saved) for evaluation in self.by_id.values()], dict(self._discarded)

    def grant(
        self, worker: str, incarnation: str, playable: Callable[[Evaluation], int | None], now: float
    ) -> Ticket | None:
        """Grant the next completion of the first evaluation that has one.

        ``playable`` returns the version that servers serve for an evaluation now; None: it must wait.
        """
        for evaluation in self.by_id.values():
            if evaluation.waiting and (version := playable(evaluation)) is not None:
                evaluation.pinned = version
                unit, started = evaluation.waiting.popleft(), evaluation.started
                attempt = evaluation.attempts.get(unit, evaluation.saved.first_attempt - 1) + 1
                evaluation.attempts[unit] = attempt
                index, sample = divmod(unit, started.samples)
                # The first completion of a problem has the seed that it has with one sample.
                seed = sampling_seed(started.seed, index, *([sample] if sample else []))
                ticket = Ticket(
                    _ticket_id(started.eval_id, unit),
                    attempt,
                    index,
                    "eval",
                    started.split,
                    1,
                    seed,
                    version,
                    eval_id=started.eval_id,
                    set=started.set,
                    sample=sample,
                )
                self.running[ticket.ticket_id] = RunningProblem(ticket, evaluation, worker, incarnation, now)
                return ticket
        return None

    def running_attempt(self, ticket_id: str, attempt: int) -> RunningProblem | None:
        """Return a running attempt, None if it is over or not of an evaluation."""
        problem = self.running.get(ticket_id)
        return problem if problem is not None and problem.ticket.attempt == attempt else None

    def finish(self, problem: RunningProblem, answer: Answer | None, cause: str = "") -> EvalAnswered | None:
        """End a running attempt. Returns None if another attempt follows.

        The attempt failed if ``answer`` is None, and if a token is of another version (``one-version``).
        """
        evaluation, ticket = problem.evaluation, problem.ticket
        eval_id, index, unit = evaluation.started.eval_id, ticket.prompt_index, problem.unit
        which = ticket.sample, ticket.attempt
        if answer is None or not answer.version_min == answer.version_max == evaluation.pinned:
            failures = evaluation.failures[unit] = evaluation.failures.get(unit, 0) + 1
            evaluation.cause = cause[:MAX_CAUSE]
            if failures < self._max_attempts:
                self._reissue(problem)
                return None
            event = EvalAnswered(eval_id, index, True, False, 0, -1, -1, {}, 0.0, *which)
        else:
            at = answer.version_min
            event = EvalAnswered(
                eval_id, index, False, answer.correct, answer.length, at, at, answer.metrics, answer.reward, *which
            )
        self.apply(event)
        return event

    def lose_version(self, evaluation: Evaluation, reason: str, again: bool, now: float) -> EvalLost:
        """Begin an unfinished evaluation anew with another version, or end it incomplete."""
        again = again and evaluation.saved.restarts < MOST_RESTARTS
        event = EvalLost(evaluation.started.eval_id, reason, again, now)
        self.apply(event)
        return event

    def hold(self, evaluation: Evaluation, held: PublishedVersion, now: float) -> EvalHeld:
        """Let servers keep the version of an evaluation, which delays their updates."""
        event = EvalHeld(evaluation.started.eval_id, held, now)
        self.apply(event)
        return event

    def lose(self, is_lost: Callable[[RunningProblem], bool]) -> list[str]:
        """Let the running completions for which ``is_lost`` holds wait again. Returns their tickets."""
        lost = [problem for problem in self.running.values() if is_lost(problem)]
        for problem in lost:
            self._reissue(problem)
        return [problem.ticket_id for problem in lost]

    def _reissue(self, problem: RunningProblem) -> None:
        del self.running[problem.ticket_id]
        problem.evaluation.waiting.appendleft(problem.unit)

    def _apply_answered(self, event: EvalAnswered) -> None:
        evaluation = self._known(event)
        unit = evaluation.unit(event.prompt_index, event.sample)
        self.running.pop(_ticket_id(event.eval_id, unit), None)
        if unit in evaluation.waiting:  # only in a replay: grants are not journalled
            evaluation.waiting.remove(unit)
        evaluation.count(event)

    def _apply_lost(self, event: EvalLost) -> None:
        evaluation = self._known(event)
        for problem in list(self.running_of(evaluation)):
            del self.running[problem.ticket_id]
        saved = evaluation.saved
        if not event.again:
            saved.lost = event.reason
            evaluation.waiting.clear()
            return
        self._begin_again(saved, saved.started.version)

    def _roll_back(self, evaluation: Evaluation, version: int) -> None:
        """Begin an unfinished evaluation of a user again, with ``version`` or a newer one."""
        saved = evaluation.saved
        if evaluation.is_finished:
            return
        if saved.restarts < MOST_RESTARTS:
            self._begin_again(saved, max(0, version))
        else:
            saved.lost = f"the trainer went back to version {version}, and it had begun {1 + MOST_RESTARTS} times"
            evaluation.waiting.clear()

    def _begin_again(self, saved: EvaluationState, version: int) -> None:
        started = msgspec.structs.replace(saved.started, version=version)
        again = EvaluationState(started, first_attempt=next_block(saved), restarts=saved.restarts + 1)
        self.by_id[started.eval_id] = restored(again)

    def _known(self, event: EvalAnswered | EvalHeld | EvalLost) -> Evaluation:
        if event.eval_id not in self.by_id:
            raise LedgerError(f"ledger: {event}: unknown evaluation")
        return self.by_id[event.eval_id]


def _ticket_id(eval_id: str, unit: int) -> str:
    return f"eval-{eval_id}-{unit:06d}"


# ---- progress of one evaluation: which completions wait, and what the others add up to


#: Size of a block of attempt numbers. An evaluation that begins anew, is started again or meets another manager takes
#: the next block, so attempt numbers are never reused.
ATTEMPTS = 1 << 16


@dataclass(slots=True)
class Evaluation:
    """Progress of one evaluation. ``saved`` is the part that a snapshot of the journal keeps."""

    saved: EvaluationState
    waiting: deque[int] = field(default_factory=deque)  # units
    attempts: dict[int, int] = field(default_factory=dict)  # unit -> attempts granted so far
    failures: dict[int, int] = field(default_factory=dict)  # unit -> failed attempts
    pinned: int | None = None  # version of all its completions
    cause: str = ""  # error of the last failed problem; not in the journal

    @property
    def started(self) -> EvalStarted:
        return self.saved.started

    @property
    def units(self) -> int:
        """Number of its completions."""
        return self.started.total * self.started.samples

    @property
    def is_finished(self) -> bool:
        """True when every completion has its end, or when its version was lost."""
        return bool(self.saved.lost) or len(self.saved.done) == self.units

    @property
    def newest_version(self) -> int:
        """The version that its completions are of; without any, the one at which it was requested."""
        return max(self.started.version, self.saved.version_max)

    def unit(self, prompt_index: int, sample: int) -> int:
        return prompt_index * self.started.samples + sample

    def incomplete(self) -> str:
        """Return why its numbers must not be shown, "" if they may."""
        saved, failed = self.saved, self.saved.failed
        if saved.lost:
            return saved.lost
        if not self.is_finished:
            return f"{len(saved.done)} of {self.units} have ended"
        if failed > self.started.max_failed or failed == self.units:
            return f"{failed} of {self.units} failed" + (f", the last one: {self.cause}" if self.cause else "")
        if saved.version_min != saved.version_max:  # only in journals of older versions
            return f"versions {saved.version_min} to {saved.version_max} are mixed"
        return ""

    def reply(self) -> EvaluationReply:
        saved, incomplete = self.saved, self.incomplete()
        completed = len(saved.done) - saved.failed
        tallies = self.tallies()
        shares = [right / judged for judged, right in tallies if judged]
        is_shown = not incomplete
        metrics = {name: total / count for name, (total, count) in sorted(saved.metrics.items())}
        return EvaluationReply(
            done=completed,
            total=self.units,
            failed=saved.failed,
            accuracy=sum(shares) / len(shares) if is_shown and shares else None,
            reward_mean=saved.reward / completed if is_shown else None,
            length_mean=saved.length / completed if completed else 0.0,
            version_min=saved.version_min,
            version_max=saved.version_max,
            metrics=metrics if is_shown else {},
            ended=self.is_finished,
            incomplete=incomplete,
            problems=self.started.total,
            samples=self.started.samples,
            set=self.started.set,
            restarts=saved.restarts,
            tallies=[(*tally, count) for tally, count in sorted(Counter(tallies).items())] if self.is_finished else [],
            accepted=self._accepted() if self.is_finished else [],
        )

    def tallies(self) -> list[tuple[int, int]]:
        """Return (judged, right) completions of each problem that has a completion."""
        saved = self.saved
        if saved.tallies or not saved.done:
            return list(saved.tallies.values())
        # A snapshot of an older version has sums; then each problem has one completion.
        judged = len(saved.done) - saved.failed - saved.unjudged
        return [(1, 1)] * saved.correct + [(1, 0)] * (judged - saved.correct) + [(0, 0)] * saved.unjudged

    def _accepted(self) -> list[tuple[int, int, int]]:
        samples = self.started.samples
        return [(*divmod(unit, samples), attempt) for unit, attempt in sorted(self.saved.accepted.items())]

    def count(self, event: EvalAnswered) -> None:
        saved, unit = self.saved, self.unit(event.prompt_index, event.sample)
        saved.done.append(unit)
        if event.failed:
            saved.failed += 1
            return
        judged, right = saved.tallies.get(event.prompt_index, (0, 0))
        saved.tallies[event.prompt_index] = judged + (event.correct is not None), right + (event.correct is True)
        saved.accepted[unit] = event.attempt
        saved.correct += event.correct is True
        saved.unjudged += event.correct is None
        saved.length += event.length
        saved.reward += event.reward
        for name, value in event.metrics.items():
            total, number = saved.metrics.get(name, (0.0, 0))
            saved.metrics[name] = (total + value, number + 1)
        oldest = saved.version_min
        saved.version_min = event.version_min if oldest < 0 else min(oldest, event.version_min)
        saved.version_max = max(saved.version_max, event.version_max)
        self.pinned = saved.version_min if self.pinned is None else self.pinned


def next_block(saved: EvaluationState) -> int:
    """Return the first attempt number of the next block."""
    return (saved.first_attempt // ATTEMPTS + 1) * ATTEMPTS


def restored(saved: EvaluationState) -> Evaluation:
    """Return an evaluation of which nothing runs."""
    pinned = saved.held.version if saved.held is not None else saved.version_min
    evaluation = Evaluation(saved, pinned=pinned if pinned >= 0 else None)
    if not saved.lost:
        done = set(saved.done)
        evaluation.waiting.extend(unit for unit in range(evaluation.units) if unit not in done)
    return evaluation


def copied(saved: EvaluationState) -> EvaluationState:
    return msgspec.structs.replace(
        saved,
        done=list(saved.done),
        metrics=dict(saved.metrics),
        tallies=dict(saved.tallies),
        accepted=dict(saved.accepted),
    )
