"""Decisions about deaths: budgets of restarts, what gives them back, repeated defects. Pure."""

from __future__ import annotations

from pathlib import Path

import pytest

from realsys.cluster.children.child_process import HEALTHY_AFTER_S
from realsys.launch.nodes.orders import ProcessId
from realsys.launch.supervise.restart_policy import (
    NO_CHECKPOINT,
    Cause,
    Death,
    EndDecision,
    Failure,
    GiveUp,
    Restart,
    RestartPolicy,
    is_spare,
)

KEY_ERROR = ("KeyError", "/mine/loss.py:7")


def failure(
    pid: int,
    *,
    checkpoint: int = NO_CHECKPOINT,
    ran_s: float = 1.0,
    who: str = "trainer",
    permanent: bool = False,
    defect: tuple[str, ...] = (),
    spare: bool = False,
) -> Failure:
    process = ProcessId("host", pid)
    death = Death(f"model_worker/{pid}", process, 1, float(pid), Path("/nowhere.log"))
    cause = Cause(death.name, process, death.time, death.how, "", death.log, defect=defect)
    return Failure(who, [death], frozenset({process}), ran_s, cause, permanent, checkpoint, spare)


def numbers(policy: RestartPolicy, failures: list[Failure]) -> list[int | None]:
    """Which restart in a row each failure gets, None for the end."""
    decisions = [policy.decide(each) for each in failures]
    return [decision.number if isinstance(decision, Restart) else None for decision in decisions]


@pytest.mark.parametrize(
    ("checkpoints", "expected"),
    [
        ([0, 0, 0], [1, 2, None]),
        ([0, 20, 40, 60], [1, 1, 1, 1]),
        # The newest one is damaged and set aside: training restarts from an older one, again and again.
        ([40, 20, 20], [1, 2, None]),
        ([40, 20, 0], [1, 2, None]),
        # It is written once more, and damaged once more.
        ([40, 20, 40, 20, 40], [1, 2, None, None, None]),
        ([40, 20, 60], [1, 2, 1]),
        ([NO_CHECKPOINT, NO_CHECKPOINT, 0], [1, 2, 1]),
        ([20, NO_CHECKPOINT, NO_CHECKPOINT], [1, 2, None]),
    ],
)
def test_only_a_newer_checkpoint_gives_budget_back(checkpoints: list[int], expected: list[int | None]) -> None:
    failures = [failure(pid, checkpoint=step) for pid, step in enumerate(checkpoints, 1)]
    assert numbers(RestartPolicy(2, 0.5), failures) == expected


def test_running_for_long_gives_budget_back() -> None:
    long = HEALTHY_AFTER_S + 1
    failures = [failure(1, checkpoint=40), failure(2, checkpoint=20, ran_s=long), failure(3, checkpoint=40), failure(4)]
    assert numbers(RestartPolicy(2, 0.5), failures) == [1, 1, 2, None]


def test_each_worker_has_its_own_budget() -> None:
    policy = RestartPolicy(1, 0.5)
    assert numbers(policy, [failure(1, who="a"), failure(2, who="b"), failure(3, who="a")]) == [1, 1, None]


def test_permanent_failure_ends_the_run() -> None:
    decision = RestartPolicy(5, 0.5).decide(failure(1, permanent=True))
    assert isinstance(decision, EndDecision) and decision.reason == "model_worker/1 exited with code 1"


def test_deaths_of_a_spent_row_are_causes() -> None:
    policy = RestartPolicy(1, 0.5)
    policy.decide(failure(1, checkpoint=0))
    policy.decide(failure(2, checkpoint=20))
    assert {process.pid for process in policy.recovered} == {1, 2}
    end = policy.decide(failure(3, checkpoint=20))
    assert isinstance(end, EndDecision) and [death.process.pid for death in end.deaths] == [2, 3]
    assert end.reason == "model_worker/3 exited with code 1, after 1 restarts (cluster.max_restarts)"
    assert {process.pid for process in policy.recovered} == {1}


def test_same_defect_twice_in_a_row_ends_run() -> None:
    policy = RestartPolicy(5, 0.5)
    assert isinstance(policy.decide(failure(1, defect=KEY_ERROR)), Restart)
    end = policy.decide(failure(2, defect=KEY_ERROR))
    assert isinstance(end, EndDecision)
    assert end.reason == (
        "model_worker/2 exited with code 1, twice in a row with the same exception at /mine/loss.py:7"
    )


@pytest.mark.parametrize("between", [failure(2), failure(2, defect=("KeyError", "/mine/loss.py:8"))])
def test_other_failure_in_between_allows_a_restart(between: Failure) -> None:
    failures = [failure(1, defect=KEY_ERROR), between, failure(3, defect=KEY_ERROR)]
    assert numbers(RestartPolicy(5, 0.5), failures) == [1, 2, 3]


def test_progress_in_between_allows_a_restart() -> None:
    """Each start got further than the one before: a restart helps."""
    failures = [failure(pid, defect=KEY_ERROR, checkpoint=step) for pid, step in ((1, 0), (2, 20), (3, 40))]
    assert numbers(RestartPolicy(5, 0.5), failures) == [1, 1, 1]


@pytest.mark.parametrize("defect", [(), KEY_ERROR])
def test_spare_worker_is_given_up(defect: tuple[str, ...]) -> None:
    policy = RestartPolicy(1, 0.5)
    policy.decide(failure(1, spare=True, defect=defect))
    assert isinstance(policy.decide(failure(2, spare=True, defect=defect)), GiveUp)
    assert {process.pid for process in policy.recovered} == {1, 2}, "no cause of a later end"
    assert isinstance(policy.decide(failure(3, spare=True, permanent=True)), EndDecision)


@pytest.mark.parametrize(
    ("others_s", "min_share", "expected"),
    [
        ([300.0] * 63, 0.0, True),
        ([300.0], 0.0, True),
        ([], 0.0, False),
        ([39.0, 41.0, 70.0], 0.0, False),  # they die as often
        ([300.0] * 31, 0.5, False),
        ([300.0] * 32, 0.5, True),
    ],
)
def test_worker_is_spare_beside_steady_ones(others_s: list[float], min_share: float, expected: bool) -> None:
    assert is_spare(40.0, others_s, 64, min_share) == expected
