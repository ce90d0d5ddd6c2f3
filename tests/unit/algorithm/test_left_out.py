"""The rows that the actor does not compute."""

from __future__ import annotations

from typing import Any

import pytest

from realsys.algorithm.minibatches import rows_left_out
from realsys.config.schema_train import PPOConfig
from tests.support.training.sample_records import make_ref

GRPO = {"mean": "group", "std": "group"}
# group 0: equal rewards; group 1: different rewards, one episode cut off
REFS = [
    make_ref("same/0", 8, 3, 1.0, False, 0),
    make_ref("same/1", 8, 3, 1.0, False, 0),
    make_ref("differ/0", 8, 3, 1.0, False, 1),
    make_ref("differ/1", 8, 3, 0.0, True, 1),
]


def left_out(*, by_token: bool = False, **fields: Any) -> set[str]:
    cfg = PPOConfig.model_validate({"advantage": GRPO, **fields})
    return rows_left_out(REFS, cfg, 100, by_token=by_token)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, set()),
        ({"skip_zero_advantage": True}, {"same/0", "same/1"}),
        ({"truncated_answers": "mask"}, {"differ/1"}),
        ({"skip_zero_advantage": True, "entropy_coef": 0.1}, set()),
        ({"skip_zero_advantage": True, "kl": {"coef": 0.1}}, set()),
        ({"truncated_answers": "mask", "entropy_coef": 0.1}, {"differ/1"}),
    ],
)
def test_rows_without_gradient_are_left_out(fields: dict[str, Any], expected: set[str]) -> None:
    assert left_out(**fields) == expected


def test_token_advantages_leave_nothing_out() -> None:
    assert left_out(by_token=True, skip_zero_advantage=True, truncated_answers="mask") == set()
