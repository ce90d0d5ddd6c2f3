"""`realsys run` of a trial that exists: what goes on, what is refused and left alone. Scripts stand in for workers."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

import realsys.launch.conclude
import realsys.launch.run
from realsys.cluster.names.connect import trial_names
from realsys.cluster.names.file_store import FileNameStore
from realsys.cluster.process import ErrorRecord, read_errors, write_error
from realsys.config.compose import compose
from realsys.config.paths import read_config
from realsys.config.schema import Config
from realsys.errors import ConfigError
from realsys.launch.prepare import prepare, resolve
from realsys.launch.trial_folder import TrialLock, running_launcher
from realsys.launch.words import own_command
from realsys.manager.ledger.events import Opened
from realsys.manager.ledger.journal import Journal
from tests.support.scripted_runs import CTRL_C, DONE, RUN, STOPPED, Runs

pytestmark = pytest.mark.processes


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Runs(tmp_path, monkeypatch)


@pytest.fixture
def refused(run, capsys):
    """The one line with which the command refuses; the trial's folder is as it was."""

    def call(*overrides, **kwargs):
        before = run.contents()
        capsys.readouterr()
        assert run(*overrides, **kwargs) == 2  # type: ignore[arg-type]
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and "Traceback" not in err
        assert run.contents() == before
        return err

    return call


# ---- going on


def test_ctrl_c_message_is_a_command_that_resumes(run, capsys):
    assert run(records=STOPPED, end=CTRL_C) == 130
    token = run.paths.token.read_text()
    err = capsys.readouterr().err
    kept = "2 trained steps are lost: there is no checkpoint\n  to continue"
    assert err.startswith(f"realsys: stopped by SIGINT; {kept}: {shlex.join(own_command())} resume runs/arith/t\n")
    words = shlex.split(err.split("to continue: ")[1])
    argv = words[words.index("resume") :]
    assert run(argv=argv, records=[{"kind": "recovered", "step": 1}, *DONE[2:]]) == 0
    out = capsys.readouterr().out
    assert "starting again from the beginning: there is no complete checkpoint yet" in out
    assert out.count("step 1/3") == 0 and out.count("step 2/3") == out.count("step 3/3") == 1
    summary = json.loads(run.paths.summary.read_text())
    assert (summary["status"], summary["steps"], summary["recoveries"]) == ("done", 3, 1)
    assert run.paths.token.read_text() == token


def test_resumed_trial_says_start_point_and_changes(run, capsys):
    run(records=STOPPED, end=CTRL_C)
    run.checkpoint(1), run.checkpoint(2)
    capsys.readouterr()
    assert run("train.optimizer.lr=0.5", "train.total_steps=4") == 0
    out = capsys.readouterr().out
    assert "continuing from step-00000002; 2 steps had been trained" in out
    assert "changed: train.optimizer.lr=0.5 (was 0.0001)" in out and "changed: train.total_steps=4 (was 3)" in out
    assert out.count("changed:") == 2
    assert read_config(run.paths.config).train.optimizer.lr == 0.5


def test_what_the_dead_run_left_is_put_away(run, capsys):
    run(records=STOPPED, end=CTRL_C)
    paths = run.paths
    for _ in range(2):  # a pid that comes again
        write_error(paths.errors, ErrorRecord(1.0, "model_worker", 0, 77, "here", "ModelError", "old", "", 2, True))
        (paths.weights() / "v00000007.1.tmp").mkdir(parents=True)
        (paths.root / "warmed_up.tmp").mkdir()
        (paths.root / "config.json.1.tmp").write_text("{")
        (stale := paths.name_store / "stale").touch()
        kept = paths.weights() / "v00000006.1"
        kept.mkdir(exist_ok=True)
        assert run(records=STOPPED, end="os._exit(1)") == 1
        err = capsys.readouterr().err
        assert "the run failed: master_worker/0" in err and "old" not in err  # what happened now is the cause
        assert f"  to continue: {shlex.join(own_command())} resume runs/arith/t" in err
        assert kept.is_dir() and not list(paths.root.rglob("*.tmp")) and not stale.exists()
    assert len(list((paths.errors / "old").glob("model_worker-0-77*.json"))) == 2
    assert not list(paths.errors.glob("*.json"))


def test_newest_error_files_of_earlier_starts_stay(run):
    run(records=STOPPED, end=CTRL_C)
    old = run.paths.errors / "old"
    for pid in range(120):
        path = write_error(old, ErrorRecord(1.0, "model_worker", 0, pid, "here", "ModelError", "old", ""))
        os.utime(path, (pid, pid))
    write_error(run.paths.errors, ErrorRecord(1.0, "model_worker", 0, 500, "here", "ModelError", "new", ""))
    assert run() == 0
    kept = {error.pid for error in read_errors(old)}
    assert kept == {*range(71, 120), 500}


