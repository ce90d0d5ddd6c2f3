"""Points of curves: names, and numbers that must not be shown."""

from __future__ import annotations

from realsys.observe.step_fields import metrics_of, step_of
from tests.support.telemetry.step_logs import evaluation, train


def test_metrics_have_their_kind_in_front() -> None:
    record = train(3, staleness={"mean": 1.5, "histogram": {"1": 4}}, total=9)
    assert metrics_of(record) == {"train/reward_mean": 30.0, "train/staleness/mean": 1.5}


def test_metrics_of_an_evaluation_name_its_set() -> None:
    metrics = metrics_of(evaluation(7, set="aime"))
    assert metrics == {"eval/aime/complete": 1.0, "eval/aime/accuracy": 0.07}


def test_incomplete_evaluation_shows_no_accuracy() -> None:
    record = evaluation(7, complete=False, accuracy=1.0, length_mean=25.0, failed=2)
    assert metrics_of(record) == {"eval/eval/complete": 0.0, "eval/eval/failed": 2.0}


def test_metric_of_the_user_is_delivered() -> None:
    assert metrics_of({"kind": "train", "step": 1, "metrics": {"my/own": 2}}) == {"train/metrics/my/own": 2.0}


def test_evaluation_is_placed_at_its_weights() -> None:
    assert step_of(evaluation(4, version=6)) == 6
    assert step_of(train(4)) == 4 and step_of({"kind": "train"}) is None
