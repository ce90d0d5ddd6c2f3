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
from realsys.observe.signal import STEPS, SignalWatch, signal_warning
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