def test_preparation_that_was_cut_short_is_done_again(run):
    run(records=STOPPED, end=CTRL_C)
    run.paths.config.unlink()
    run.paths.steps.unlink()
    (run.paths.start_model / "model.safetensors").write_bytes(b"half")
    assert run() == 0
    assert len((run.paths.start_model / "model.safetensors").read_bytes()) > 4


def test_token_that_others_could_read_is_made_anew(run: Runs) -> None:
    run(records=STOPPED, end=CTRL_C)
    known = run.paths.token.read_text()
    run.paths.token.chmod(0o644)
    assert run() == 0
    assert run.paths.token.read_text() != known and run.paths.token.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("folder", "what"), [("start_model", "model"), ("data", "data")])
def test_lost_folder_of_a_trial_is_named_with_its_remedy(run, refused, folder, what):
    run(records=STOPPED, end=CTRL_C)
    shutil.rmtree(run.paths.root / folder)
    error = refused()
    assert f"{folder} is missing, the {what} that the first start of this trial made: restore it" in error
    assert f"or copy the {folder} of a new trial with the same settings" in error


def test_resume_without_a_name_means_the_newest_trial(run, refused):
    assert "recover='resume': there is no trial of experiment 'arith'" in refused("recover=resume", trial="")
    assert "trial='t': there is no such trial" in refused("recover=resume")
    run(records=STOPPED, end=CTRL_C)
    assert run("recover=resume", trial="") == 0
    assert json.loads(run.paths.summary.read_text())["trial"] == "t"


def test_dry_run_of_resume_changes_nothing(run, capsys):
    """The dry run says at which step the trial would resume."""
    run(records=STOPPED, end=CTRL_C)
    run.checkpoint(2)
    before = run.contents()
    capsys.readouterr()
    assert run("--dry-run", "train.optimizer.lr=0.5") == 0
    out = capsys.readouterr().out
    assert "continuing from step-00000002" in out and "changed: train.optimizer.lr=0.5" in out
    assert run.contents() == before


def test_damaged_checkpoint_is_named_and_previous_taken(run, capsys):
    run(records=STOPPED, end=CTRL_C)
    run.checkpoint(1)
    (run.checkpoint(2) / "state.json").write_text("{}")
    capsys.readouterr()
    assert run("--dry-run") == 0
    out = capsys.readouterr().out
    assert "damaged: " in out and "step-00000002/state.json is corrupt" in out
    assert "continuing from step-00000001" in out


# ---- refusals


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("seed=2", "seed=2: trial 't' was begun with 1: keep that"),
        ("train.batch_groups=5", "train.batch_groups=5: trial 't' was begun with 4"),
        ("rollout.group_size=9", "rollout.group_size=9: trial 't' was begun with 8"),
        ("model.tiny.hidden_size=64", "model.tiny.hidden_size=64: trial 't' was begun with 128"),
        ("data.arith.train_size=30", "data.arith.train_size=30: trial 't' was begun with 20"),
        ("train.lora.rank=4", "trial='t': is of another model: role 'actor' has lora_rank 0 there, 4 here"),
        ("train.optimizer.name=sgd", "role 'actor' has the state of adam, not of sgd"),
        ("recover=off", "trial='t': exists already"),
    ],
)
def test_what_the_trial_was_made_with_cannot_change(override, problem, run, refused):
    run(records=STOPPED, end=CTRL_C)
    run.checkpoint(2)
    assert problem in refused(override)


def test_role_that_the_checkpoint_lacks_is_refused(run, refused):
    run(records=STOPPED, end=CTRL_C)
    run.checkpoint(2)
    critic = refused("train.ppo.critic.enabled=true", "train.ppo.skip_zero_advantage=false")
    assert "has no role 'critic', which this run trains; it has: actor" in critic


def test_finished_trial_resumes_only_with_raised_limit(run, refused):
    assert run() == 0
    err = refused()
    assert "train.total_steps=3: trial 't' has trained its 3 steps: increase it" in err

    assert run("train.total_steps=4") == 0


def test_no_good_checkpoint_is_refused_by_name(run, refused):
    run(records=STOPPED, end=CTRL_C)
    (run.checkpoint(2) / "state.json").write_text("{}")
    assert "no checkpoint of this trial can be used" in refused()


def test_trial_without_configuration_is_not_recreated(run, refused):
    """With what was trained in it: that would be removed."""
    run(records=STOPPED, end=CTRL_C)
    run.checkpoint(2)
    run.paths.config.unlink()
    assert "t has checkpoints, steps.jsonl and no config.json: restore that, or remove all" in refused()
    run.paths.steps.unlink()
    assert "t has checkpoints and no config.json" in refused()


