"""`realsys samples`: chosen samples of a step, of a stored evaluation, and of groups that were not trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from realsys.config.paths import TrialPaths, write_config
from realsys.errors import RecordError
from realsys.launch.cli import main
from realsys.observe.dropped_groups import DroppedGroup, Room, write_group
from realsys.observe.evaluation_records import EvalSample, write_result
from realsys.observe.samples.catalogue import chosen_evaluation
from realsys.types import Ticket
from tests.support.processes.config_trees import changed
from tests.support.view.shown_trial import HOSTILE, sample_trial

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
    assert main(["samples", str(trial), "--eval", "--problem", "1", "--correct", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(sample["problem"], sample.get("sample")) for sample in found] == [(1, 0), (1, 1)]


def test_evaluation_is_found_by_set_and_name(trial: Path):
    root = TrialPaths(trial).evaluations
    assert chosen_evaluation(root, of_set="sums") == "before-0.sums"
    assert chosen_evaluation(root, "before.sums") == "before-0.sums"
    with pytest.raises(RecordError, match="use one of before-0"):
        chosen_evaluation(root, "step-9")
    with pytest.raises(RecordError, match="no evaluation of set 'other'"):
        chosen_evaluation(root, of_set="other")


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        ([], ["0.0/0.0", "0.0/1.0", "1.0/0.0", "1.0/1.0"]),
        (["--wrong"], ["0.0/1.0", "1.0/0.0"]),
        (["--truncated"], ["0.0/1.0"]),
        (["--min-reward", "1"], ["0.0/0.0", "1.0/1.0"]),
        (["--grep", "TRY again"], ["1.0/1.0"]),
        (["--longest", "--limit", "1"], ["0.0/1.0", "0.0/0.0"]),
        (["--min-staleness", "9"], []),
    ],
)
def test_filters_choose_samples_of_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], ids: list[str]
):
    paths = sample_trial(tmp_path)
    assert main(["samples", str(paths.root), "--json", *options]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [sample["sample_id"].lstrip("0").rjust(7, "0") for sample in found] == [name.rjust(7, "0") for name in ids]


def test_step_is_printed_with_its_references(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    paths = sample_trial(tmp_path)
    assert main(["samples", str(paths.root), "--ticket", "0000000001"]) == 0
    assert "reference  7" in capsys.readouterr().out
    assert main(["samples", str(paths.root), "--ticket", "nobody"]) == 2
    assert "step 40 has not trained ticket 'nobody': it has 0000000000" in capsys.readouterr().err


def test_dropped_groups_are_printed_with_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    paths = sample_trial(tmp_path)
    assert main(["samples", str(paths.root), "--dropped"]) == 0
    shown = capsys.readouterr().out
    assert "equal_rewards" in shown and "no reward, not judged" in shown and HOSTILE[:30] in shown


def test_too_old_group_is_printed_with_its_age(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    paths = sample_trial(tmp_path)
    assert main(["samples", str(paths.root), "--dropped", "--min-staleness", "1"]) == 0
    shown = capsys.readouterr().out
    assert "ticket 0000000079: prompt 0" in shown and "too old (masked), 6 behind" in shown and "reference  3" in shown
    assert "0000000080" not in shown


def test_reason_in_the_title_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """An error may quote a completion."""
    paths = sample_trial(tmp_path)
    reason = "RewardError: \x1b[2J"
    group = DroppedGroup(
        1.0, Ticket("7", 0, 0), "rollout_worker/0", reason, "1+2=", "3", [Room().episode(0, [], None, None)]
    )
    write_group(paths.dropped / "rollout_worker-0", group, 64)
    assert main(["samples", str(paths.root), "--dropped", "--limit", "0"]) == 0
    shown = capsys.readouterr().out
    assert "1 RewardError: \\x1b[2J" in shown and "\x1b" not in shown
