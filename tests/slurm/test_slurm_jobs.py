"""Whole jobs on a SLURM of four virtual nodes: their ends, the loss of nodes, the time limit."""

import json
import time
from dataclasses import dataclass
from typing import Any

import pytest

from realsys.observe.step_log import read_steps
from tests.support.faults.plan import Fault, environment
from tests.support.jobs.jobs import processes_of
from tests.support.slurm.trials import FREED_S, SlurmTrial, realsys

pytestmark = [pytest.mark.needs(program) for program in ("slurmctld", "slurmd", "etcd")]

BARE = ("warmup.steps=0", "evaluation.problems=0", "checkpoint.every_steps=2", "cluster.lease_s=8")
LONG = ("train.total_steps=4000", *BARE)
MEDIUM = ("train.total_steps=20", *BARE)


#: The RolloutWorkers hold back all tickets after the last batch, so the final evaluation waits for the file "go".
HELD_EVALUATION = (
    Fault("last-batch", "master_worker/0", "master.batch", "slow", at=4),
    Fault("held", "rollout_worker/*", "rollout.running", "hold", gate="fired-last-batch", until="go"),
)


#: The same after the second batch, until the file "seen": the run is looked at while it trains.
HELD_TRAINING = (
    Fault("second-batch", "master_worker/0", "master.batch", "slow", at=2),
    Fault("held-training", "rollout_worker/*", "rollout.running", "hold", gate="fired-second-batch", until="seen"),
)


@dataclass(frozen=True)
class SideBySide:
    """Two trials that have ended. ``small`` got the signal of its time limit during the final evaluation.

    listed, live  `realsys list` of both, `realsys status` of ``wide``, while they ran
    cut           summary of ``small`` before it was queued again
    """

    wide: SlurmTrial
    small: SlurmTrial
    listed: str
    live: str
    cut: dict[str, Any]


@pytest.fixture(scope="module")
def side_by_side(shared_slurm, tmp_path_factory):
    """One has a light node and two others, and a server on a rank's devices; the other one has the fourth node."""
    folder, held, slurm = tmp_path_factory.mktemp("side_by_side"), tmp_path_factory.mktemp("held"), shared_slurm
    with pytest.MonkeyPatch.context() as patch:
        for name, value in slurm.env.items():
            patch.setenv(name, value)
        kinds = ("cluster.nodes=3", "cluster.cpu_nodes=1", "cluster.slurm.cpu_partition=cpu")
        wide = SlurmTrial(slurm, folder, "wide", *kinds, "allocation=serve.d1+serve.d1|d2", "train.total_steps=12")
        small = SlurmTrial(slurm, folder, "small", "cluster.nodes=1")
        wide.submit(env=environment(HELD_TRAINING, held))
        small.submit(env=environment(HELD_EVALUATION, folder))
        wide.until_steps(1)
        live, listed = realsys("status", str(wide.root)).stdout, realsys("list", str(folder)).stdout
        (held / "seen").touch()
        small.until(lambda: small.log.count("phase evaluate") == 2, "the final evaluation")
        slurm.call("scancel", "--batch", "--signal=USR1", small.job)  # SLURM does the same near the time limit
        master = small.paths.logs / "master_worker-0.log"
        small.until(lambda: "exit 143" in master.read_text(), "the end of the MasterWorker")
        (folder / "go").touch()
        small.until(lambda: "stopped by SIGUSR1" in small.log, "the end of the first life")
        cut = json.loads(small.paths.summary.read_text())
        wide.check_done(12)
        small.check_done(4)
        yield SideBySide(wide, small, listed, live, cut)


def test_two_trials_side_by_side_are_done(side_by_side, slurm):
    wide = side_by_side.wide
    listed = side_by_side.listed
    assert "arith/wide" in listed and "arith/small" in listed and "running" in listed and wide.job in listed
    assert "phase" in side_by_side.live and "no manager answers" not in side_by_side.live
    assert len(list(wide.paths.logs.glob("agent-*.log"))) == 3
    steps = [record for record in read_steps(wide.paths.steps) if record["kind"] == "train"]
    assert all("switch" in record["seconds"] for record in steps), "a server and a rank have used a device in turn"
    keys = list(wide.paths.keys.iterdir())
    assert keys, "the streams of several hosts must have keys"
    shown = realsys("status", str(wide.root))
    assert shown.returncode == 0 and f"job {wide.job}" in shown.stdout and "done" in shown.stdout


def test_final_evaluation_is_repeated_after_a_requeue(side_by_side):
    """The first summary shows no half of it, and the last one all of it."""
    small, cut = side_by_side.small, side_by_side.cut
    assert cut["status"] == "interrupted" and cut["model"] is None
    assert [each["eval_id"] for each in cut["evaluations"]] == ["before"] and cut["accuracy"]["after"] is None
    assert small.steps() == [1, 2, 3, 4], "no step is trained again"
    summary = json.loads(small.paths.summary.read_text())
    assert summary["status"] == "done" and summary["model"]
    assert [(each["eval_id"], each["problems"]) for each in summary["evaluations"]] == [("before", 16), ("after", 16)]


def test_ended_run_frees_all_nodes_soon(side_by_side):
    for trial in (side_by_side.wide, side_by_side.small):
        assert trial.freed_s() < FREED_S, trial.report()


