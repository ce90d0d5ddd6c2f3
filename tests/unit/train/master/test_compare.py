"""Comparison of a step with its replay: bit by bit, or within a tolerance."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from realsys.config.machine import Machine
from realsys.config.schema import Config
from realsys.launch.commands.replay import tolerance_of
from realsys.train.master.replay import StepComparison, compare
from realsys.train.record_files import StepRecord

GPU = Machine(cpus=1, memory_bytes=0, gpus=("0",), torch_has_cuda=True)


def record(loss: float, weights: str) -> StepRecord:
    fields: dict[str, Any] = {field.name: None for field in msgspec.structs.fields(StepRecord) if field.required}
    fields |= {"step": 1, "groups": [], "plan": "p", "calls": ["actor_train"], "args": {}, "scores": {}}
    fields |= {"stats": {"actor_train": {"loss": loss, "bad": math.nan}}, "weights": {"actor": {0: {"w": weights}}}}
    return StepRecord(**fields)


def compared(far: float, tolerance: float) -> StepComparison:
    one, two = (
        {("s", "prox_logprobs"): np.float32([-1.0, at]), ("s", "tokens"): np.int32([1, 2])} for at in (-2.0, -2.0 - far)
    )
    return compare(record(1.0, "a"), record(1.0 + far, "b" if far else "a"), one, two, tolerance)


@pytest.mark.parametrize(
    ("far", "tolerance", "unequal"),
    [
        (0.0, 0.0, set()),
        (1e-6, 0.0, {"array", "statistic", "parameter"}),
        (0.01, 0.05, set()),
        (0.5, 0.05, {"array", "statistic"}),
    ],
)
def test_numbers_may_differ_by_the_tolerance(far: float, tolerance: float, unequal: set[str]) -> None:
    found = compared(far, tolerance)
    assert {kind for kind, count in found.unequal.items() if count} == unequal
    assert ("parameter" in found.compared) == (not tolerance)


def test_tokens_are_compared_exactly_within_a_tolerance() -> None:
    arrays = ({("s", "tokens"): np.int32([1000, at])} for at in (1000, 1001))
    assert compare(record(1.0, "a"), record(1.0, "a"), *arrays, 0.05).unequal["array"] == 1


def test_tolerance_is_for_gpus_without_deterministic_algorithms() -> None:
    exact = Config.model_validate({"train": {"deterministic": True}})
    assert tolerance_of(Config(), GPU) > 0
    assert tolerance_of(exact, GPU) == tolerance_of(Config(), replace(GPU, gpus=())) == 0
