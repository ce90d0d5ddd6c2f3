"""A whole `realsys run` with small scripts in the place of the workers: exit codes, messages, what is left."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

import realsys.launch.run
from realsys.cluster.process import ErrorRecord
from realsys.config.paths import TrialPaths
from realsys.launch.cli import main
from realsys.launch.process_plan import ProcessSpec
from realsys.launch.supervise.supervisor import Supervisor
from realsys.launch.words import own_command, resume_command

pytestmark = pytest.mark.processes

WAIT = "import signal; signal.pause()"
MASTER = """
import json, sys, time
with open({path!r}, "w") as log:
    train = {{"kind": "train", "step": 1, "total": 1, "accuracy": 0.5}}
    for record in ({{"kind": "phase", "phase": "train"}}, train, {{"kind": "phase", "phase": {last!r}}}):
        log.write(json.dumps({{**record, "time": time.time()}}) + "\\n")
{end}
"""
SIZES = {"train_size": 20, "eval_size": 5, "demo_size": 0}
SMALL = [*(f"data.arith.{k}={v}" for k, v in SIZES.items()), "evaluation.problems=5", "warmup.steps=0"]


def failing(paths, exit_code):
    """The end of a MasterWorker that fails because a ModelWorker had failed before it."""
    record = ErrorRecord(1.0, "model_worker", 0, 4242, "here", "ModelError", "no such tensor", "", exit_code)
    return (
        "from pathlib import Path; from realsys.cluster.process import ErrorRecord, write_error\n"
        f"write_error(Path({str(paths)!r}), {record!r}); sys.exit(1)"
    )


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs `realsys run` with a MasterWorker that ends as given, and a ModelWorker that waits."""
    monkeypatch.chdir(tmp_path)
    paths = TrialPaths(tmp_path / "runs" / "arith" / "t")

    def run(end, *overrides, last="train"):
        def scripts(*_):
            bodies = {"model_worker": WAIT, "master_worker": MASTER.format(path=str(paths.steps), end=end, last=last)}
            env = {"PYTHONPATH": str(Path(realsys.launch.run.__file__).parents[2])}
            return [
                ProcessSpec(kind, 0, (sys.executable, "-c", body), paths.logs / f"{kind}-0.log", "end", "", env)  # type: ignore[arg-type]
                for kind, body in bodies.items()
            ]

        monkeypatch.setattr(realsys.launch.run, "plan", scripts)
        return main(["run", "experiment=arith", "--trial", "t", *SMALL, *overrides]), paths

    return run


def test_run_that_is_done_reports_and_returns_zero(command, capsys):
    code, paths = command("", last="done")
    out = capsys.readouterr().out
    assert code == 0
    assert "step 1/1" in out and "arith/t: done" in out
    summary = json.loads(paths.summary.read_text())
    assert (summary["status"], summary["steps"]) == ("done", 1)
    assert paths.curves.is_file()


def test_early_exit_0_of_master_fails_run(command, capsys):
    code, paths = command("")
    assert code == 1 and json.loads(paths.summary.read_text())["status"] == "failed"
    err = capsys.readouterr().err
    assert "the run failed: master_worker/0 (pid " in err and "exited with code 0, before its work was done" in err


def test_failed_run_names_first_failure_returns_one(command, capsys, tmp_path):
    code, paths = command(failing(tmp_path / "runs" / "arith" / "t" / "errors", 1))
    err = capsys.readouterr().err.splitlines()
    assert code == 1
    assert err[0] == "realsys: the run failed: model_worker/0 (pid 4242): ModelError: no such tensor"
    assert "the run ended when master_worker/0 exited with code 1" in err[1]
    assert json.loads(paths.summary.read_text())["failure"]["process"] == "model_worker/0"


def test_failure_that_is_bad_input_returns_two(command, capsys, tmp_path):
    code, _ = command(failing(tmp_path / "runs" / "arith" / "t" / "errors", 2))
    assert code == 2 and "no such tensor" in capsys.readouterr().err


def test_full_disk_and_share_of_workers_reach_supervisor(command, capsys, monkeypatch):
    supervisor = Mock(wraps=Supervisor)
    monkeypatch.setattr(realsys.launch.run, "Supervisor", supervisor)
    monkeypatch.setattr(realsys.launch.run, "full_disk", lambda folder: f"No space left on device: {folder}")
    code, paths = command("sys.exit(1)", "cluster.min_workers_share=0.25")
    _, bounds, *_ = supervisor.call_args.args
    assert bounds.min_share == 0.25
    err = capsys.readouterr().err
    assert code == 1 and f": No space left on device: {paths.root}" in err.splitlines()[0]
    assert "last lines of" not in err


@pytest.mark.parametrize(("signum", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_stops_run_and_sets_exit_code(signum, expected, command, capsys):
    code, paths = command(f"import os, signal; os.kill(os.getppid(), {int(signum)}); signal.pause()")
    assert code == expected
    assert f"stopped by {signum.name}" in capsys.readouterr().err
    assert json.loads(paths.summary.read_text())["status"] == "interrupted"


def test_resume_command_can_be_pasted_into_a_shell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    inside, outside = tmp_path / "runs" / "arith" / "a b", tmp_path.parent / "x"
    assert shlex.split(resume_command(inside, plain=True)) == [*own_command(), "resume", "runs/arith/a b", "--plain"]
    assert shlex.split(resume_command(outside))[-1] == str(outside)


def test_printed_command_starts_this_realsys(tmp_path, monkeypatch):
    """Its name if the shell finds it, else its path."""
    here = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{here}:{os.environ['PATH']}")
    installed = (here / "realsys").is_file()
    assert (own_command() == ["realsys"]) == installed
    monkeypatch.setenv("PATH", str(tmp_path))
    words = own_command()
    assert words[0].startswith(str(here))
    done = subprocess.run([*words, "--version"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("realsys ")
