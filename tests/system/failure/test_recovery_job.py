"""Killed or stopped training resumes from its last checkpoint: restarted by the launcher, or by the user."""

import contextlib
import re
import shlex
import signal
import time

import psutil
import pytest

from realsys.cluster.process import read_errors
from realsys.observe.step_log import StepTail
from realsys.train.checkpoint.checkpoint_files import complete_checkpoints
from tests.support.faults.plan import Fault, environment
from tests.support.jobs.jobs import arith, command, processes_of, running
from tests.support.jobs.ledgers import check_complete
from tests.support.processes.ports import lasting_ports

pytestmark = pytest.mark.system


class Hold:
    """Has a run wait before train step ``step`` until ``release``, so that it cannot end before a test has acted."""

    def __init__(self, folder, step, *faults):
        self._folder = folder
        folder.mkdir()
        fault = Fault("hold", "master_worker/0", "master.batch", "hold", at=step, until="released")
        self.env = environment([fault, *faults], folder)

    def release(self):
        (self._folder / "released").touch()


def restarts_shown(job, worker):
    """Count the restarts of this worker in the launcher's output."""
    return len(re.findall(rf"^! {re.escape(worker)} .*; restart \d+/\d+ ", job.stdout, flags=re.MULTILINE))


QUICK = [
    "warmup.steps=2",
    "evaluation.problems=0",
    "train.batch_groups=4",
    "rollout.group_size=2",
    "rollout.workers=1",
    "checkpoint.every_steps=2",
]
STEPS, HELD = 12, 9  # steps of a run; it waits before step HELD until the test has killed a process
SERVING = ("gserver_manager/0", "generation_server/0", "rollout_worker/0")


def kill_and_recover(tmp_path, trial, victim, *settings, steps=STEPS, after=3):
    """Kill ``victim`` of the training side after a step; return the finished job.

    Checks that the whole training side was started again, and that no server was.
    """
    root, argv = arith(tmp_path, trial, *QUICK, f"train.total_steps={steps}", *settings)
    hold = Hold(tmp_path / "hold", HELD)
    with running(root, argv, hold.env) as live:
        live.until_step(after)
        serving = {worker: live.pid(worker) for worker in SERVING}
        assert all(serving.values())
        training = {worker: live.pid(worker) for worker in ("model_worker/0", "master_worker/0")}
        live.kill(victim)
        for worker, pid in training.items():
            live.until(lambda w=worker, p=pid: live.pid(w) not in (None, p), f"{worker} is started again")
        live.until(lambda: live.job.records("recovered"), "training resumes")
        hold.release()
        assert {worker: live.pid(worker) for worker in SERVING} == serving
        job = live.wait()
    summary = check_complete(job, steps)
    assert summary["recoveries"] == 1
    assert [entry["process"] for entry in summary["restarts"]] == [victim]
    assert restarts_shown(job, victim) == 1 and "of the trainer" in job.stdout
    # Its peers may have reported the loss before they were killed.
    assert {error.pid for error in read_errors(job.paths.errors)} <= set(training.values()), job.report()
    return job


def test_training_side_restarts_while_servers_stay_up(tmp_path):
    """One of two ranks dies."""
    kill_and_recover(tmp_path, "killed", "model_worker/1", "allocation=sglang.d1p1m1+d2p1m1")


def test_each_evaluation_has_one_result_across_a_recovery(tmp_path):
    """The master dies at step 5. Evaluations of 2 and 4 may be unfinished, done and not logged, or logged.

    Training resumes from the checkpoint of step 4.
    """
    settings = ["evaluation.every_steps=2", "evaluation.problems=32", "checkpoint.every_steps=4"]
    job = kill_and_recover(tmp_path, "evaluated", "master_worker/0", *settings, steps=10, after=5)
    evaluations = {record["eval_id"]: record for record in job.records("eval")}
    during = [f"step-{step}" for step in (2, 4, 6, 8)]
    assert sorted(record["eval_id"] for record in job.records("eval")) == ["after", "before", *during]
    for record in map(evaluations.get, during):
        due = int(record["eval_id"].removeprefix("step-"))
        assert record["step"] in {due, max(due, 4)} and record["version_min"] >= record["step"], record


def test_resume_after_ctrl_c_repeats_no_step(tmp_path):
    # Time enough for the step under way and a checkpoint, however slow the machine.
    root, argv = arith(tmp_path, "stopped", *QUICK, "train.total_steps=12", "cluster.stop_timeout_s=60.0")
    with running(root, argv) as live:
        live.until_step(3)
        live.process.send_signal(signal.SIGINT)
        job = live.wait()
    assert job.returncode == 130, job.report()
    assert processes_of(root) == []
    done = len(job.records("train"))
    assert job.stderr.startswith(f"realsys: stopped by SIGINT; step {done} is saved, no step is lost\n  to continue: ")
    assert complete_checkpoints(job.paths.checkpoints)[-1][0] == done < 12
    words = shlex.split(job.stderr.split("to continue: ")[1])
    with running(root, [*command()[:-1], *words[words.index("resume") :]]) as live:
        job = live.wait()
    summary = check_complete(job, 12)
    assert f"continuing from step-{done:08d}; {done} steps had been trained" in job.stdout
    assert summary["recoveries"] == 1 and not summary["restarts"]
    trained = [record["step"] for record in StepTail(job.paths.steps).read() if record["kind"] == "train"]
    assert trained == list(range(1, 13))  # the log itself shows that none was undone
    with running(root, argv) as live:
        job = live.wait()
    assert job.returncode == 2 and "train.total_steps=12: trial 'stopped' has trained its 12 steps" in job.stderr


