"""Whole jobs on a SLURM of four virtual nodes: their ends, the loss of nodes, the time limit."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.support.jobs.jobs import processes_of
from tests.support.slurm.cluster import VirtualSlurm
from tests.support.slurm.trials import SlurmTrial, realsys

pytestmark = [pytest.mark.needs(program) for program in ("slurmctld", "slurmd", "etcd")]

LONG = ("train.total_steps=4000", "checkpoint.every_steps=2", "cluster.lease_s=8")


def test_two_trials_side_by_side_are_done(slurm: VirtualSlurm, tmp_path: Path) -> None:
    """One has three nodes, the other one has the fourth."""
    wide = SlurmTrial(slurm, tmp_path, "wide", "cluster.nodes=3", "allocation=serve.d2+d2")
    small = SlurmTrial(slurm, tmp_path, "small", "cluster.nodes=1")
    for trial in (wide, small):
        trial.submit()
    wide.until_steps(1)
    listed = realsys("list", str(tmp_path)).stdout
    assert "arith/wide" in listed and "running" in listed and wide.job in listed
    live = realsys("status", str(wide.root)).stdout
    assert "phase" in live and "no manager answers" not in live
    for trial in (wide, small):
        trial.check_done(4)
    assert len(list(wide.paths.logs.glob("agent-*.log"))) == 3
    keys = list(wide.paths.keys.iterdir())
    assert keys, "the streams of several hosts must have keys"
    shown = realsys("status", str(wide.root))
    assert shown.returncode == 0 and f"job {wide.job}" in shown.stdout and "done" in shown.stdout


def test_time_limit_saves_and_queues_again(slurm: VirtualSlurm, tmp_path: Path) -> None:
    """SLURM itself sends the signal, which it looks for every 30 s. The limit comes near when the run has begun."""
    limit = ("cluster.slurm.time=01:00:00", "cluster.slurm.signal_s=120", "cluster.nodes=2")
    trial = SlurmTrial(slurm, tmp_path, "limit", *limit, "train.total_steps=4000")
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


def test_scancel_leaves_a_checkpoint_and_no_process(slurm: VirtualSlurm, tmp_path: Path) -> None:
    trial = SlurmTrial(slurm, tmp_path, "cancel", *LONG, "checkpoint.every_steps=0", "cluster.nodes=2")
    trial.submit()
    trial.until_steps(2)
    slurm.call("scancel", trial.job)
    trial.until_state("CANCELLED", timeout_s=30.0)
    assert json.loads(trial.paths.summary.read_text())["status"] == "interrupted"
    saved = [int(path.name.removeprefix("step-")) for path in trial.paths.checkpoints.glob("step-*")]
    assert max(saved) == trial.steps()[-1], trial.report()
    assert not processes_of(trial.root)


def test_lost_node_is_replaced_by_a_spare(slurm: VirtualSlurm, tmp_path: Path) -> None:
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
    print(f"next step after {recovered_s:.1f} s")


def test_tasks_of_a_dead_slurmd_change_nothing(slurm: VirtualSlurm, tmp_path: Path) -> None:
    """The job is queued again while processes of its first life still run on a node without slurmd."""
    trial = SlurmTrial(
        slurm,
        tmp_path,
        "stale",
        "train.total_steps=60",
        "checkpoint.every_steps=2",
        "cluster.lease_s=8",
        "cluster.nodes=2",
    )
    trial.submit()
    trial.until_steps(3)
    stale = _node_beyond_the_first(trial)
    slurm.kill_daemon(stale)
    slurm.call("scontrol", "requeue", trial.job)
    trial.until(lambda: trial.log.count("agents on") == 2, "the second life")
    trial.check_done(60)
    assert not slurm.tasks(stale)


def test_lost_first_node_queues_the_job_again(slurm: VirtualSlurm, tmp_path: Path) -> None:
    trial = SlurmTrial(slurm, tmp_path, "first", *LONG, "cluster.nodes=2")
    trial.submit()
    trial.until_steps(1)
    slurm.kill_node(trial.first_node())
    show = ("scontrol", "show", "job", trial.job)
    trial.until(lambda: "Restarts=1" in slurm.call(*show), "the job queued again", timeout_s=60.0)


def test_killed_coordinator_frees_the_allocation(slurm: VirtualSlurm, tmp_path: Path) -> None:
    trial = SlurmTrial(slurm, tmp_path, "killed", *LONG, "cluster.nodes=2")
    trial.submit()
    trial.until_steps(1)
    [coordinator] = [task for task in slurm.tasks(trial.first_node()) if task.cmdline()[4:5] == ["run"]]
    coordinator.kill()
    trial.until_state("FAILED", timeout_s=60.0)
    assert not processes_of(trial.root)


def _stop(trial: SlurmTrial) -> None:
    stopped = realsys("stop", str(trial.root))
    assert stopped.returncode == 0 and "stopped" in stopped.stdout, stopped.stderr + trial.report()
    trial.until_state("FAILED", timeout_s=60.0)  # exit code 143
    trial.check_audit()


def _node_beyond_the_first(trial: SlurmTrial) -> str:
    """Return a node with processes of the run that does not have its batch script."""
    kinds = ("workers.model_worker", "workers.generation_server", "workers.rollout_worker")
    nodes = {trial.node_of(kind) for kind in kinds}
    return sorted(nodes - {trial.first_node()})[0]
