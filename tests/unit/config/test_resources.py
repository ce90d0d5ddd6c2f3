"""Estimates of the disk against numbers that are worked out by hand."""

from __future__ import annotations

from realsys.config.dataflow import dataflow_of
from realsys.config.trial_sizes import batch_tokens, disk_bytes, model_of, record_bytes
from tests.support.processes.config_trees import changed


def test_disk_counts_versions_and_checkpoints() -> None:
    config = changed("weights.keep_versions=3", "checkpoint.keep=2", "checkpoint.every_steps=5")
    count = model_of(config).parameters
    assert disk_bytes(config, dataflow_of(config)) == (3 + 2) * 4 * count + (2 + 1) * 12 * count
    none = changed("checkpoint.every_steps=0", "checkpoint.on_stop=false", "checkpoint.at_end=false")
    assert disk_bytes(none, dataflow_of(none)) == (2 + 2) * 4 * count


def test_records_are_bounded_by_the_longest_rows() -> None:
    config = changed("record.keep_steps=10")
    assert record_bytes(config) == 10 * 24 * batch_tokens(config) == 10 * 24 * 64 * 8 * 248
    assert record_bytes(changed("record.keep_steps=0")) == 0
