"""TensorBoard reads the event files."""

import importlib
from typing import Any

import pytest

from tests.support.run_logs import evaluation, recovered, train, warmup

pytestmark = pytest.mark.needs(package="tensorboard")

REWARD = "train/reward_mean"


def scalars(followed, kind, tag):
    """Return (step, value) of a curve as TensorBoard shows it."""
    made: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    reader = made.EventAccumulator(str(followed.folder / "tensorboard" / kind), size_guidance={"scalars": 0})
    reader.Reload()
    return [(event.step, event.value) for event in reader.Scalars(tag)]


def test_curves_have_steps_values_and_times(followed):
    followed.play("tensorboard", [warmup(1), warmup(2), evaluation(0), train(1, staleness={"mean": 1.5}), train(2)])
    assert scalars(followed, "train", REWARD) == [(1, 10.0), (2, 20.0)]
    assert scalars(followed, "train", "train/staleness/mean") == [(1, 1.5)]
    assert scalars(followed, "warmup", "warmup/loss") == [(1, 1.0), (2, 0.5)]
    assert scalars(followed, "eval", "eval/eval/accuracy") == [(0, 0.0)]


def test_restart_continues_the_curve(followed):
    followed.play("tensorboard", [train(1)], [train(2)], [train(3)])
    assert scalars(followed, "train", REWARD) == [(1, 10.0), (2, 20.0), (3, 30.0)]


def test_roll_back_discards_later_steps(followed):
    again = [recovered(1), train(2, reward_mean=-1.0)]
    followed.play("tensorboard", [warmup(9), evaluation(2), train(1), train(2), train(3), *again])
    assert scalars(followed, "train", REWARD) == [(1, 10.0), (2, -1.0)]
    assert scalars(followed, "warmup", "warmup/loss") == [(9, pytest.approx(1 / 9))]


def test_crash_repeats_no_step(followed):
    followed.play("tensorboard", [train(1)])
    followed.crash("tensorboard", train(2), train(3))
    followed.play("tensorboard", [train(4)])
    assert [step for step, _ in scalars(followed, "train", REWARD)] == [1, 2, 3, 4]


def test_crash_at_the_first_start_repeats_no_step(followed):
    followed.crash("tensorboard", train(1), train(2))
    followed.play("tensorboard", [train(3)])
    assert [step for step, _ in scalars(followed, "train", REWARD)] == [1, 2, 3]
