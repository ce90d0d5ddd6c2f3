"""The newest records of a growing step log, and their gauges."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from realsys.observe import step_log
from realsys.observe.step_fields import curve_metrics
from realsys.observe.step_log import LatestRecords
from tests.support.telemetry.step_logs import append, evaluation, recovered, train, warmup


def test_newest_of_each_curve_is_returned(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    records = LatestRecords(path)
    assert records.read() == []
    append(path, warmup(1), warmup(2), evaluation(0), evaluation(0, set="aime"), train(1))
    assert records.read() == [warmup(2), evaluation(0), evaluation(0, set="aime"), train(1)]
    append(path, train(2), evaluation(2))
    assert {record["step"] for record in records.read()} == {2, 0}


def test_undone_records_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    append(path, warmup(2), evaluation(0), train(1), train(2), recovered(1))
    assert LatestRecords(path).read() == [warmup(2), evaluation(0)]


def test_long_log_is_read_from_near_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "steps.jsonl"
    append(path, evaluation(0), *(train(step) for step in range(1, 100)))
    monkeypatch.setattr(step_log, "MAX_BYTES", 250)
    assert LatestRecords(path).read() == [train(99)]


def test_read_beside_another_does_not_wait(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    append(path, train(1))
    records = LatestRecords(path)
    with records._lock:
        assert records.read() == []


def test_gauges_have_labels_unit_and_meaning() -> None:
    class Collector:
        def collect(self) -> object:
            record = train(4, untrained={"stale": 0.25, "failed": 0.5}, stats={"my/own": 3.0, "w_ess": 0.75})
            return curve_metrics([record, evaluation(4), evaluation(2, set="aime", pass_at={"8": {"value": 0.5}})])

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector())  # type: ignore[arg-type]
    families = {f.name: f for f in text_string_to_metric_families(generate_latest(registry).decode())}
    found = {(s.name, *s.labels.values()): s.value for f in families.values() for s in f.samples}
    assert found["realsys_train_untrained", "stale"] == 0.25 and found["realsys_train_untrained", "failed"] == 0.5
    assert found["realsys_train_stats_w_ess",] == 0.75 and found["realsys_train_stats", "my/own"] == 3.0
    assert found["realsys_eval_accuracy", "eval"] == 0.04 and found["realsys_eval_accuracy", "aime"] == 0.02
    assert 0.5 in [s.value for s in families["realsys_eval_pass_at_value"].samples]
    assert families["realsys_train_untrained"].documentation.endswith("by reason (share)")
