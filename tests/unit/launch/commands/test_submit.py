"""`realsys submit` with a stand-in for sbatch: what stays of a trial whose job may or may not exist."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from realsys.launch.cli import main
from realsys.launch.slurm import slurm_client
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
    monkeypatch.setattr(slurm_client, "_CALL_S", call_s)
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
