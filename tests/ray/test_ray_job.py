"""A whole job on a real Ray cluster of three nodes on this machine: one of them dies, and the job is stopped."""

import contextlib
import os
import signal
from pathlib import Path

import psutil
import pytest

from realsys.launch.commands.audit import audit_trial
from realsys.observe.step_log import surviving_steps
from tests.conftest import SESSION_MARK
from tests.support.jobs.jobs import BOUND_S, arith, processes_of, run, running
from tests.support.jobs.ledgers import check_staleness
from tests.support.polling import poll
from tests.support.processes.ray_cluster import ray_cluster

#: alone: on a busy machine Ray takes its own nodes for dead
pytestmark = [pytest.mark.system, pytest.mark.alone, pytest.mark.needs(package="ray")]


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster(3) as cluster:
        yield cluster


def command(tmp_path, cluster, trial, *overrides):
    host = cluster.address.partition(":")[0]
    return arith(
        tmp_path,
        trial,
        *("cluster=ray", f"cluster.ray.address={cluster.address}", "cluster.ray.timeout_s=60", "cluster.nodes=2"),
        *("allocation=serve.d1+d1", "cluster.cpus_per_node=3", f"cluster.interface={host}/32", "cluster.lease_s=10"),
        *("warmup.steps=2", "evaluation.problems=0", "train.batch_groups=4", "rollout.group_size=2"),
        *("checkpoint.every_steps=2", "cluster.name_store.file_between_hosts=true", *overrides),
    )


def agents_of(root, kind):
    """Return the names of the agents that run processes of this kind now."""
    names = set()
    for line in processes_of(root):
        if f"realsys.workers.{kind}" in line:
            with contextlib.suppress(psutil.NoSuchProcess):
                names.add(psutil.Process(int(line.split()[0])).parent().cmdline()[-1])
    return names


def launcher_parts():
    """Return the command lines of the drivers and actors of any Ray launcher that this session started."""
    mark, found = f"{SESSION_MARK}={os.environ[SESSION_MARK]}", []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            line = " ".join(process.cmdline())
            ours = mark in Path(f"/proc/{process.pid}/environ").read_bytes().decode(errors="replace").split("\0")
            if ours and ("ray_launcher" in line or "AgentActor" in line):
                found.append(line)
    return found


def test_too_small_cluster_is_refused_unwritten(tmp_path, cluster):
    root, argv = command(tmp_path, cluster, "small", "cluster.nodes=4")
    job = run(root, argv)
    assert job.returncode == 2
    assert "4 nodes with CPU 3 each are needed, 3 of 4 have that" in job.stderr
    assert len(job.stderr.splitlines()) == 1 and not root.exists()


def test_stopped_job_leaves_no_process(tmp_path, cluster):
    root, argv = command(tmp_path, cluster, "stopped", "train.total_steps=1000")
    with running(root, argv) as live:
        live.until_step(1)
        assert len(launcher_parts()) == 3, launcher_parts()
        live.process.send_signal(signal.SIGTERM)
        live.wait(BOUND_S)
    assert live.job.returncode == 143, live.job.report()
    assert not processes_of(root)
    poll(lambda: not launcher_parts(), "the end of the actors, which Ray kills", BOUND_S)


def test_job_survives_death_of_ray_node(tmp_path, cluster):
    """The last test of the cluster: it kills one of its nodes, with a rank of the trainer and all RolloutWorkers."""
    steps = 20
    root, argv = command(tmp_path, cluster, "killed", "allocation=serve.d1+d2", f"train.total_steps={steps}")
    with running(root, argv) as live:
        live.until_step(2)
        [lost] = agents_of(root, "rollout_worker")
        [kept] = agents_of(root, "gserver_manager")
        cluster.kill_node(lost.rpartition("-")[2])
        live.until(lambda: "takes the place of" in live.job.stdout, "the replacement of the node")
        done = live.steps_done()
        live.until_step(done + 1)
        assert agents_of(root, "gserver_manager") == {kept}
        assert len(agents_of(root, "model_worker") - {lost}) == 2
        live.wait(BOUND_S)
    job = live.job.completed()
    assert f"the agent of {lost} was lost: its Ray node died" in job.stdout
    audit = audit_trial(job.paths)
    assert audit.ok and audit.states["trained"] == steps * 4, audit
    assert [record["step"] for record in surviving_steps(job.paths.steps) if record["kind"] == "train"] == [
        *range(1, steps + 1)
    ]
    check_staleness(job, eta=4)
    assert not processes_of(root)
