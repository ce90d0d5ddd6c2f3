"""Estimates of memory and disk against numbers that are worked out by hand."""

from __future__ import annotations

import pytest

from realsys.config.allocation import parse_allocation
from realsys.config.dataflow import dataflow_of
from realsys.config.rules.machine import Machine
from realsys.config.rules.resources import (
    Memory,
    batch_tokens,
    check_memory,
    disk_bytes,
    memory_of_models,
    model_of,
    record_bytes,
)
from realsys.errors import ConfigError
from tests.support.processes.config_trees import changed

GIB = 1 << 30
HERE = Machine(cpus=8, memory_bytes=10 * GIB)


def test_memory_counts_every_copy_of_the_model() -> None:
    """fp32 has 4 bytes each of weights and gradients, 8 of moments; a server has two versions of the weights.

    The ranks together hold one more copy of the weights, which is written while they train.
    """
    config = changed("warmup.steps=0", "train.microbatch_tokens=1000")
    count = model_of(config).parameters
    assert count == pytest.approx(307_328, rel=0.01)
    memory = memory_of_models(config, parse_allocation("serve.d3+d2"), dataflow_of(config))
    assert memory.logits == 2 * 1000 * 48 * 4
    assert (memory.ranks - memory.logits, memory.servers) == ((2 * 16 + 4) * count, 3 * 2 * 4 * count)


def test_bfloat16_adds_master_weights() -> None:
    config = changed("warmup.steps=0", "model.dtype=bfloat16", "train.head_chunk_tokens=10")
    memory = memory_of_models(config, parse_allocation("serve.d1+d1"), dataflow_of(config))
    assert memory.logits == 10 * 48 * 4
    assert memory.ranks - memory.logits == (2 + 4 + 4 + 8 + 2) * model_of(config).parameters


def test_disk_counts_versions_and_checkpoints() -> None:
    config = changed("weights.keep_versions=3", "checkpoint.keep=2", "checkpoint.every_steps=5")
    count = model_of(config).parameters
    assert disk_bytes(config, dataflow_of(config)) == (3 + 2) * 4 * count + (2 + 1) * 12 * count
    none = changed("checkpoint.every_steps=0", "checkpoint.on_stop=false", "checkpoint.at_end=false")
    assert disk_bytes(none, dataflow_of(none)) == (2 + 2) * 4 * count


def test_records_are_bounded_by_the_longest_rows() -> None:
    config = changed("record.keep_steps=10")
    assert record_bytes(config) == 10 * 24 * batch_tokens(config) == 10 * 24 * 64 * 8 * 248
    assert record_bytes(changed("record.samples=false")) == 0


@pytest.mark.parametrize(
    ("need", "models", "field", "problem"),
    [
        (11, None, "allocation", "its processes need about 11.0 GiB, 10.0 GiB are free"),
        (2, Memory(8 * GIB, 3 * GIB, 0), "allocation", "needs about 13.0 GiB of memory"),
        (2, Memory(9 * GIB, GIB, 7 * GIB), "train.head_chunk_tokens", "7.0 of them are logits"),
    ],
)
def test_too_much_memory_names_the_setting(need: int, models: Memory | None, field: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_memory(changed(), HERE, need * GIB, models)
    assert caught.value.field == field and problem in str(caught.value)


def test_enough_memory_is_accepted() -> None:
    check_memory(changed(), HERE, 2 * GIB, Memory(4 * GIB, 3 * GIB, 0))
