"""`realsys samples --eval`: chosen completions of a stored evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from realsys.config.dump import write_config
from realsys.config.paths import TrialPaths
from realsys.errors import RecordError
from realsys.evaluation.stored_samples import EvalSample, write_result
from realsys.launch.cli import main
from realsys.launch.screen.evaluation_samples import Wanted, chosen_evaluation, chosen_problems
from tests.support.processes.config_trees import changed

RESULT = {"complete": True, "set": "eval", "problems": 2, "samples": 2, "accuracy": 0.75, "interval": [0.3, 0.95]}


def sample(problem: int, number: int, *, correct: bool) -> EvalSample:
    answer = "7" if correct else "\x1b[2J8"
    return EvalSample(
        "after-4",
        "eval",
        problem,
        number,
        0,
        4,
        4,
        f"3+4={problem}",
        f"#{answer}",
        "7",
        5.0,
        correct,
        "stop",
        2,
        answer,
    )


SAMPLES = [
    sample(0, 0, correct=True),
    sample(0, 1, correct=False),
    sample(1, 0, correct=True),
    sample(1, 1, correct=True),
]


@pytest.fixture
def trial(tmp_path: Path) -> Path:
    paths = TrialPaths(tmp_path / "t")
    paths.root.mkdir()
    write_config(changed(), paths.config)
    for name, of_set in (("before-0", "eval"), ("before-0.sums", "sums"), ("after-4", "eval")):
        result = RESULT | {"set": of_set, "eval_id": name.replace("-0", "").replace("-4", ""), "version": 4}
        write_result(paths.evaluations / name, SAMPLES, result)
    return paths.root


def test_newest_evaluation_is_shown(trial: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["samples", str(trial), "--eval"]) == 0
    shown = capsys.readouterr().out
    assert "after-4: version 4, accuracy 75.0% ± 32.5 (2 problems x 2)" in shown
    assert "reference  7" in shown and "\x1b[2J" not in shown and "wrong, reward 5, stop, 2 tokens" in shown


def test_filters_choose_completions(trial: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["samples", str(trial), "--eval", "before", "--wrong", "--json"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert json.loads(line)["completion"] == "#\x1b[2J8"
    groups = chosen_problems(SAMPLES, Wanted(problem=1, verdict=True))
    assert [[(s.problem, s.sample) for s in group] for group in groups] == [[(1, 0), (1, 1)]]


def test_evaluation_is_found_by_set_and_name(trial: Path):
    root = TrialPaths(trial).evaluations
    assert chosen_evaluation(root, Wanted(of_set="sums")) == "before-0.sums"
    assert chosen_evaluation(root, Wanted("before.sums")) == "before-0.sums"
    with pytest.raises(RecordError, match="use one of before-0"):
        chosen_evaluation(root, Wanted("step-9"))
    with pytest.raises(RecordError, match="no evaluation of set 'other'"):
        chosen_evaluation(root, Wanted(of_set="other"))
