"""`realsys list` and `realsys status`: the rows of all trials, and how one ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from realsys.config.dump import write_config
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.launch.cli import main
from realsys.launch.processes.failures import FirstFailure
from realsys.launch.processes.restart_policy import Outcome
from realsys.launch.screen.report import summarise, write_summary
from realsys.launch.trial_job import TrialJob


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
    assert rows["math/damaged"] == ["killed", "unreadable"]
    assert rows["math/whole"] == ["killed", "12"]


def test_status_names_the_first_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = made(tmp_path, "t")
    failure = FirstFailure("model_worker/1", 12, 100.0, "ModelError: [a] has no b", Path("/x.log"), [])
    write_summary(summarise(Config(), paths, Outcome("failed", "x"), started=90.0, ended=100.0, failure=failure), paths)
    assert main(["status", str(paths.root)]) == 0
    lines = [line.split(None, 2) for line in capsys.readouterr().out.splitlines()]
    assert ["first", "failure", "model_worker/1: ModelError: [a] has no b"] in lines
