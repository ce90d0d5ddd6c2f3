"""Every state that the small trial of ``ledger_world`` can reach with an evaluation during training: it ends once."""

import os
from dataclasses import dataclass, field

import pytest

from realsys.manager.decisions import ManagerState
from realsys.manager.ledger.events import RolledBack
from realsys.manager.ledger.pinned_evaluations import Evaluations
from realsys.manager.messages import AllocateRequest, Answer, EvaluateRequest, FinishRequest
from realsys.types import Ticket
from tests.support.ledger.fingerprints import KEY, evaluations_key
from tests.support.ledger.ledger_actions import World
from tests.support.ledger.ledger_world import COPIER, LEASE_S, Act, bounds
from tests.support.ledger.state_explorer import Violation, explore

NAME = "step-1"
_IN_PROBLEM = ("problem_fails", "problem_answered_twice")


@dataclass
class Evaluated(World):
    """One problem. The run ends with its answer, or without one when the training side ends otherwise."""

    problems: dict[tuple[str, int], tuple[Ticket, str]] = field(default_factory=dict)  # problems that a worker plays
    asked_at: int = -1  # version
    answers: int = 0  # completions that counted since its start

    # -- what must always hold -----------------------------------------------------------------------------------------

    def key(self):
        parts = (sorted(self.problems), self.asked_at, self.answers, evaluations_key(self.manager.evaluations))
        return super().key() + KEY.digest(parts)

    def _fields(self):
        return {name: value for name, value in super()._fields().items() if name != "problems"}

    def check(self):
        super().check()
        evaluation = self._evaluation()
        assert (evaluation is None) == (self.asked_at < 0), "forgotten, or remembered, against what was asked"
        if evaluation is not None:
            saved = evaluation.saved
            states = [*evaluation.waiting, *(p.ticket.prompt_index for p in self._runs()), *saved.done]
            assert states == [0], f"the problem is in the states {evaluation}"
            assert len(saved.done) - saved.failed == saved.correct == self.answers <= 1
        again = ManagerState(self.bounds.settings())
        again.restore_from([self.manager.snapshot(0.0)])
        assert again.evaluations.snapshot() == self.manager.evaluations.snapshot(), "a snapshot leads elsewhere"

    def is_final(self):
        evaluation = self._evaluation()
        return self.phase == "stuck" or (self.phase == "done" and (evaluation is None or evaluation.is_finished))

    def _evaluation(self):
        return self.manager.evaluations.by_id.get(NAME)

    def _runs(self):
        return list(self.manager.evaluations.running.values())

    # -- what can happen -----------------------------------------------------------------------------------------------

    def enabled(self):
        acts = super().enabled()
        evaluation = self._evaluation()
        if self.phase == "idle" and self.version == 1 and evaluation is None:
            acts.append(Act("asks_for_evaluation"))
        if evaluation is not None and evaluation.waiting and self.manager.playable(evaluation) is not None:
            acts = [act for act in acts if act.name not in ("allocate", "reply_lost")]  # problems go first
            acts += [Act("takes_problem", (worker,)) for worker in self._workers() if worker not in self.unanswered]
        for key, (_, worker) in self.problems.items():
            acts.append(Act("answers_problem", key))
            acts += [Act(name, key, 1) for name in _IN_PROBLEM if self._may(name)]
            if self._may("dies"):
                acts.append(Act("dies", (worker,), 1))
        acts += [
            Act("problem_lapses", (p.ticket_id, p.ticket.attempt))
            for p in self._runs()
            if (p.ticket_id, p.ticket.attempt) not in self.problems and not self._is_unnoticed(p.worker)
        ]
        return list(dict.fromkeys(acts))

    def _asks_for_evaluation(self):
        request = EvaluateRequest(NAME, "eval", 1, 0, self._incarnation())
        assert self.manager.evaluate(request, 0.0).total == 1
        before = len(self.manager.outbox)
        assert self.manager.evaluate(request, 0.0).total == 1 and len(self.manager.outbox) == before
        self.asked_at, self.answers = self.version, 0

    def _takes_problem(self, worker):
        (ticket,) = self.manager.allocate(AllocateRequest(worker, 1, request_id=""), 0.0).tickets
        assert ticket.kind == "eval" and ticket.version >= self.asked_at >= 0
        self.problems[ticket.ticket_id, ticket.attempt] = (ticket, worker)

    def _answers_problem(self, ticket_id, attempt):
        version = self.problems[ticket_id, attempt][0].version
        self._finish_problem(ticket_id, attempt, [Answer(1.0, True, 1, "stop", version, version)])

    def _problem_answered_twice(self, ticket_id, attempt):
        held = self.problems[ticket_id, attempt]
        self._answers_problem(ticket_id, attempt)
        self.problems[ticket_id, attempt] = held  # the call is repeated later

    def _problem_fails(self, ticket_id, attempt):
        self._finish_problem(ticket_id, attempt, [])

    def _finish_problem(self, ticket_id, attempt, answers):
        _, worker = self.problems.pop((ticket_id, attempt))
        runs = any((p.ticket_id, p.ticket.attempt) == (ticket_id, attempt) for p in self._runs())
        request = FinishRequest(ticket_id, attempt, worker, "accepted" if answers else "failed", "", answers)
        assert self.manager.finish(request, 0.0).known == runs
        self.answers += bool(answers) and runs

    def _problem_lapses(self, ticket_id, attempt):
        for ticket in self._running():
            ticket.news_at = 2 * LEASE_S
        assert self.manager.expire(2 * LEASE_S) == [ticket_id]
        for ticket in self._running():
            ticket.news_at = 0.0

    # -- what happens to training, and the evaluation with it ----------------------------------------------------------

    def _lapse(self, ticket_id):
        for problem in self._runs():
            problem.news_at = 2 * LEASE_S
        super()._lapse(ticket_id)
        for problem in self._runs():
            problem.news_at = 0.0

    def _dies(self, worker):
        super()._dies(worker)
        self.problems = {key: held for key, held in self.problems.items() if held[1] != worker}

    def _observe_workers(self):
        return [ticket_id for ticket_id in super()._observe_workers() if ticket_id in self.truth]

    def _master_starts(self):
        before = self._evaluation()
        super()._master_starts()
        kept = before is not None and before.is_finished and before.newest_version <= self.version
        assert (self._evaluation() is not None) == kept, (
            "an evaluation of weights that are gone, or none of those that stay"
        )
        if not kept:
            self.asked_at, self.answers = -1, 0


