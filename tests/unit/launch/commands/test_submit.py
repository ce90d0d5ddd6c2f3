"""`realsys submit` with a stand-in for sbatch: what stays of a trial whose job may or may not exist."""

import shlex
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from realsys.cluster.files import FileLock
from realsys.config.paths import TrialPaths, write_config
from realsys.config.schema import Config
from realsys.launch.cli import main
from realsys.launch.slurm import client
from realsys.launch.slurm import submit as submit_command
from realsys.launch.slurm.client import JobState
from realsys.launch.slurm.trial_job import TrialJob
from realsys.launch.words import own_command
from tests.support.data.data_rows import FEW_ROWS

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
def submit(tmp_path, monkeypatch):
    """Submit trial runs/arith/t with this script as sbatch. Returns the exit code."""
    (tmp_path / "bin").mkdir()
    monkeypatch.chdir(tmp_path)

    def run(script):
        sbatch = tmp_path / "bin" / "sbatch"
        sbatch.write_text(f"#!/bin/sh\n{script}\n")
        sbatch.chmod(0o755)
        monkeypatch.setenv("PATH", f"{sbatch.parent}:/usr/bin:/bin")
        return main(["submit", *SETTINGS, "--trial", "t", "--detach", "cluster.slurm.partition=main"])

    return run


def test_job_on_loopback_is_refused_before_sbatch(tmp_path, capsys):
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
def test_folder_of_a_possible_job_stays(submit, tmp_path, capsys, monkeypatch, script, call_s, problem):
    monkeypatch.setattr(client, "_CALL_S", call_s)
    assert submit(script) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert problem in line and MAY_RUN in line and line.endswith("runs/arith/t stays")
    assert (tmp_path / "runs" / "arith" / "t" / "job" / "job.sh").is_file()


def test_ctrl_c_during_sbatch_keeps_the_folder(submit, tmp_path, capsys):
    # Ctrl-C ends sbatch, too. Python waits a quarter of a second for it, in which a slow machine may not run `echo`.
    assert submit("kill -INT $PPID; kill -KILL $$") == 130
    assert MAY_RUN in capsys.readouterr().err
    assert (tmp_path / "runs" / "arith" / "t").is_dir()


def test_folder_of_a_refused_job_is_removed(submit, tmp_path, capsys):
    assert submit("echo 'sbatch: error: Invalid account' >&2; exit 1") == 2
    assert "sbatch: Invalid account" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "arith" / "t").exists()


def test_second_submit_of_a_trial_waits_for_the_first(submit, tmp_path, capsys):
    """Else both are accepted, and job.json names the one that its run refuses."""
    folder = tmp_path / "runs" / "arith" / "t" / "job"
    folder.mkdir(parents=True)
    (folder.parent / "lock").touch()  # marks a trial
    held = FileLock.take(folder / "submitting")
    assert submit("echo 7") == 2
    assert "another `realsys submit` of this trial is running: wait for its end" in capsys.readouterr().err
    assert not (folder / "job.json").exists()
    held.release()
    assert submit(f"flock --nonblock {folder}/submitting true && exit 1; echo 7") == 0
    record = TrialJob.read(TrialPaths(folder.parent))
    assert record is not None and record.job == "7"


def test_job_of_another_submit_is_seen_in_time(submit, tmp_path, monkeypatch, capsys):
    """It was submitted while this command examined the trial, which takes seconds."""
    paths = TrialPaths(tmp_path / "runs" / "arith" / "t")
    monkeypatch.setattr(submit_command, "job_state", lambda job: JobState("RUNNING", "", "node0", ""))

    def examine(*_):
        paths.job.parent.mkdir(parents=True)
        TrialJob.write(paths, "6")
        return SimpleNamespace(lines=[])

    monkeypatch.setattr(submit_command, "examine", examine)
    assert submit("echo 7") == 2
    assert "job 6 is running on node0: stop it first" in capsys.readouterr().err
    record = TrialJob.read(paths)
    assert record is not None and record.job == "6"


# ---- `realsys stop` and the other commands that take the folder of a trial


@pytest.mark.parametrize("command", [["stop"], ["status"], ["logs", "--trial-dir"]])
@pytest.mark.parametrize("folder", ["missing", "."])
def test_folder_without_a_trial_is_bad_input(tmp_path, monkeypatch, capsys, command, folder):
    monkeypatch.chdir(tmp_path)
    assert main([*command, folder]) == 2
    line = f"realsys: config: TRIAL_DIR={folder!r}: is not the folder of a trial: correct the path\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("command", ["audit", "replay", "regrade", "samples", "export", "gc"])
def test_every_command_takes_experiment_and_trial(command, tmp_path, monkeypatch, capsys):
    """The trial under runs/ is found: what a command lacks then is another thing."""
    monkeypatch.chdir(tmp_path)
    paths = TrialPaths(tmp_path / "runs" / "math" / "t")
    paths.root.mkdir(parents=True)
    write_config(Config(trial="t"), paths.config)
    paths.lock.touch()
    main([command, "math/t", *(["out"] if command == "export" else [])])
    said = "".join(capsys.readouterr())
    assert str(paths.root) in said or said == "nothing is left over\n"


@pytest.mark.parametrize(
    "words", [["stop", "--wait", "nan"], ["node-agent", "--trial-dir", "x", "--wait", "-1"], ["logs", "-n", "-5"]]
)
def test_time_and_count_have_bounds(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2 and ": must be a" in capsys.readouterr().err


def test_printed_command_can_be_copied(tmp_path, capsys):
    """The folder has a space, and realsys may not be on the PATH."""
    paths = TrialPaths(tmp_path / "my runs" / "math" / "t")
    (paths.checkpoints / "step-00000003.tmp").mkdir(parents=True)
    write_config(Config(trial="t"), paths.config)
    assert main(["gc", str(paths.root)]) == 0
    command = capsys.readouterr().out.splitlines()[-1].partition("to remove them: ")[2]
    assert shlex.split(command) == [*own_command(), "gc", str(paths.root), "--yes"]


def test_stop_of_an_ended_trial_succeeds(tmp_path, capsys):
    (tmp_path / "lock").touch()
    assert main(["stop", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path} does not run\n"
