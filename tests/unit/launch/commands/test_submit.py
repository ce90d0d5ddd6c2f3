"""`realsys submit` with a stand-in for sbatch: what stays of a trial whose job may or may not exist."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from realsys.cluster.files import FileLock
from realsys.config.paths import TrialPaths
from realsys.launch.cli import main
from realsys.launch.slurm import client
from realsys.launch.slurm import submit as submit_command
from realsys.launch.slurm.client import JobState
from realsys.launch.slurm.trial_job import TrialJob
from tests.support.data.few_rows import FEW_ROWS

SETTINGS = [
    *(
        "experiment=arith",
        *FEW_ROWS,
        "cluster=slurm",
        "cluster.nodes=2",
        "cluster.interface=lo",
        "allocation=serve.d1+d1",
    ),
    *("name_store=etcd", "cluster.name_store.start=true"),
]
Submit = Callable[[str], int]


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Submit:
    """Submit trial runs/arith/t with this script as sbatch. Returns the exit code."""
    (tmp_path / "bin").mkdir()
    monkeypatch.chdir(tmp_path)

    def run(script: str) -> int:
        sbatch = tmp_path / "bin" / "sbatch"
        sbatch.write_text(f"#!/bin/sh\n{script}\n")
        sbatch.chmod(0o755)
        monkeypatch.setenv("PATH", f"{sbatch.parent}:/usr/bin:/bin")
        return main(["submit", *SETTINGS, "--trial", "t", "--detach", "cluster.slurm.partition=main"])

    return run


def test_job_on_loopback_is_refused_before_sbatch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [text for text in SETTINGS if not text.startswith("cluster.interface")]
    assert main(["submit", *settings, "--detach", "cluster.slurm.partition=main", f"fileroot={tmp_path}"]) == 2
    assert "cluster.interface='': the nodes cannot reach each other on loopback" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


MAY_RUN = "the job may have been submitted: look for it with squeue --name=arith-t before you submit again"


@pytest.mark.parametrize(
    ("script", "call_s", "problem"),
    [
        ("exec sleep 60", 0.3, "sbatch did not answer within 0.3 s"),
        ("echo 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 1", 60.0, "Socket timed out"),
    ],
)
def test_folder_of_a_possible_job_stays(
    submit: Submit,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    call_s: float,
    problem: str,
) -> None:
    monkeypatch.setattr(client, "_CALL_S", call_s)
    assert submit(script) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert problem in line and MAY_RUN in line and line.endswith("runs/arith/t stays")
    assert (tmp_path / "runs" / "arith" / "t" / "job" / "job.sh").is_file()


def test_ctrl_c_during_sbatch_keeps_the_folder(
    submit: Submit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Ctrl-C ends sbatch, too. Python waits a quarter of a second for it, in which a slow machine may not run `echo`.
    assert submit("kill -INT $PPID; kill -KILL $$") == 130
    assert MAY_RUN in capsys.readouterr().err
    assert (tmp_path / "runs" / "arith" / "t").is_dir()


def test_folder_of_a_refused_job_is_removed(submit: Submit, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit("echo 'sbatch: error: Invalid account' >&2; exit 1") == 2
    assert "sbatch: Invalid account" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "arith" / "t").exists()


def test_second_submit_of_a_trial_waits_for_the_first(
    submit: Submit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else both are accepted, and job.json names the one that its run refuses."""
    folder = tmp_path / "runs" / "arith" / "t" / "job"
    folder.mkdir(parents=True)
    (folder.parent / "lock").touch()  # marks a trial
    held = FileLock.take(folder / "submitting")
    assert held is not None
    assert submit("echo 7") == 2
    assert "another `realsys submit` of this trial is running: wait for its end" in capsys.readouterr().err
    assert not (folder / "job.json").exists()
    held.release()
    assert submit(f"flock --nonblock {folder}/submitting true && exit 1; echo 7") == 0
    record = TrialJob.read(TrialPaths(folder.parent))
    assert record is not None and record.job == "7"


def test_job_of_another_submit_is_seen_in_time(
    submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was submitted while this command examined the trial, which takes seconds."""
    paths = TrialPaths(tmp_path / "runs" / "arith" / "t")
    monkeypatch.setattr(submit_command, "job_state", lambda job: JobState("RUNNING", "", "node0", ""))

    def examine(*_: object) -> SimpleNamespace:
        paths.job.parent.mkdir(parents=True)
        TrialJob.write(paths, "6")
        return SimpleNamespace(lines=[])

    monkeypatch.setattr(submit_command, "examine", examine)
    assert submit("echo 7") == 2
    assert "job 6 is running on node0: stop it first" in capsys.readouterr().err
    record = TrialJob.read(paths)
    assert record is not None and record.job == "6"