#: With an evaluation of version 1.
BESIDE = [
    bounds("problem_fails problem_answered_twice dies manager_restarts server_dies"),
    bounds("master_crashes", prompts=1),
]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "chosen", BESIDE + ([bounds("master_crashes")] if os.environ.get("REALSYS_EXPLORE") == "1" else []), ids=str
)
def test_evaluation_ends_once_in_every_history(chosen):
    found = explore(Evaluated(chosen), COPIER)
    print(f"{chosen}: {found.states} states, {found.transitions} transitions; ends: {found.finals}")
    assert chosen.kinds | {"answers_problem", "asks_for_evaluation"} <= found.actions.keys()


def never_forgotten(apply, evaluations, event):
    if not isinstance(event, RolledBack):
        apply(evaluations, event)


def none_found(*_):
    return []


def any_problem(running_attempt, evaluations, ticket_id, attempt):
    return evaluations.running.get(ticket_id)


@pytest.mark.parametrize(
    ("name", "new", "chosen", "said"),
    [
        ("apply", never_forgotten, BESIDE[1], "of weights that are gone"),
        ("lose", none_found, BESIDE[0], "in _problem_lapses"),
        ("running_attempt", any_problem, BESIDE[0], "in _finish_problem"),
    ],
)
def test_exploration_finds_a_seeded_defect_of_evaluations(name, new, chosen, said, monkeypatch):
    old = getattr(Evaluations, name)
    monkeypatch.setattr(Evaluations, name, lambda *args: new(old, *args))
    with pytest.raises(Violation, match=said):
        explore(Evaluated(chosen), COPIER, at_most=6000)
