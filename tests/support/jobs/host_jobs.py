"""A job over several hosts of a test: `realsys run` on the first one, an agent on each node."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.jobs.jobs import BOUND_S, LiveJob, arith, running
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
