"""`realsys regrade` on recorded trials: real verifier processes, and the trial is only read."""

from __future__ import annotations

import asyncio
import json
import shutil

import pytest

from realsys.config.paths import read_config
from realsys.data.prompts import PromptDataset
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import RewardError, StuckError
from realsys.lab.regrade import (
    Disagreement,
    LeftOut,
    RecordedCompletion,
    RecordedCompletions,
    judge_chunk,
    regrade_config,
)
from realsys.launch.cli import main
from realsys.train.record_files import recorded_steps
from tests.support.jobs.recorded_trials import Trained, make_trial
from tests.support.processes.config_trees import changed
from tests.support.serving.reward_pools import BEHAVE

#: recorded as the verifier ``exact`` judges them, but for the third and the fourth
SAMPLES = [
    Trained(0, "#{}", True),
    Trained(1, "#1", False),
    Trained(2, "#{}", False),
    Trained(3, "#1", True),
    Trained(4, "#{}", False, "length"),
]


def snapshot(paths):
    return {path: path.stat().st_mtime_ns for path in sorted(paths.root.rglob("*"))}


@pytest.mark.processes
def test_disagreements_are_counted_by_direction(tmp_path, capsys):
    paths = make_trial(tmp_path, {3: SAMPLES, 4: SAMPLES[:2]})
    before = snapshot(paths)
    found = tmp_path / "found.json"
    assert main(["regrade", str(paths.root), "--show", "9", "--json", str(found)]) == 0
    assert snapshot(paths) == before, "the trial was changed"
    out = capsys.readouterr().out
    assert "arith/t: verifier exact (its own), steps 3-4" in out
    assert "samples     7 on record, 7 judged again" in out
    assert "disagree    2: 28.57 %" in out.replace("28.57%", "28.57 %")
    assert "1 wrong -> right" in out and "1 right -> wrong" in out
    results = json.loads(found.read_text())
    assert results["flips"] == {"wrong -> right": 1, "right -> wrong": 1} and results["steps"] == [3, 4]
    assert [sample["sample_id"] for sample in results["shown"]] == ["00000002.0/0.0", "00000003.0/0.0"]
    assert results["shown"][1]["now"]["correct"] is False and results["shown"][1]["completion"] == "#1"


def test_verifiers_of_evaluations_are_left_out():
    """The set's judge has no address here, and its arguments are those of a verifier that does not judge."""
    sets = "evaluation.sets={a: {verifier: judge}, b: {verifier_args: {ignored: 1}}}"
    config = changed(sets, "data.verifier_args={ignored: 1}")
    judged = regrade_config(config, verifier="math")
    assert (judged.data.verifier, judged.evaluation.sets) == ("math", {})


def test_given_arguments_replace_those_of_the_trial():
    config = changed("data.verifier=math", "data.verifier_args={seconds: 3.0}")
    assert regrade_config(config, arguments="{}").data.verifier_args == {}


@pytest.mark.processes
def test_another_verifier_and_its_errors(tmp_path, capsys):
    paths = make_trial(tmp_path, {3: [Trained(0, "#{}", True), Trained(1, "raise", False), Trained(2, "nan", False)]})
    assert main(["regrade", str(paths.root), "--verifier", BEHAVE, "--step", "3"]) == 0
    out = capsys.readouterr().out
    assert f"verifier {BEHAVE}; trained with exact, steps 3" in out
    assert "3 on record, 1 judged again" in out
    assert "1 raised: verifier" in out and "1 no_verdict: verifier" in out and "1 right -> wrong" in out


@pytest.mark.processes
def test_arguments_and_settings_reach_the_verifier(tmp_path, capsys):
    paths = make_trial(tmp_path, {3: [Trained(0, "#{}", True)]})
    checked = BEHAVE.replace("behave", "checked")
    arguments = ["--verifier", checked, "--args", "{bonus: 0.5}", "rollout.reward.wrong=-2.5"]
    assert main(["regrade", str(paths.root), *arguments]) == 0
    assert "reward      +5.0000 on record, -2.0000 now" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--verifier", "exactly"], "unknown verifier"),
        (["--verifier", "nowhere:verify"], "no module named 'nowhere'"),
        (["--verifier", "judge"], "data.verifier_args.base_url"),
        (["--verifier", "judge", "data.verifier_args.rubric_file=/nowhere"], "rubric_file"),
        (["--args", "{nonsense: 1}"], "do not fit exact"),
        (["--args", "{"], "cannot be read"),
        (["--step", "9"], "step 9 is not recorded; there is 3"),
        (["--show", "-1"], "--show"),
        (["train.total_steps=5"], "does not decide a verdict"),
        (["rollout.environment=tests.support.serving.rollout_fakes:Game"], "plays steps (reset, step, close)"),
        (["rollout.reward.corect=1"], "unknown field; did you mean rollout.reward.correct"),
        (["rollout.reward.correct.x=1"], "rollout.reward.correct={'x': 1}: must be a valid number"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, arguments, problem):
    paths = make_trial(tmp_path, {3: SAMPLES[:1]})
    assert main(["regrade", str(paths.root), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("realsys: ") and problem in line


def test_folder_without_records_is_refused(tmp_path, capsys):
    paths = make_trial(tmp_path, {})
    assert main(["regrade", str(paths.root)]) == 2
    assert "no step is recorded" in capsys.readouterr().err
    assert main(["regrade", str(tmp_path)]) == 2


def reader_of(paths):
    config, tokenizer = read_config(paths.config), TextTokenizer(paths.start_model)
    return RecordedCompletions(config, tokenizer, PromptDataset(config, paths, tokenizer))


def test_changed_data_is_named(tmp_path):
    paths = make_trial(tmp_path, {3: SAMPLES})
    data = paths.data / "train.jsonl"
    lines = data.read_text().splitlines(keepends=True)
    data.write_text("".join([lines[0], *lines[2:4]]))
    left = [each for each in reader_of(paths).read(3, recorded_steps(paths.records)[3]) if isinstance(each, LeftOut)]
    assert [each.what[:8] for each in left] == ["00000001", "00000002", "00000003", "00000004"]
    assert "another prompt now" in left[0].reason and "cannot be read" in left[3].reason


def test_removed_record_is_left_out(tmp_path):
    """A running trial removes old records while they are read."""
    paths = make_trial(tmp_path, {3: SAMPLES})
    directory = recorded_steps(paths.records)[3]
    shutil.rmtree(directory)
    (left,) = reader_of(paths).read(3, directory)
    assert left == LeftOut("step 3", "the running trial has removed the record (record.keep_steps)")


class Environment:
    """Raises the error that it is given for each completion."""

    def __init__(self, error):
        self.error = error

    async def judge(self, task, response):
        raise self.error


def test_errors_of_an_environment_are_counted(tmp_path):
    paths = make_trial(tmp_path, {3: SAMPLES})
    samples = list(reader_of(paths).read(3, recorded_steps(paths.records)[3]))
    assert all(isinstance(sample, RecordedCompletion) for sample in samples)
    counts = Disagreement()
    asyncio.run(judge_chunk(Environment(RewardError("no", "elapsed")), samples, counts))
    asyncio.run(judge_chunk(Environment(ZeroDivisionError("a defect")), samples, counts))
    assert counts.errors == {"elapsed": 5, "environment": 5}
    with pytest.raises(StuckError, match="refused"):
        asyncio.run(judge_chunk(Environment(StuckError("refused")), samples, counts))
