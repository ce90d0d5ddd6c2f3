"""State of a trial as its folder tells it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from realsys.config.paths import TrialPaths
from realsys.errors import ConfigError
from realsys.launch.slurm.client import JobState
from realsys.launch.slurm.trial_job import TrialJob, describe_job, trial_state, trials_in
from realsys.launch.trial_folder import TrialLock


def trial(folder: Path, name: str = "a") -> TrialPaths:
    paths = TrialPaths(folder / "math" / name)
    paths.job.parent.mkdir(parents=True)
    return paths


def test_job_is_read_as_written(tmp_path: Path) -> None:
    paths = trial(tmp_path)
    assert TrialJob.read(paths) is None
    TrialJob.write(paths, "12")
    record = TrialJob.read(paths)
    assert record is not None and record.job == "12"


def test_damaged_job_file_is_one_line(tmp_path: Path) -> None:
    paths = trial(tmp_path)
    paths.job.write_text("{")
    with pytest.raises(ConfigError, match="job.json"):
        TrialJob.read(paths)


def test_state_comes_from_job_lock_and_summary(tmp_path: Path) -> None:
    paths = trial(tmp_path)
    assert trial_state(paths, None) == "not started"
    assert trial_state(paths, JobState("PENDING")) == "pending"
    assert trial_state(paths, JobState("CANCELLED")) == "cancelled"
    paths.config.write_text("{}")
    assert trial_state(paths, None) == "killed"
    lock = TrialLock(paths.lock, "a", retry_timeout_s=0.0)
    assert trial_state(paths, None) == "running"
    lock.close()
    paths.summary.write_text('{"status": "done"}')
    assert trial_state(paths, JobState("COMPLETED")) == "done"
    paths.summary.write_text("[")
    assert trial_state(paths, None) == "unreadable"


def test_newest_trial_comes_first(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "old")):
        paths = trial(tmp_path, name)
        TrialJob.write(paths, "1")
        os.utime(paths.job, (1000 - age, 1000 - age))
    (tmp_path / "math" / "other").mkdir()
    assert [paths.root.name for paths in trials_in(tmp_path)] == ["new", "old"]


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (None, "job 7 has ended"),
        (JobState("PENDING", "Resources"), "job 7 is pending, Resources"),
        (JobState("RUNNING", "None", "a1"), "job 7 is running on a1"),
        (JobState("FAILED", "NonZeroExitCode", "a1"), "job 7 is failed"),
    ],
)
def test_state_of_a_job_in_words(state: JobState | None, text: str) -> None:
    assert describe_job("7", state) == text
