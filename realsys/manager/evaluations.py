"""Evaluations beside training: each problem answered once, outside the staleness quota.

An evaluation asked for at version v is answered only by servers at v or newer, so that "after the last step" means it.
A roll-back of training forgets the unfinished ones and those of versions that it undoes: they are asked for again.
A failed attempt is repeated; a problem whose attempts all failed has no answer, which is not the same as a wrong one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from realsys.errors import LedgerError
from realsys.manager.ledger.events import EvalAnswered, EvalEvent, EvalStarted, EvaluationState, RolledBack, Snapshot
from realsys.manager.ledger.order import sampling_seed
from realsys.manager.messages import Answer, EvaluationReply
from realsys.types import Ticket

PREFIX = "eval-"
ATTEMPTS = 1 << 16  # of one problem before its evaluation is forgotten and asked for again: numbers never come twice


@dataclass(slots=True)
class RunningProblem:
    """A granted eval ticket."""

    ticket_id: str
    attempt: int
    worker: str
    incarnation: str
    news_at: float


@dataclass(slots=True)
class Evaluation:
    """Progress of one evaluation."""

    started: EvalStarted
    waiting: deque[int] = field(default_factory=deque)  # prompt indices
    running: dict[int, RunningProblem] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)  # attempts granted so far
    failures: dict[int, int] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    failed: int = 0
    correct: int = 0
    unjudged: int = 0  # answers to a problem that has no right or wrong
    length: int = 0
    reward: float = 0.0  # sum over the answers
    version_min: int = -1
    version_max: int = -1
    first_attempt: int = 0
    metrics: dict[str, tuple[float, int]] = field(default_factory=dict)  # name -> (sum, answers that have it)

    @property
    def finished(self) -> bool:
        return len(self.done) == self.started.total

    def reply(self) -> EvaluationReply:
        answered = len(self.done) - self.failed
        judged = answered - self.unjudged
        return EvaluationReply(
            done=answered,
            total=self.started.total,
            failed=self.failed,
            accuracy=self.correct / judged if judged else None,
            reward_mean=self.reward / answered if answered else None,
            length_mean=self.length / answered if answered else 0.0,
            version_min=self.version_min,
            version_max=self.version_max,
            metrics={name: total / count for name, (total, count) in sorted(self.metrics.items())},
        )


def eval_ticket_id(eval_id: str, prompt_index: int) -> str:
    return f"{PREFIX}{eval_id}-{prompt_index:06d}"


def parse_eval_ticket(ticket_id: str) -> tuple[str, int] | None:
    """(eval_id, prompt index) of an eval ticket, None for any other."""
    head, _, tail = ticket_id.rpartition("-")
    if not head.startswith(PREFIX) or not (tail.isascii() and tail.isdigit()):
        return None
    return head[len(PREFIX) :], int(tail)


class Evaluations:
    """All evaluations of a trial, in the order they were asked for. Progress survives a restart through its events."""

    def __init__(self, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._all: dict[str, Evaluation] = {}
        self._forgotten: dict[str, int] = {}  # eval_id -> how often

    def get(self, eval_id: str) -> Evaluation | None:
        return self._all.get(eval_id)

    def all(self) -> dict[str, Evaluation]:
        return self._all

    def asked(self) -> list[str]:
        """Ids of all that were ever asked for, those that a roll-back has forgotten among them."""
        return sorted(self._all.keys() | self._forgotten.keys())

    def apply(self, event: EvalEvent | RolledBack | Snapshot) -> None:
        """One event of the journal. Raises LedgerError for an answer to an evaluation that was never asked for."""
        match event:
            case EvalStarted():
                first = ATTEMPTS * self._forgotten.get(event.eval_id, 0)
                self._all[event.eval_id] = Evaluation(event, deque(range(event.total)), first_attempt=first)
            case EvalAnswered():
                self._apply_answered(event)
            case RolledBack():
                for eval_id, evaluation in list(self._all.items()):
                    if not evaluation.finished or evaluation.started.version > event.version:
                        del self._all[eval_id]
                        self._forgotten[eval_id] = self._forgotten.get(eval_id, 0) + 1
            case Snapshot():
                self._forgotten = dict(event.forgotten)
                self._all = {state.started.eval_id: _restored(state) for state in event.evaluations}

    def snapshot(self) -> tuple[list[EvaluationState], dict[str, int]]:
        """What a snapshot of the journal keeps: the evaluations, and how often each was forgotten."""
        states = [
            EvaluationState(
                e.started,
                sorted(e.done),
                e.failed,
                e.correct,
                e.length,
                e.version_min,
                e.version_max,
                e.first_attempt,
                dict(e.metrics),
                e.unjudged,
                e.reward,
            )
            for e in self._all.values()
        ]
        return states, dict(self._forgotten)

    def _apply_answered(self, event: EvalAnswered) -> None:
        evaluation = self._all.get(event.eval_id)
        if evaluation is None:
            raise LedgerError(f"ledger: {event}: unknown evaluation")
        evaluation.running.pop(event.prompt_index, None)
        if event.prompt_index in evaluation.waiting:  # only in a replay: grants are not journalled
            evaluation.waiting.remove(event.prompt_index)
        evaluation.done.add(event.prompt_index)
        if event.failed:
            evaluation.failed += 1
            return
        evaluation.correct += event.correct is True
        evaluation.unjudged += event.correct is None
        evaluation.length += event.length
        evaluation.reward += event.reward
        for name, value in event.metrics.items():
            total, count = evaluation.metrics.get(name, (0.0, 0))
            evaluation.metrics[name] = (total + value, count + 1)
        low, high = evaluation.version_min, evaluation.version_max
        evaluation.version_min = event.version_min if low < 0 else min(low, event.version_min)
        evaluation.version_max = max(high, event.version_max)

    def start(self, eval_id: str, split: str, total: int, seed: int, version: int, now: float) -> EvalStarted | None:
        """None if this id has been asked for before."""
        if eval_id in self._all:
            return None
        event = EvalStarted(eval_id, split, total, seed, version, now)
        self.apply(event)
        return event

    def grant(
        self, worker: str, incarnation: str, servable: Callable[[int], bool], version: int, now: float
    ) -> Ticket | None:
        """The next problem of the first evaluation that has one and whose version a server can serve."""
        for eval_id, evaluation in self._all.items():
            if evaluation.waiting and servable(evaluation.started.version):
                index = evaluation.waiting.popleft()
                attempt = evaluation.attempts.get(index, evaluation.first_attempt - 1) + 1
                evaluation.attempts[index] = attempt
                name = eval_ticket_id(eval_id, index)
                evaluation.running[index] = RunningProblem(name, attempt, worker, incarnation, now)
                seed = sampling_seed(evaluation.started.seed, index)
                return Ticket(name, attempt, index, "eval", evaluation.started.split, 1, seed, version)
        return None

    def running(self, ticket_id: str, attempt: int) -> tuple[Evaluation, int] | None:
        """The evaluation and prompt index of a running attempt."""
        key = parse_eval_ticket(ticket_id)
        evaluation = self._all.get(key[0]) if key else None
        if key is None or evaluation is None:
            return None
        problem = evaluation.running.get(key[1])
        return (evaluation, key[1]) if problem is not None and problem.attempt == attempt else None

    def touch(self, ticket_id: str, attempt: int, now: float) -> int | None:
        """News of a running attempt; returns the version its evaluation asks for, None if it is not running."""
        found = self.running(ticket_id, attempt)
        if found is None:
            return None
        evaluation, index = found
        evaluation.running[index].news_at = now
        return evaluation.started.version

    def finish(self, ticket_id: str, attempt: int, answer: Answer | None) -> tuple[bool, bool, EvalAnswered | None]:
        """(known, retry, event). No answer means the attempt failed."""
        found = self.running(ticket_id, attempt)
        if found is None:
            return False, False, None
        evaluation, index = found
        eval_id = evaluation.started.eval_id
        if answer is None:
            failures = evaluation.failures[index] = evaluation.failures.get(index, 0) + 1
            if failures < self._max_attempts:
                self._again(evaluation, index)
                return True, True, None
            event = EvalAnswered(eval_id, index, True, False, 0, -1, -1)
        else:
            event = EvalAnswered(
                eval_id,
                index,
                False,
                answer.correct,
                answer.length,
                answer.version_min,
                answer.version_max,
                answer.metrics,
                answer.reward,
            )
        self.apply(event)
        return True, False, event

    def lose(self, lost: Callable[[RunningProblem], bool]) -> list[str]:
        """Give the running problems for which ``lost`` holds back to the queue. Returns their tickets."""
        tickets = []
        for evaluation in self._all.values():
            for index, problem in list(evaluation.running.items()):
                if lost(problem):
                    tickets.append(problem.ticket_id)
                    self._again(evaluation, index)
        return tickets

    @staticmethod
    def _again(evaluation: Evaluation, index: int) -> None:
        del evaluation.running[index]
        evaluation.waiting.appendleft(index)


def _restored(state: EvaluationState) -> Evaluation:
    done = set(state.done)
    return Evaluation(
        state.started,
        deque(index for index in range(state.started.total) if index not in done),
        done=done,
        failed=state.failed,
        correct=state.correct,
        length=state.length,
        version_min=state.version_min,
        version_max=state.version_max,
        first_attempt=state.first_attempt,
        metrics=dict(state.metrics),
        unjudged=state.unjudged,
        reward=state.reward,
    )
