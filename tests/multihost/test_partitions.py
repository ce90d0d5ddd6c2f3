"""Jobs over hosts whose network fails: `realsys run` on the first host, an agent on each."""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.jobs.jobs import BOUND_S, LiveJob, arith, running
from tests.support.jobs.ledgers import check_ledger, check_recovered, check_staleness
from tests.support.processes.netns import ROOT, Hosts, environment

#: the command, without the rule that a lease is longer than an election of etcd on another host
DRIVER = """
import sys
import realsys.launch.prepare
from realsys.launch.cli import main
realsys.launch.prepare.ELECTION_LEASE_S = 0.0
sys.exit(main(sys.argv[1:]))
"""


@dataclass(frozen=True)
class HostJob:
    """A job under way; the output of its agents for the report of a failure."""

    live: LiveJob
    outputs: list[Path]

    def interrupted(self, cut: Callable[[bool], None], seconds: float) -> None:
        """Break the network for some time. ``cut``: called with False to break it, with True to heal it."""
        cut(False)
        try:
            threading.Event().wait(seconds)  # a network that is away for this long is the subject of the test
        finally:
            cut(True)

    def says(self) -> str:
        return self.live.job.report() + "\n".join(
            f"== {path.name}\n{path.read_text()[-3000:]}" for path in self.outputs
        )


@contextlib.contextmanager
def job_on(hosts: Hosts, folder: Path, nodes: int, *overrides: str) -> Iterator[HostJob]:
    """Start a small arith job on the first ``nodes`` hosts. Its agents must end with code 0 after it."""
    own = [f"cluster.nodes={nodes}", f"cluster.interface={hosts.subnet}"]
    root, argv = arith(folder, "job", *overrides, *own)
    argv = [sys.executable, "-c", DRIVER, *argv[argv.index("run") :]]
    outputs = [folder / f"agent-{node}.txt" for node in range(nodes)]
    env = {**environment(), "PYTHONPATH": str(ROOT)}
    agents = []
    try:
        for node, output in enumerate(outputs):
            agent = [sys.executable, "-m", "realsys.launch.cli", "node-agent", "--trial-dir", str(root)]
            with output.open("wb") as file:
                command = hosts.command(node, [*agent, "--node", f"node{node}"])
                agents.append(subprocess.Popen(command, stdout=file, stderr=file, env=env))
        with running(root, hosts.command(0, argv), env=env) as live:
            job = HostJob(live, outputs)
            yield job
        assert [agent.wait(BOUND_S) for agent in agents] == [0] * nodes, job.says()
    finally:
        for agent in agents:
            agent.kill()
            agent.wait(BOUND_S)


@contextlib.contextmanager
def etcd_on(hosts: Hosts, host: int, folder: Path) -> Iterator[str]:
    """Run etcd on a host; yields its address, where it will answer soon."""
    from realsys.workers.name_store import command

    address = f"{hosts.addresses[host]}:2379"
    with (folder / "etcd.log").open("wb") as file:
        argv = hosts.command(host, command(address, "127.0.0.1:2380", folder / "etcd", "hosts"))
        process = subprocess.Popen(argv, stdout=file, stderr=file)
    try:
        yield address
    finally:
        process.kill()
        process.wait(BOUND_S)


# ---- Whole jobs over hosts whose network fails for 30 s: no step is lost, no ticket is lost or trained twice


pytestmark = [pytest.mark.system, pytest.mark.needs("netns"), pytest.mark.needs("etcd")]

PARTITION_S = 30.0
STEPS = 24
SETTINGS = [
    *("allocation=serve.d2+d2", "rollout.workers=2", "warmup.steps=2", "evaluation.problems=0"),
    *(f"train.total_steps={STEPS}", "checkpoint.every_steps=1", "name_store=etcd"),
]


def test_short_partitions_cost_nothing(tmp_path):
    """Trainer and servers part, later all lose etcd; less than a lease each time, so no process ends."""
    with Hosts(5, racks=(0, 0, 1, 1, 2)) as hosts, etcd_on(hosts, 4, tmp_path) as address:
        store = [f"cluster.name_store.address={address}", "cluster.lease_s=60", "weights.transport=memory"]
        with job_on(hosts, tmp_path, 4, *SETTINGS, *store) as running:
            live = running.live
            live.until_step(2)
            running.interrupted(lambda heal: hosts.part(0, 1, heal=heal), PARTITION_S)
            parted = live.steps_done()
            live.until_step(parted + 2)
            running.interrupted(lambda heal: hosts.cut(4, heal=heal), PARTITION_S)
            away = live.steps_done()
            job = live.wait().completed()
    assert parted < away < STEPS == len(job.records("train")), "both partitions began and ended within the training"
    check_ledger(job, batch_groups=8, eta=4, prompts=400)
    check_staleness(job, eta=4)
    assert not list(job.paths.errors.glob("*"))
    shards = list(job.paths.weights().glob("*/model-*"))
    assert shards and all(path.is_symlink() and not path.exists() for path in shards), "the servers' only source: ranks"


def test_etcd_away_beyond_the_lease_loses_nothing(tmp_path):
    """All leases lapse, so every worker ends. All start again, the trainer from its last step."""
    with Hosts(5) as hosts, etcd_on(hosts, 4, tmp_path) as address:
        store = [f"cluster.name_store.address={address}", "cluster.lease_s=20"]
        with job_on(hosts, tmp_path, 4, *SETTINGS, *store) as running:
            running.live.until_step(2)
            running.interrupted(lambda heal: hosts.cut(4, heal=heal), PARTITION_S)
            done = running.live.steps_done()
            job = running.live.wait().completed()
    check_recovered(job, steps=STEPS, at_least=done - 1)


def test_node_away_beyond_the_lease_loses_nothing(tmp_path):
    """The first of two nodes has launcher, MasterWorker, a rank and etcd. All processes of the other one end."""
    with Hosts(2, ipv6=True) as hosts:
        store = ["cluster.name_store.start=true", "cluster.lease_s=20", "weights.transport=memory"]
        with job_on(hosts, tmp_path, 2, *SETTINGS, *store) as running:
            running.live.until_step(2)
            running.interrupted(lambda heal: hosts.cut(0, heal=heal), PARTITION_S)
            done = running.live.steps_done()
            job = running.live.wait().completed()
    check_recovered(job, steps=STEPS, at_least=done - 1)
    assert "was lost with its node node1: nothing was heard from its agent for 22 s" in job.stdout