def test_same_command_resumes_after_a_dead_launcher(tmp_path):
    root, argv = arith(tmp_path, "orphaned", *QUICK, f"train.total_steps={STEPS}")
    with running(root, argv, Hold(tmp_path / "hold", HELD).env) as live:
        live.until_step(3)
        live.process.kill()
        live.process.wait(60)
    with running(root, argv) as live:  # immediately: workers of the first run may still be alive
        job = live.wait()
    summary = check_complete(job, STEPS)
    assert summary["recoveries"] == 1 and not summary["restarts"]


def test_training_that_keeps_dying_names_its_first_cause(tmp_path):
    settings = [
        "train.total_steps=100000",
        "cluster.max_restarts=1",
        "checkpoint.every_steps=0",
        "checkpoint.on_stop=false",
    ]
    root, argv = arith(tmp_path, "spent", *QUICK, *settings)
    with running(root, argv) as live:
        live.until_step(1)
        master = live.pid("master_worker/0")
        first = live.kill("model_worker/0")
        live.until(lambda: live.pid("master_worker/0") not in (None, master), "training is started again")
        live.kill("master_worker/0")
        job = live.wait()
    assert job.returncode == 1, job.report()
    assert f"realsys: the run failed: model_worker/0 (pid {first}): was killed by SIGKILL" in job.stderr
    assert (
        "master_worker/0 was killed by SIGKILL (out of memory?), after 1 restarts (cluster.max_restarts)" in job.stderr
    )
    assert "restart 1/1 of the trainer in 0.5 s, from the beginning" in job.stdout
    assert processes_of(root) == []


@pytest.mark.needs("etcd")
def test_run_survives_the_death_of_its_etcd(tmp_path):
    address = f"127.0.0.1:{lasting_ports(1)[0]}"
    store = ["name_store=etcd", "cluster.name_store.start=true", f"cluster.name_store.address={address}"]
    root, argv = arith(tmp_path, "own_etcd", *QUICK, *store, f"train.total_steps={STEPS}")
    hold = Hold(tmp_path / "hold", HELD)
    with running(root, argv, hold.env) as live:
        live.until_step(3)
        [pid] = etcd_of(live.process.pid)
        psutil.Process(pid).kill()
        live.until(lambda: etcd_of(live.process.pid) not in ([], [pid]), "etcd is started again")
        hold.release()
        job = live.wait()
    summary = check_complete(job, STEPS)
    assert [entry["process"] for entry in summary["restarts"]] == ["name_store/0"]
    assert restarts_shown(job, "name_store/0") == 1


def etcd_of(launcher):
    found = []
    for child in psutil.Process(launcher).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name() == "etcd" and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child.pid)
    return found


def test_ctrl_c_saves_while_a_long_step_runs(tmp_path):
    """A step of minutes on two ranks: the stop abandons it, saves the step before, and the next run trains it."""
    settings = ["train.total_steps=5", "allocation=sglang.d1p1m1+d2p1m1", "train.min_microbatches=200"]
    root, argv = arith(tmp_path, "abandoned", *QUICK, *settings, "train.ppo.minibatches=1", "checkpoint.every_steps=0")
    (folder := tmp_path / "faults").mkdir()
    slow = Fault("slow", "model_worker/*", "train.microbatch", "slow", gate="go", seconds=1.0, every=True)
    with running(root, argv, environment([slow], folder)) as live:
        live.until_step(2)
        (folder / "go").touch()
        live.until((folder / "fired-slow").exists, "a slow micro-batch")
        done = live.steps_done()
        began = time.monotonic()
        live.process.send_signal(signal.SIGINT)
        job = live.wait()
    assert job.returncode == 130, job.report()
    assert time.monotonic() - began < 30, "the step would take 200 s"
    assert f"step {done} is saved, no step is lost\n  to continue: " in job.stderr
    assert f"stopping: step {done + 1} is not finished" in job.stdout
    assert complete_checkpoints(job.paths.checkpoints)[-1][0] == done
    assert "killed" not in job.stdout and processes_of(root) == []
    with running(root, argv) as live:
        summary = check_complete(live.wait(), 5)
    assert summary["recoveries"] == 1


def test_dead_reward_service_loses_no_completion(tmp_path):
    """One of two services dies with completions in it. The other one judges them, and it comes back."""
    settings = ["rollout.reward.services=2", f"train.total_steps={STEPS}"]
    root, argv = arith(tmp_path, "services", *QUICK, *settings)
    killed = Fault("killed", "reward_service/*", "reward.judge", "kill", hit=4)
    hold = Hold(tmp_path / "hold", HELD, killed)
    with running(root, argv, hold.env) as live:
        live.until(lambda: "; restart 1/" in live.job.stdout, "a reward service is started again")
        [victim] = re.findall(r"^! (reward_service/\d) was killed", live.job.stdout, flags=re.MULTILINE)
        live.until(lambda: live.pid(victim), f"{victim} runs")
        hold.release()
        job = live.wait()
    summary = check_complete(job, STEPS)
    assert [entry["process"] for entry in summary["restarts"]] == [victim]
    assert not any(record.get("verdict_failures") for record in job.records("train"))
    assert "items go to another service" in (job.paths.logs / "rollout_worker-0.log").read_text()
