"""Evaluations during training: tickets of kind "eval", outside the staleness quota, each problem completed once.

    EvalStarted ──> waiting ──grant──> running ──finish──> EvalAnswered
                       ^                  │
                       └── failed, lost ──┘

Only servers at the version of the evaluation or newer take its problems, so that "after the last step" means it. When
the trainer rolls back, unfinished evaluations and those of undone versions are discarded; the trainer starts them anew.
A problem whose attempts all failed has no completion, which is not the same as a wrong one (``error-is-not-data``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from realsys.errors import LedgerError
from realsys.manager.ledger.events import EvalAnswered, EvalEvent, EvalStarted, EvaluationState, RolledBack, Snapshot
from realsys.manager.ledger.order import sampling_seed
from realsys.manager.messages import Answer, EvaluationReply
from realsys.manager.refusals import NotFound
from realsys.types import Ticket

#: Attempts of one problem before its evaluation is discarded and started again: attempt numbers are never reused.
ATTEMPTS = 1 << 16


@dataclass(slots=True)
class Evaluation:
    """Progress of one evaluation. ``saved`` is the part that a snapshot of the journal keeps."""

    saved: EvaluationState
    waiting: deque[int] = field(default_factory=deque)  # prompt indices
    attempts: dict[int, int] = field(default_factory=dict)  # prompt index -> attempts granted so far
    failures: dict[int, int] = field(default_factory=dict)  # prompt index -> failed attempts

    @property
    def started(self) -> EvalStarted:
        return self.saved.started

    @property
    def is_finished(self) -> bool:
        """True when every problem has its end."""
        return len(self.saved.done) == self.started.total

    def reply(self) -> EvaluationReply:
        saved = self.saved
        completed = len(saved.done) - saved.failed
        judged = completed - saved.unjudged
        return EvaluationReply(
            done=completed,
            total=self.started.total,
            failed=saved.failed,
            accuracy=saved.correct / judged if judged else None,
            reward_mean=saved.reward / completed if completed else None,
            length_mean=saved.length / completed if completed else 0.0,
            version_min=saved.version_min,
            version_max=saved.version_max,
            metrics={name: total / count for name, (total, count) in sorted(saved.metrics.items())},
        )

    def count(self, event: EvalAnswered) -> None:
        saved = self.saved
        saved.done.append(event.prompt_index)
        if event.failed:
            saved.failed += 1
            return
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


@dataclass(slots=True)
class RunningProblem:
    """A granted ticket of an evaluation."""

    ticket: Ticket
    evaluation: Evaluation
    worker: str
    incarnation: str
    news_at: float

    @property
    def ticket_id(self) -> str:
        return self.ticket.ticket_id


class Evaluations:
    """All evaluations of a trial, oldest first, and their running tickets. The journal's events restore the progress.

    ``running`` by ticket id is not journalled: after a restart the problems wait again.
    """

    def __init__(self, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._discarded: dict[str, int] = {}  # eval_id -> how often a roll-back discarded it
        self.by_id: dict[str, Evaluation] = {}
        self.running: dict[str, RunningProblem] = {}

    def find(self, eval_id: str) -> Evaluation:
        """Return an evaluation. Raises NotFound if no trainer started it."""
        if eval_id not in self.by_id:
            raise NotFound(f"no evaluation {eval_id!r} was asked for")
        return self.by_id[eval_id]

    def ever_started(self) -> list[str]:
        """Return the ids of all evaluations, with those that a roll-back discarded."""
        return sorted(self.by_id.keys() | self._discarded.keys())

    def apply(self, event: EvalEvent | RolledBack | Snapshot) -> None:
        """Apply one event of the journal. Raises LedgerError for a completion of an unknown evaluation."""
        match event:
            case EvalStarted():
                first = ATTEMPTS * self._discarded.get(event.eval_id, 0)
                self.by_id[event.eval_id] = _restored(EvaluationState(event, first_attempt=first))
            case EvalAnswered():
                self._apply_answered(event)
            case RolledBack():
                for eval_id, evaluation in list(self.by_id.items()):
                    if not evaluation.is_finished or evaluation.started.version > event.version:
                        del self.by_id[eval_id]
                        self._discarded[eval_id] = self._discarded.get(eval_id, 0) + 1
                self.running.clear()
            case Snapshot():
                self._discarded = dict(event.forgotten)
                self.by_id = {state.started.eval_id: _restored(_copied(state)) for state in event.evaluations}

    def snapshot(self) -> tuple[list[EvaluationState], dict[str, int]]:
        """Return copies for a snapshot of the journal: the evaluations, and how often each was discarded."""
        return [_copied(evaluation.saved) for evaluation in self.by_id.values()], dict(self._discarded)

    def grant(
        self, worker: str, incarnation: str, servers: Callable[[int], Sequence[object]], version: int, now: float
    ) -> Ticket | None:
        """Grant the next problem of the first evaluation that has one, and ``servers`` for its version."""
        for eval_id, evaluation in self.by_id.items():
            if evaluation.waiting and servers(evaluation.started.version):
                index = evaluation.waiting.popleft()
                attempt = evaluation.attempts.get(index, evaluation.saved.first_attempt - 1) + 1
                evaluation.attempts[index] = attempt
                seed = sampling_seed(evaluation.started.seed, index)
                name = _ticket_id(eval_id, index)
                ticket = Ticket(name, attempt, index, "eval", evaluation.started.split, 1, seed, version)
                self.running[name] = RunningProblem(ticket, evaluation, worker, incarnation, now)
                return ticket
        return None

    def running_attempt(self, ticket_id: str, attempt: int) -> RunningProblem | None:
        """Return a running attempt, None if it is over or not of an evaluation."""
        problem = self.running.get(ticket_id)
        return problem if problem is not None and problem.ticket.attempt == attempt else None

    def finish(self, problem: RunningProblem, answer: Answer | None) -> EvalAnswered | None:
        """End a running attempt. None as ``answer`` means that it failed. Returns None if another attempt follows."""
        evaluation, index = problem.evaluation, problem.ticket.prompt_index
        eval_id = evaluation.started.eval_id
        if answer is None:
            failures = evaluation.failures[index] = evaluation.failures.get(index, 0) + 1
            if failures < self._max_attempts:
                self._reissue(problem)
                return None
            event = EvalAnswered(eval_id, index, True, False, 0, -1, -1)
        else:
            versions = answer.version_min, answer.version_max
            event = EvalAnswered(
                eval_id, index, False, answer.correct, answer.length, *versions, answer.metrics, answer.reward
            )
        self.apply(event)
        return event

    def lose(self, is_lost: Callable[[RunningProblem], bool]) -> list[str]:
        """Let the running problems for which ``is_lost`` holds wait again. Returns their tickets."""
        lost = [problem for problem in self.running.values() if is_lost(problem)]
        for problem in lost:
            self._reissue(problem)
        return [problem.ticket_id for problem in lost]

    def _reissue(self, problem: RunningProblem) -> None:
        del self.running[problem.ticket_id]
        problem.evaluation.waiting.appendleft(problem.ticket.prompt_index)

    def _apply_answered(self, event: EvalAnswered) -> None:
        evaluation = self.by_id.get(event.eval_id)
        if evaluation is None:
            raise LedgerError(f"ledger: {event}: unknown evaluation")
        self.running.pop(_ticket_id(event.eval_id, event.prompt_index), None)
        if event.prompt_index in evaluation.waiting:  # only in a replay: grants are not journalled
            evaluation.waiting.remove(event.prompt_index)
        evaluation.count(event)


def _ticket_id(eval_id: str, prompt_index: int) -> str:
    return f"eval-{eval_id}-{prompt_index:06d}"


def _restored(saved: EvaluationState) -> Evaluation:
    """Return an evaluation of which nothing runs."""
    done = set(saved.done)
    return Evaluation(saved, deque(index for index in range(saved.started.total) if index not in done))


def _copied(saved: EvaluationState) -> EvaluationState:
    return msgspec.structs.replace(saved, done=list(saved.done), metrics=dict(saved.metrics))