def test_time_limit_saves_and_queues_again(slurm, tmp_path):
    """SLURM itself sends the signal, which it looks for every 30 s. The limit comes near when the run has begun."""
    limit = ("cluster.slurm.time=01:00:00", "cluster.slurm.signal_s=120", "cluster.nodes=2", "cluster.cpu_nodes=1")
    trial = SlurmTrial(slurm, tmp_path, "limit", *LONG, *limit)
    trial.submit()
    trial.until_steps(2)
    ran_s = time.time() - trial.started()
    slurm.call("scontrol", "update", f"jobid={trial.job}", f"timelimit={int(ran_s) // 60 + 2}")
    trial.until(lambda: "stopped by SIGUSR1" in trial.log, "the signal")
    trained = trial.steps()
    assert f"step {trained[-1]} is saved" in trial.log
    slurm.call("scontrol", "update", f"jobid={trial.job}", "timelimit=60")
    trial.until_steps(len(trained) + 1)
    assert trial.steps()[: len(trained) + 1] == list(range(1, len(trained) + 2)), "no step is trained twice"
    _stop(trial)


def test_scancel_leaves_a_checkpoint_and_no_process(slurm, tmp_path):
    trial = SlurmTrial(slurm, tmp_path, "cancel", *LONG, "checkpoint.every_steps=0", "cluster.nodes=2")
    trial.submit()
    trial.until_steps(2)
    slurm.call("scancel", trial.job)
    trial.until_state("CANCELLED", timeout_s=30.0)
    assert json.loads(trial.paths.summary.read_text())["status"] == "interrupted"
    saved = [int(path.name.removeprefix("step-")) for path in trial.paths.checkpoints.glob("step-*")]
    assert max(saved) == trial.steps()[-1], trial.report()
    assert not processes_of(trial.root)


def test_lost_node_is_replaced_by_a_spare(slurm, tmp_path):
    trial = SlurmTrial(
        slurm, tmp_path, "spare", *LONG, "cluster.nodes=3", "cluster.spare_nodes=1", "allocation=serve.d2+d2"
    )
    trial.submit()
    trial.until_steps(3)
    lost = _node_beyond_the_first(trial)
    slurm.kill_node(lost)
    replaced_s = trial.until(lambda: f"takes the place of {lost}" in trial.log, "a spare", timeout_s=60.0)
    recovered_s = replaced_s + trial.until_steps(len(trial.steps()) + 1, timeout_s=60.0 - replaced_s)
    _stop(trial)
    print(f"a spare after {replaced_s:.1f} s, next step after {recovered_s:.1f} s")


def test_tasks_of_a_dead_slurmd_change_nothing(slurm, tmp_path):
    """The job is queued again while processes of its first life still run on a node without slurmd."""
    trial = SlurmTrial(slurm, tmp_path, "stale", *MEDIUM, "cluster.nodes=2")
    trial.submit()
    trial.until_steps(3)
    stale = _node_beyond_the_first(trial)
    slurm.kill_daemon(stale)
    slurm.call("scontrol", "requeue", trial.job)
    trial.until(lambda: trial.log.count("agents on") == 2, "the second life")
    trial.check_done(20)
    assert not slurm.tasks(stale)


def test_lost_first_node_continues_from_the_checkpoint(slurm, tmp_path):
    """The job is queued again without it, and trains to the end."""
    trial = SlurmTrial(slurm, tmp_path, "first", *MEDIUM, "cluster.nodes=2")
    trial.submit()
    trial.until_steps(3)
    lost = trial.first_node()
    slurm.kill_node(lost)
    queued_s = trial.until(lambda: "Restarts=1" in slurm.call("scontrol", "show", "job", trial.job), "the requeue")
    # The other node's processes may have trained until the end of their lease.
    step_s = trial.until_steps(len(trial.steps()) + 1)
    assert trial.first_node() != lost
    trial.check_done(20)
    assert trial.surviving_steps() == list(range(1, 21)), trial.report()
    assert "training continues after step" in trial.log, "not from the beginning"
    print(f"queued again after {queued_s:.1f} s, next step after {queued_s + step_s:.1f} s")


def test_killed_coordinator_frees_the_allocation(slurm, tmp_path):
    trial = SlurmTrial(slurm, tmp_path, "killed", *LONG, "cluster.nodes=2")
    trial.submit()
    trial.until_steps(1)
    [coordinator] = [task for task in slurm.tasks(trial.first_node()) if task.cmdline()[4:5] == ["run"]]
    coordinator.kill()
    trial.until_state("FAILED", timeout_s=FREED_S)
    assert not processes_of(trial.root)


def _stop(trial):
    stopped = realsys("stop", str(trial.root))
    assert stopped.returncode == 0 and "stopped" in stopped.stdout, stopped.stderr + trial.report()
    trial.until_state("FAILED", timeout_s=60.0)  # exit code 143
    trial.check_audit()


def _node_beyond_the_first(trial):
    """Return a node with processes of the run that does not have its batch script."""
    kinds = ("workers.model_worker", "workers.generation_server", "workers.rollout_worker")
    nodes = {trial.node_of(kind) for kind in kinds}
    return sorted(nodes - {trial.first_node()})[0]
