"""`realsys samples --eval`: the stored completions of an evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from realsys.config.dump import write_config
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.evaluation.samples import EvalSample, write_result
from realsys.launch.cli import main

RESULT = {"complete": True, "problems": 6, "samples": 2, "accuracy": 0.5, "interval": [0.4, 0.6]}


def sample(problem: int, number: int) -> EvalSample:
    right = number == 0
    return EvalSample(
        "e",
        "eval",
        problem,
        number,
        0,
        3,
        3,
        f"prompt {problem}",
        "two\x1b[2J",
        "2",
        float(right),
        right,
        "stop",
        3,
        "2",
    )


@pytest.fixture
def trial(tmp_path: Path) -> TrialPaths:
    """A trial with two evaluations of six problems."""
    paths = TrialPaths(tmp_path)
    write_config(Config(), paths.config)
    for name in ("step-10", "step-20"):
        write_result(paths.evaluations / name, [sample(p, n) for p in range(6) for n in range(2)], RESULT)
    return paths


def test_newest_evaluation_is_shown(trial, capsys):
    assert main(["samples", str(trial.root), "--eval"]) == 0
    out = capsys.readouterr().out
    assert "evaluation step-20: accuracy 50.0 % ± 10.0 (6 problems x 2)" in out
    assert "problem 0, reference 2" in out and "prompt 3" in out and "prompt 4" not in out
    assert "2 more problems: --limit 0 shows all" in out


def test_completion_cannot_control_the_terminal(trial, capsys):
    assert main(["samples", str(trial.root), "--eval", "step-10", "--limit", "1"]) == 0
    out = capsys.readouterr().out
    assert "two\\x1b[2J" in out and "answer 2" in out


def test_json_has_a_line_per_completion(trial, capsys):
    assert main(["samples", str(trial.root), "--eval", "step-10", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 12 and lines[0]["correct"] is True and lines[1]["correct"] is False


def test_folder_of_an_evaluation_needs_no_option(trial, capsys):
    write_config(Config(evaluate_only=True), trial.config)
    assert main(["samples", str(trial.root)]) == 0
    assert "evaluation step-20" in capsys.readouterr().out


def test_unknown_evaluation_is_one_line(trial, capsys):
    assert main(["samples", str(trial.root), "--eval", "step-30"]) == 2
    assert "no completions of an evaluation 'step-30': it has step-10, step-20" in capsys.readouterr().err


def test_trial_without_evaluations_is_one_line(tmp_path, capsys):
    write_config(Config(), tmp_path / "config.json")
    assert main(["samples", str(tmp_path), "--eval"]) == 2
    assert "no completions of an evaluation are stored" in capsys.readouterr().err
