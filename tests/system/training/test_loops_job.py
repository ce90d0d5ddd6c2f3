"""Training loops of the user: as programs of their own, and as files that the MasterWorker runs."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import realsys
from realsys.config.paths import TrialPaths
from realsys.errors import ConfigError, ScriptError, Stopped
from realsys.loops import train
from realsys.manager.ledger.events import Pinned
from realsys.manager.ledger.journal import read_journal
from realsys.session import FINISH
from tests.support.jobs.jobs import BOUND_S, SMALL, Job, LiveJob, arith, processes_of
from tests.support.jobs.jobs import realsys as command
from tests.support.jobs.jobs import run as run_job
from tests.support.jobs.ledgers import check_ledger

pytestmark = pytest.mark.system

LOOPS = Path(__file__).resolve().parents[3] / "docs" / "examples" / "loops"
FAST = [*SMALL, "warmup.steps=4", "evaluation.problems=0"]


def program(name: str, root: Path, *overrides: str) -> list[str]:
    """Return the command of an example, with a small model, for the trial in ``root``."""
    own = (f"fileroot={root.parents[1]}", f"trial={root.name}")
    return [sys.executable, str(LOOPS / name), *FAST, *own, *overrides]


def test_programs_train_one_after_the_other(tmp_path):
    """GRPO by hand makes the teacher, and distillation its student."""
    first, second = (tmp_path / "runs" / "arith" / name for name in ("grpo", "distill"))
    # its KL needs no verdicts, and a mean of the group leaves no signal here
    done = subprocess.run(program("grpo.py", first), capture_output=True, text=True, timeout=BOUND_S)
    assert done.returncode == 0, done.stdout + done.stderr
    job = Job(first, 0, done.stdout, done.stderr)
    steps = job.records("train")
    assert [step["version"] for step in steps] == [1, 2, 3, 4] and {"script"} <= steps[0].keys()
    assert {"actor_inf", "ref_inf", "actor_train"} == steps[0]["call_seconds"].keys()
    check_ledger(job, batch_groups=8, eta=4, prompts=400)
    teacher = [f"roles.ref.path={first / 'model'}", "train.optimizer.lr=1e-3", "train.optimizer.warmup_fraction=0"]
    done = subprocess.run(program("distill.py", second, *teacher), capture_output=True, text=True, timeout=BOUND_S)
    assert done.returncode == 0, done.stdout + done.stderr
    divergence = [step["script"]["kl"] for step in Job(second, 0, "", "").records("train")]
    assert len(divergence) == 4 and divergence[-1] < divergence[0]


def test_script_makes_its_rows(tmp_path):
    root = tmp_path / "runs" / "arith" / "rows"
    argv = program("curriculum.py", root, "train.total_epochs=0")
    done = subprocess.run(argv, capture_output=True, text=True, timeout=BOUND_S)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = Job(root, 0, done.stdout, done.stderr).records("train")
    assert [step["version"] for step in steps] == [1, 2, 3, 4] and all(step["script"]["digits"] >= 2 for step in steps)
    rows = TrialPaths(root).submitted.read_text("utf-8").splitlines()
    assert 32 <= len(rows) <= 100 and len(set(rows)) > 16
    assert "every check holds" in command("audit", root).stdout


def test_policy_plays_against_a_pinned_version(tmp_path):
    root = tmp_path / "runs" / "arith" / "duel"
    argv = [*program("self_play.py", root, "train.total_steps=7"), "allocation=serve.d2+d1"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=BOUND_S)
    assert done.returncode == 0, done.stdout + done.stderr
    job = Job(root, 0, done.stdout, done.stderr)
    assert [step["version"] for step in job.records("train")] == list(range(1, 8))
    assert all("opponent" in step["metrics"] for step in job.records("train"))
    pins = [event.held for event, _ in read_journal(job.paths.ledger) if isinstance(event, Pinned)]
    assert [held and held.version for held in pins] == [0, 5]
    assert "every check holds" in command("audit", root).stdout


def test_program_is_killed_and_goes_on(tmp_path):
    """The run that it leaves stops with a checkpoint; nothing is lost, and nothing trained twice."""
    root, chance = tmp_path / "runs" / "arith" / "killed", random.Random(7)
    for _ in range(int(os.environ.get("REALSYS_SCRIPT_KILLS", "1"))):
        killed = subprocess.Popen(program("grpo.py", root, "train.total_steps=40"), stdout=subprocess.PIPE, text=True)
        lines = chance.randrange(4, 14)
        for line in killed.stdout:
            lines -= line.startswith(("phase", "step"))
            if lines <= 0:
                break
        time.sleep(chance.random() / 2)
        killed.send_signal(signal.SIGKILL)
        killed.wait(BOUND_S)
        killed.stdout.close()
        deadline = time.monotonic() + BOUND_S
        while processes_of(root):
            assert time.monotonic() < deadline, f"left: {processes_of(root)}"
            time.sleep(0.1)
    steps = len(realsys.Trial(root).steps()) + 2
    done = subprocess.run(program("grpo.py", root, f"train.total_steps={steps}"), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    job = Job(root, 0, done.stdout, done.stderr)
    assert [step["step"] for step in realsys.Trial(root).steps()] == list(range(1, steps + 1))
    check_ledger(job, batch_groups=8, eta=4, prompts=400)
    assert "every check holds" in command("audit", root).stdout


def test_session_outlives_the_trainer(tmp_path):
    """The MasterWorker is killed under a program: the loop begins again after the last checkpoint."""
    root = tmp_path / "runs" / "arith" / "lost"
    begun, held = [], []

    def kill_master():
        launcher = SimpleNamespace(process=own._process, root=root)
        os.kill(LiveJob.pid(launcher, "master_worker/0"), signal.SIGKILL)

    def loop(session):
        begun.append(TrialPaths(root))
        for step in session.steps():
            if step == 3 and len(begun) == 1:
                kill_master()
            batch = session.rollout.prepare_batch()
            if len(begun) == 2 and len(held) == 2:
                with pytest.raises(ConfigError, match="prepare another one"):
                    session.update(held[0])  # of the trainer that was killed
            held.append(batch)
            session.update(batch)
            session.publish()

    settings = [*FAST, f"fileroot={tmp_path / 'runs'}", "checkpoint.every_steps=1"]
    with realsys.Session(settings, trial="lost", quiet=True) as own:
        own.run(loop)
        carry_out = own._carry_out

        def killed_at_the_end(method, *args):
            result = carry_out(method, *args)
            if method == FINISH and len(begun) == 2:
                kill_master()
            return result

        own._carry_out = killed_at_the_end
        trial = own.close()
        with pytest.raises(Stopped, match="the session is closed"):
            next(own.steps())
    assert len(begun) == 3 and [step["step"] for step in trial.steps()] == [1, 2, 3, 4]
    assert trial.summary and trial.summary["status"] == "done" and trial.model
    assert "every check holds" in command("audit", root).stdout


def test_exception_stops_the_run_with_a_checkpoint_and_resume_goes_on(tmp_path, capfd):
    settings = [*FAST, f"fileroot={tmp_path / 'runs'}"]

    def loop(session):
        for step in session.steps():
            batch = session.rollout.prepare_batch()
            row = batch.rows(["behav_logprobs"], only=[0])[0]
            assert row.loss_mask.sum() == len(row.arrays["behav_logprobs"]) and len(row.text) >= row.loss_mask.sum()
            session.actor.train(batch)
            session.publish()
            if step == 2:
                raise ValueError("changed my mind")

    with (
        pytest.raises(ScriptError, match=r"changed my mind \(.*test_loops_job\.py:\d+\)"),
        realsys.Session(settings, trial="mine", quiet=True) as session,
    ):
        session.run(loop)
    said = capfd.readouterr().out
    assert "step 2 is saved, no step is lost" in said and "realsys.Session.resume(" in said
    root = tmp_path / "runs" / "arith" / "mine"
    assert not processes_of(root)
    refused = command("resume", root)
    assert refused.returncode == 2 and "run your script again, or set train.loop=train" in refused.stderr
    with realsys.Session.resume(root, quiet=True) as session:
        assert next(session.steps()) == 3
        session.run(train)
    assert [step["step"] for step in realsys.Trial(root).steps()] == [1, 2, 3, 4]


def test_master_worker_runs_a_file(tmp_path):
    """Also a coroutine function, and a loss of the same file."""
    loop = tmp_path / "mine.py"
    text = (LOOPS / "best_of_n.py").read_text("utf-8")
    async_text = text.replace("\ndef train", "\nasync def train").replace("    for _ in", "    async for _ in")
    for call in ("session.rollout.prepare_batch", "batch.drop", "session.actor.train", "batch.select", "session.log",
                 "session.publish", "session.evaluate_due"):  # fmt: skip
        async_text = async_text.replace(f"{call}(", f"await {call}(")
    loop.write_text(async_text, "utf-8")
    # a fresh model is never right: here every answer that ends is
    own = ["train.ppo.minibatches=1", f"train.loop={loop}", "warmup.steps=120", "data.arith.max_operands=2"]
    root, argv = arith(tmp_path / "runs", "file", *own)
    job = run_job(root, argv).completed()
    steps = job.records("train")
    assert [step["version"] for step in steps] == [1, 2, 3, 4]
    assert all(0 < step["script"]["solved"] <= 1 and step["stats"]["loss"] > 0 for step in steps)


def test_mistakes_are_one_line(tmp_path):
    written = command("init", "loop", tmp_path / "mine.py")
    assert written.returncode == 0 and (tmp_path / "mine.py").read_text("utf-8").startswith('"""The training loop')
    again = command("init", "loop", tmp_path / "mine.py")
    assert again.returncode == 2 and "exists: choose another name" in again.stderr
    for value, problem in {
        tmp_path / "none.py": "cannot be imported: FileNotFoundError",
        f"{tmp_path / 'mine.py'}:loop": "has no attribute 'loop'",
        "fancy": "unknown training loop: use one of evaluate, serve, session, train",
    }.items():
        refused = command("run", *FAST, f"fileroot={tmp_path}", f"train.loop={value}")
        assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1
        assert problem in refused.stderr, refused.stderr
    with pytest.raises(ConfigError, match="must be a list of texts"):
        realsys.Session("experiment=arith")
    with pytest.raises(realsys.api.RealsysError, match=r"train\.total_steps") as caught:
        realsys.Session([*FAST, f"fileroot={tmp_path}", "train.total_steps=-1"], quiet=True)
    assert caught.value.exit_code == 2
    (tmp_path / "bad.py").write_text("def train(session):\n    next(session.steps())\n    return 1 / 0\n")
    root, argv = arith(tmp_path / "runs", "bad", "warmup.steps=0", f"train.loop={tmp_path / 'bad.py'}")
    failed = run_job(root, argv)
    assert failed.returncode == 1 and f"ZeroDivisionError: division by zero ({tmp_path / 'bad.py'}:3)" in failed.stderr
