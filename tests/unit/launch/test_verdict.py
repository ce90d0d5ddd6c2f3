"""What a death means: budgets of restarts, what gives them back, and which death is the cause. Pure."""

from __future__ import annotations

from pathlib import Path

import pytest

from realsys.launch.processes.verdict import (
    HEALTHY_AFTER_S,
    LONGEST_BACKOFF_S,
    NO_CHECKPOINT,
    Death,
    End,
    Judge,
    Loss,
    Restart,
)

SIDE = "the training side"


def loss(
    pid: int, *, checkpoint: int = NO_CHECKPOINT, ran_s: float = 1.0, who: str = SIDE, permanent: bool = False
) -> Loss:
    death = Death(f"model_worker/{pid}", pid, 1, float(pid), Path("/nowhere.log"))
    return Loss(who, [death], frozenset({pid}), ran_s, permanent, checkpoint)


def numbers(judge: Judge, losses: list[Loss]) -> list[int | None]:
    """Which restart in a row each loss gets, None for the end."""
    verdicts = [judge.judge(each) for each in losses]
    return [verdict.number if isinstance(verdict, Restart) else None for verdict in verdicts]


@pytest.mark.parametrize(
    ("checkpoints", "expected"),
    [
        ([0, 0, 0], [1, 2, None]),
        ([0, 20, 40, 60], [1, 1, 1, 1]),
        # The newest one is damaged and set aside: training goes on from an older one, again and again.
        ([40, 20, 20], [1, 2, None]),
        ([40, 20, 0], [1, 2, None]),
        # It is written once more, and damaged once more.
        ([40, 20, 40, 20, 40], [1, 2, None, None, None]),
        ([40, 20, 60], [1, 2, 1]),
        ([NO_CHECKPOINT, NO_CHECKPOINT, 0], [1, 2, 1]),
        ([20, NO_CHECKPOINT, NO_CHECKPOINT], [1, 2, None]),
    ],
)
def test_only_a_newer_checkpoint_than_ever_before_gives_the_budget_back(
    checkpoints: list[int], expected: list[int | None]
) -> None:
    losses = [loss(pid, checkpoint=step) for pid, step in enumerate(checkpoints, 1)]
    assert numbers(Judge(2, 0.5), losses) == expected


def test_running_for_long_gives_the_budget_back_and_remembers_the_newest_checkpoint() -> None:
    long = HEALTHY_AFTER_S + 1
    losses = [loss(1, checkpoint=40), loss(2, checkpoint=20, ran_s=long), loss(3, checkpoint=40), loss(4)]
    assert numbers(Judge(2, 0.5), losses) == [1, 1, 2, None]


def test_each_worker_has_a_budget_of_its_own() -> None:
    judge = Judge(1, 0.5)
    assert numbers(judge, [loss(1, who="a"), loss(2, who="b"), loss(3, who="a")]) == [1, 1, None]


def test_a_failure_that_would_come_again_ends_the_run_at_once() -> None:
    verdict = Judge(5, 0.5).judge(loss(1, permanent=True))
    assert isinstance(verdict, End) and verdict.reason == "model_worker/1 exited with code 1"


def test_delays_double_up_to_a_bound() -> None:
    judge = Judge(9, 0.5)
    delays = [verdict.delay_s for pid in range(1, 10) if isinstance(verdict := judge.judge(loss(pid)), Restart)]
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0] + [LONGEST_BACKOFF_S] * 3


def test_the_deaths_of_a_spent_row_are_causes_again_and_those_of_an_earlier_row_are_not() -> None:
    judge = Judge(1, 0.5)
    judge.judge(loss(1, checkpoint=0))
    judge.judge(loss(2, checkpoint=20))
    assert judge.mended == {1, 2}
    end = judge.judge(loss(3, checkpoint=20))
    assert isinstance(end, End) and [death.pid for death in end.deaths] == [2, 3]
    assert end.reason == "model_worker/3 exited with code 1, after 1 restarts (cluster.max_restarts)"
    assert judge.mended == {1}
