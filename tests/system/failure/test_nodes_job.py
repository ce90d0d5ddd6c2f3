"""A whole job over two nodes. Its launcher coordinates agents; a spare takes the place of one that is killed."""

import time

import psutil
import pytest

from realsys.launch.commands.audit import audit_trial
from tests.support.jobs.jobs import BOUND_S, arith, processes_of, run, running
from tests.support.processes.agents import start_agent
from tests.support.processes.ports import lasting_ports

pytestmark = [pytest.mark.system, pytest.mark.needs("etcd")]

STEPS = 16
LEASE_S = 4.0
NEXT_STEP_S = 60.0
SETTINGS = [
    *(f"train.total_steps={STEPS}", "evaluation.problems=0", "checkpoint.every_steps=2", "allocation=serve.d1+d2"),
    *("cluster.nodes=2", "cluster.spare_nodes=1", "cluster.host=0.0.0.0"),
    *("name_store=etcd", "cluster.name_store.start=true"),
    *(f"cluster.lease_s={LEASE_S}", "cluster.heartbeat_s=1.0"),
]


def run_with_agent(fileroot, trial, *overrides):
    """Run a job on the machine of one agent, which ends with the job."""
    root, argv = arith(fileroot, trial, *overrides)
    agent = start_agent(root, "hosta", fileroot / "a.txt")
    try:
        job = run(root, argv)
        assert agent.wait(BOUND_S) == 0
    finally:
        agent.kill()
        agent.wait(BOUND_S)
    return job


def test_machine_without_gpus_ends_the_run_at_once(tmp_path):
    """One line and exit code 2 before any worker starts; the agent ends with the run."""
    gpus = ("cluster.nodes=1", "cluster.gpus_per_node=2", "allocation=serve.d1+d1")
    job = run_with_agent(tmp_path, "gpus", *gpus)
    problem = "config: cluster.nodes=1: hosta cannot be node0: its processes need 2 GPUs, 0 are there"
    assert (job.returncode, job.stderr) == (2, f"realsys: {problem}\n")
    assert [log.name for log in job.paths.logs.glob("*")] == ["trackers.log"]


def test_etcd_of_another_run_ends_this_one(tmp_path, etcd_server):
    """It has the port on the first node, and answers. No worker starts."""
    address = f"cluster.name_store.address={etcd_server.address}"
    own = ("cluster.nodes=1", "allocation=serve.d1+d1", "name_store=etcd", "cluster.name_store.start=true", address)
    job = run_with_agent(tmp_path, "port", *own)
    assert job.returncode == 2
    assert f"cluster.name_store.address='{etcd_server.address}': cannot be bound on " in job.stderr
    assert {log.name for log in job.paths.logs.glob("*.log")} == {"name_store-0.log", "trackers.log"}


def kinds_of(agent):
    """Kinds of the workers that the agent runs."""
    children = psutil.Process(agent.pid).children()
    return {part.rpartition(".")[2] for child in children for part in child.cmdline()[3:4]}


def test_spare_takes_the_place_of_a_killed_node(tmp_path):
    [port] = lasting_ports(1)
    root, argv = arith(tmp_path, "nodes", *SETTINGS, f"cluster.name_store.address=127.0.0.1:{port}")
    agents = [start_agent(root, f"host{letter}", tmp_path / f"{letter}.txt") for letter in "abc"]
    try:
        with running(root, argv) as live:
            live.until_step(3)
            [spare] = [agent for agent in agents if not kinds_of(agent)]
            [second] = [agent for agent in agents if kinds_of(agent) and "master_worker" not in kinds_of(agent)]
            assert "model_worker" in kinds_of(second)
            second.kill()
            killed = time.monotonic()
            live.until(lambda: "training continues after step" in live.job.stdout, "the restart of the trainer")
            live.until_step(live.steps_done() + 1)
            took_s = time.monotonic() - killed
            assert "model_worker" in kinds_of(spare)
            live.wait(BOUND_S)
        job = live.job.completed()
        codes = [agent.wait(BOUND_S) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait(BOUND_S)
    assert sorted(codes) == [-9, 0, 0]
    assert took_s < NEXT_STEP_S, f"the next step came after {took_s:.0f} s"
    assert " takes the place of " in job.stdout and "as node node1" in job.stdout
    audit = audit_trial(job.paths)
    assert audit.ok and audit.states["trained"] == STEPS * 8, audit
    assert not processes_of(root)
