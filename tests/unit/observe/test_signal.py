"""The warning that the groups of a run carry no signal."""

from __future__ import annotations

import ast
import functools
import operator
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from realsys.config.schema import Config
from realsys.observe import signal
from realsys.observe.signal import STEPS, DriftWatch, SignalWatch, signal_warning
from realsys.observe.timeline import why


def steps(equal: float, *, wrong: float = 0.0, right: float = 0.0, cut: float = 0.0, count: int = STEPS) -> list[Any]:
    signal = {"equal": equal, "wrong": wrong, "right": right, "batch_equal": float(equal == 1.0)}
    return [{"signal": signal, "truncated_fraction": cut}] * count


@pytest.mark.parametrize(
    ("records", "cause"),
    [
        (steps(0.75, wrong=0.75, cut=0.77), "raise generation.sampling.max_new_tokens"),
        (steps(0.75, wrong=0.75), "the prompts are too hard"),
        (steps(0.9, right=0.9), "the prompts are too easy"),
        (steps(0.9), "check the verifier"),
    ],
)
def test_likely_cause_is_named(records: list[Any], cause: str) -> None:
    assert cause in signal_warning(records, "group")


def test_warning_has_the_numbers() -> None:
    warning = signal_warning(steps(0.75, wrong=0.72, cut=0.77), "group", before=0.039)
    assert "75% of the groups of the last 3 steps carry no signal (72% all wrong, 0% all right, " in warning
    assert "77% of the completions cut off, accuracy before training 3.9%)" in warning


def test_no_warning_while_groups_carry_signal() -> None:
    assert signal_warning(steps(0.5, wrong=0.5), "group") == ""


def test_no_warning_after_too_few_steps() -> None:
    assert signal_warning(steps(1.0, wrong=1.0, count=STEPS - 1), "group") == ""


def test_equal_groups_teach_against_the_batch_mean() -> None:
    assert signal_warning(steps(0.9, wrong=0.9), "batch") == ""
    assert signal_warning(steps(1.0, wrong=1.0), "batch") != ""
    assert signal_warning(steps(1.0, wrong=1.0), "none") == ""


def test_records_of_older_builds_are_read() -> None:
    assert signal_warning([{}] * STEPS, "group") == ""


def test_watch_warns_once() -> None:
    watch = SignalWatch("group")
    warned = [bool(watch.observe(record)) for record in steps(0.9, wrong=0.9, count=5)]
    assert warned == [False, False, True, False, False]


@pytest.mark.parametrize("module", [signal, why])
def test_remedies_name_existing_settings(module: ModuleType) -> None:
    settings = Config(trial="t").model_dump()
    source = Path(str(module.__file__)).read_text("utf-8")
    literals = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    for text in [text for text in literals if isinstance(text, str)]:
        for name in re.findall(rf"\b(?:{'|'.join(settings)})(?:\.[a-z_]+)+", text):
            functools.reduce(operator.getitem, name.split("."), settings)


CALM = {"entropy_mean": 0.4, "grad_norm": 0.3, "kl_prox_theta_mean": 0.001, "w_ess": 0.97}


def warnings_of(*changes: dict[str, float | None]) -> list[str]:
    """Return the warnings of steps after eight calm ones."""
    watch = DriftWatch()
    stats = [CALM] * 8 + [CALM | change for change in changes]
    return [warning for step, each in enumerate(stats, 1) for warning in watch.observe({"step": step, "stats": each})]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"entropy_mean": 0.03}, "step 9: entropy fell to 0.03 from 0.4 nats in the first 5 steps; completions"),
        ({"grad_norm": 4.0}, "step 9: grad_norm jumped to 4, from 0.3 (median of the last 8 steps): lower"),
        ({"kl_prox_theta_mean": 0.02}, "step 9: kl_prox_theta_mean jumped to 0.02, from 0.001"),
        ({"w_ess": 0.3}, "step 9: behaviour weights leave 30% of the tokens effective (w_ess)"),
    ],
)
def test_policy_that_drifts_is_warned_of_once(change: dict[str, float | None], problem: str) -> None:
    [warning] = warnings_of(change, change)
    assert warning.startswith(problem)


@pytest.mark.parametrize(
    "change",
    [
        {"entropy_mean": 0.1, "grad_norm": 2.0, "kl_prox_theta_mean": 0.005, "w_ess": 0.6},
        {"grad_norm": 0.9, "kl_prox_theta_mean": 0.009},  # small numbers may jump
        dict.fromkeys(CALM),  # a step without computed tokens
        {"entropy_mean": float("nan"), "grad_norm": float("nan")},
    ],
)
def test_policy_that_learns_is_not_warned_of(change: dict[str, float | None]) -> None:
    assert warnings_of(change) == []


def test_first_steps_have_nothing_to_compare_with() -> None:
    watch = DriftWatch()
    wild = [{"grad_norm": 10.0**step, "entropy_mean": 0.1**step} for step in range(5)]
    assert [watch.observe({"stats": stats}) for stats in wild] == [[]] * 5
