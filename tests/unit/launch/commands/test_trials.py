"""`realsys list` and `realsys status`: the rows of all trials, and how one ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from realsys.config.paths import TrialPaths, write_config
from realsys.config.schema import Config
from realsys.config.schema_data import HELD_OUT
from realsys.launch.cli import main
from realsys.launch.conclude import summarise, write_summary
from realsys.launch.slurm.trial_job import TrialJob
from realsys.launch.supervise.failures import FirstFailure
from realsys.launch.supervise.restart_policy import TrialOutcome
from tests.support.run_logs import run_records, write_log


def made(root: Path, name: str) -> TrialPaths:
    paths = TrialPaths(root / "math" / name)
    paths.job.parent.mkdir(parents=True)
    write_config(Config(trial=name), paths.config)
    return paths


def test_damaged_job_file_is_one_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    TrialJob.write(made(tmp_path, "whole"), "12")
    made(tmp_path, "damaged").job.write_text("{")
    assert main(["list", str(tmp_path)]) == 0
    rows = {words[0]: words[1:] for line in capsys.readouterr().out.splitlines() if (words := line.split())}
    assert "unreadable" in rows["math/damaged"] and "12" in rows["math/whole"]


def test_row_has_what_a_run_came_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(made(tmp_path, "t"), run_records()[:-2])
    made(tmp_path, "empty")
    assert main(["list", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:6] == ["trial", "state", "step", "reward", "held", "out"]
    assert max(map(len, lines)) <= 80
    [row] = [line.split() for line in lines if line.startswith("math/t ")]
    assert row[:5] == ["math/t", "killed", "4/4", "+0.40", "41.0%"]
    assert main(["list", str(tmp_path), "--json"]) == 0
    found = {row["trial"]: row for row in json.loads(capsys.readouterr().out)}
    assert found["math/t"]["accuracy"] == 0.41 and found["math/empty"]["reward"] is None


def test_held_out_column_has_no_other_data_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """However many sets are evaluated. The number is rounded as on the status page."""
    held_out = {"kind": "eval", "eval_id": "after", "set": HELD_OUT, "step": 4, "accuracy": 0.8125}
    others = [{**held_out, "eval_id": f"after.{name}", "set": name, "accuracy": 0.25} for name in "abcdef"]
    write_log(made(tmp_path, "t"), [*run_records()[:-2], held_out, *others])
    assert main(["list", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[4] == "81.3%"


def test_status_names_the_first_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = made(tmp_path, "t")
    failure = FirstFailure("model_worker/1", 12, 100.0, "ModelError: [a] has no b", Path("/x.log"), [])
    write_summary(
        summarise(Config(), paths, TrialOutcome("failed", "x"), started=90.0, ended=100.0, failure=failure), paths
    )
    assert main(["status", str(paths.root)]) == 0
    lines = [line.split(None, 2) for line in capsys.readouterr().out.splitlines()]
    assert ["first", "failure", "model_worker/1: ModelError: [a] has no b"] in lines


def ended(tmp_path: Path) -> TrialPaths:
    paths = made(tmp_path, "t")
    write_log(paths, run_records())
    paths.final_model.mkdir()
    write_summary(summarise(Config(), paths, TrialOutcome("done", ""), started=90.0, ended=100.0), paths)
    return paths


def test_copied_trial_shows_its_own_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = ended(tmp_path)
    paths.root.rename(paths.root.with_name("moved"))
    assert main(["status", str(paths.root.with_name("moved"))]) == 0
    out = capsys.readouterr().out
    assert f"{paths.root.with_name('moved')}/model" in out and f"{paths.root}/" not in out and "!" not in out


def test_cut_off_step_log_of_an_ended_trial_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = ended(tmp_path)
    write_log(paths, run_records()[:6])
    assert main(["status", str(paths.root)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("it has 1 of 4 steps: restore it from a copy")