def test_missing_or_damaged_ledger_is_refused(run, refused):
    run(records=STOPPED, end=CTRL_C)
    run.checkpoint(2)
    with Journal(run.paths.ledger) as journal:
        journal.append([Opened(20, 1, 4, 4, "drop", 8, 1.0)] * 3)
    damaged = bytearray(run.paths.ledger.read_bytes())
    damaged[20] ^= 1
    run.paths.ledger.write_bytes(damaged)
    assert "ledger.jsonl: line 1 is damaged and line 2 after it is not" in refused()
    run.paths.ledger.unlink()
    assert "has checkpoints and no ledger.jsonl" in refused()


def test_copied_trial_keeps_names_of_running_one(run, refused, tmp_path):
    """A copy of a trial's folder, and a name store outside of both."""
    store = FileNameStore(tmp_path / "names")
    outside = [f"cluster.name_store.root={tmp_path / 'names'}", "cluster.lease_s=0.2", "cluster.heartbeat_s=0.1"]
    key = trial_names(Config(experiment="arith", trial="t")).heartbeat("master_worker/0")
    lease = store.lease(600.0)
    store.add(key, "beat", lease=lease)
    assert "trial='t': runs in another folder, with the same name store (realsys/" in refused(*outside)
    assert store.get(key) == "beat" and not run.paths.root.exists()
    lease.revoke()
    assert run(*outside, records=STOPPED, end=CTRL_C) == 130
    lapsing = store.lease(600.0)
    store.add(key, "of a worker that was killed", lease=lapsing)
    said: list[str] = []

    def say(text):
        said.append(text)
        if "leases of its last run to lapse" in text:
            lapsing.revoke()

    with prepare(resolve(compose([*RUN, "trial=t", outside[0]]), now=datetime.now()), say):
        assert any("waiting up to 40 s for 1 leases of its last run to lapse" in text for text in said)
    store.close()


def test_folder_that_is_no_trial_is_refused(run, refused):
    run.paths.root.mkdir(parents=True)
    (run.paths.root / "thesis.txt").write_text("mine")
    assert "exists and is not a trial" in refused()


@pytest.mark.needs("etcd")
def test_own_name_store_address_must_be_free(run, refused):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        own = ["name_store=etcd", "cluster.name_store.start=true", f"cluster.name_store.address={address}"]
        assert f"cluster.name_store.address='{address}': cannot be bound" in refused(*own)
    assert not run.paths.root.exists()
    assert "cluster.name_store.start=True: only etcd" in refused("cluster.name_store.start=true")


# ---- the lock

HOLD = """
import sys
from pathlib import Path
from realsys.launch.trial_folder import TrialLock
lock = TrialLock(Path(sys.argv[1]), "t", retry_timeout_s=0)
lock.sign()
if sys.argv[2:]:
    import subprocess
    subprocess.Popen([sys.executable, "-c", "input()", *sys.argv[2:]], pass_fds=[lock.fd])
print("held", flush=True)
if not sys.argv[2:]:
    input()
"""


@pytest.fixture
def holder():
    """Starts a launcher that holds the lock; with further arguments it leaves a worker that inherited it, and dies."""
    started: list[subprocess.Popen[str]] = []

    def start(path, *worker):
        argv = [sys.executable, "-c", HOLD, str(path), *worker]
        env = {**os.environ, "PYTHONPATH": str(Path(realsys.launch.run.__file__).parents[2])}
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.stdin.close()  # type: ignore[union-attr]
        process.stdout.close()  # type: ignore[union-attr]
        process.wait(60)


def test_trial_of_live_launcher_is_refused_with_pid(run, refused, holder):
    run(records=STOPPED, end=CTRL_C)
    process = holder(run.paths.lock)
    assert f"is run by another launcher, pid {process.pid}" in refused()
    assert f"is run by another launcher, pid {process.pid}" in refused("--dry-run")
    process.kill()
    process.wait(60)
    assert running_launcher(run.paths.lock) is None  # the kernel gave it back
    assert run() == 0


def test_resume_waits_for_worker_of_dead_launcher(tmp_path, holder):
    process = holder(tmp_path / "lock", "--trial-dir", str(tmp_path))
    process.wait(60)
    with pytest.raises(ConfigError, match=r"is still held by processes of its last run, or .* \(pid \d+\)"):
        TrialLock(tmp_path / "lock", "t", retry_timeout_s=0.0)
    process.stdin.close()  # type: ignore[union-attr]  # its worker reads from it, too, and ends
    TrialLock(tmp_path / "lock", "t", retry_timeout_s=60.0).close()
