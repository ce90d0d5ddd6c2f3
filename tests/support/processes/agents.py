"""Agents of other nodes as real processes, which a test can kill and suspend."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from realsys.config.paths import TrialPaths
from realsys.launch.nodes.base import Node
from realsys.launch.nodes.coordinator import Terms, open_nodes
from realsys.launch.plan import ProcessSpec, needs_of
from tests.support.processes.supervised import FOREVER, READY, Trial

BOUND_S = 60.0
#: ends with its agent, as a worker does
WITH_PARENT = "from realsys.cluster.process import die_with_parent; die_with_parent()\n"
WORKER = WITH_PARENT + FOREVER
#: as WORKER; it writes its pid to its log
SHOWN = WITH_PARENT + READY + "print(os.getpid(), flush=True); ready(); signal.pause()"


def start_agent(root: Path, node: str, output: Path, wait_s: float = BOUND_S, *options: str) -> subprocess.Popen[bytes]:
    """Start ``realsys node-agent``; its output goes to the end of ``output``."""
    argv = [sys.executable, "-m", "realsys.launch.cli", "node-agent", "--trial-dir", str(root), "--node", node]
    with output.open("ab") as file:
        return subprocess.Popen(
            [*argv, "--wait", str(wait_s), *options], stdout=file, stderr=file, env=dict(os.environ)
        )


class AgentTrial(Trial):
    """A trial on nodes with real agents. ``agents``: the newest one of each node.

    No process may be on LOCAL: its executor kills the children of this process at the end, which the agents are.
    """

    def __init__(self, folder: Path, lease_s: float, join_s: float = BOUND_S) -> None:
        super().__init__(folder, "a")
        self.root = folder / "trial"
        self.root.mkdir()
        self.open_nodes = self._open
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.started: list[subprocess.Popen[bytes]] = []
        self._terms = Terms("127.0.0.1", lease_s, join_s)

    def output(self, node: str) -> Path:
        return self.folder / f"agent-{node}.txt"

    def start_agent(self, node: str) -> subprocess.Popen[bytes]:
        agent = self.agents[node] = start_agent(self.root, node, self.output(node))
        self.started.append(agent)
        return agent

    @contextlib.asynccontextmanager
    async def _open(self, specs: Sequence[ProcessSpec]) -> AsyncIterator[dict[str, Node]]:
        names = needs_of(specs)
        try:
            async with open_nodes(names, TrialPaths(self.root), self._terms) as nodes:
                for name in names:
                    self.start_agent(name)
                yield nodes
            for agent in self.started:
                await asyncio.to_thread(agent.wait, BOUND_S)
        finally:
            for agent in self.started:
                agent.kill()
                agent.wait(BOUND_S)
