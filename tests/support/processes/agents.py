"""Agents of other nodes as real processes, which a test can kill and suspend; and ends whose messages a test writes."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import msgspec

from realsys.cluster.stream.security import ensure_keys, load_keys
from realsys.config.paths import TrialPaths
from realsys.launch.nodes import orders
from realsys.launch.nodes.coordinator import AgentStream, Terms, open_nodes
from realsys.launch.nodes.node_agent import AgentEndpoint
from realsys.launch.nodes.orders import SupervisedNode
from realsys.launch.process_plan import ProcessSpec, needs_of
from tests.support.processes.forked import COMMAND, Command, server, start
from tests.support.processes.supervised import FOREVER, READY, Trial

BOUND_S = 60.0
NAME = "hosta"  # of the machine of a FakeAgent, or that a FakeCoordinator orders
#: ends with its agent, as a worker does
WITH_PARENT = "from realsys.cluster.process import die_with_parent; die_with_parent()\n"
WORKER = WITH_PARENT + FOREVER
#: as WORKER; it writes its pid to its log
SHOWN = WITH_PARENT + READY + "print(os.getpid(), flush=True); ready(); signal.pause()"


def start_agent(
    root: Path, node: str, output: Path, wait_s: float = BOUND_S, *options: str, env: Mapping[str, str] | None = None
) -> Command:
    """Start ``realsys node-agent`` with ``env`` over our environment; its output goes to the end of ``output``."""
    argv = [*COMMAND, "node-agent", "--trial-dir", str(root), "--node", node, "--wait", str(wait_s), *options]
    with output.open("ab") as file:
        return start(argv, file, file, {**os.environ, **(env or {})})


class AgentTrial(Trial):
    """A trial on nodes with real agents. ``agents``: the newest one of each node.

    No process may be on LOCAL: its executor kills the children of this process at the end, which the agents are.
    """

    def __init__(self, folder: Path, lease_s: float) -> None:
        super().__init__(folder, "a")
        self.root = folder / "trial"
        self.root.mkdir()
        server()  # not a child of the run
        self.open_nodes = self._open
        self.agents: dict[str, Command] = {}
        self.remote: Mapping[str, SupervisedNode] = {}
        self.started: list[Command] = []
        self._terms = Terms("127.0.0.1", lease_s, BOUND_S)

    def output(self, node: str) -> Path:
        return self.folder / f"agent-{node}.txt"

    def start_agent(self, node: str) -> Command:
        agent = self.agents[node] = start_agent(self.root, node, self.output(node))
        self.started.append(agent)
        return agent

    @contextlib.asynccontextmanager
    async def _open(self, specs: Sequence[ProcessSpec]) -> AsyncIterator[dict[str, SupervisedNode]]:
        names = needs_of(specs)
        try:
            async with open_nodes(names, TrialPaths(self.root), self._terms) as nodes:
                self.remote = nodes
                for name in names:
                    self.start_agent(name)
                yield nodes
            for agent in self.started:
                await asyncio.to_thread(agent.wait, BOUND_S)
        finally:
            for agent in self.started:
                agent.kill()
                agent.wait(BOUND_S)


class FakeAgent:
    """An agent whose messages the test writes."""

    def __init__(self, paths: TrialPaths) -> None:
        address = orders.read_address(paths.coordinator)
        assert address is not None
        self.index = orders.index_of(NAME)
        self.endpoint = AgentEndpoint(self.index, address.address, keys=load_keys(paths.keys))
        about = (self.index, self.endpoint.incarnation, NAME, NAME, "127.0.0.1", 2, 1 << 40, 0, 0)
        self.endpoint.notify("Joined", orders.Joined(*about))

    async def answer(self, handler: str, reply: msgspec.Struct) -> None:
        """Answer the next order ``handler``, and all Pings before it."""
        while request := await asyncio.to_thread(self.endpoint.next_request, 60.0):
            if request.handler == handler:
                self.endpoint.reply(request, reply)
                return
            self.endpoint.reply(request, self.pong)

    @property
    def pong(self) -> orders.Pong:
        return orders.Pong(self.endpoint.incarnation)


class FakeCoordinator:
    """A coordinator whose orders the test writes; inside of the event loop."""

    def __init__(self, paths: TrialPaths) -> None:
        self.joined: asyncio.Queue[orders.Joined] = asyncio.Queue()
        self.stream = AgentStream("127.0.0.1", keys=ensure_keys(paths.keys))
        self.exits: list[orders.Exited] = []
        self.stream.on_notice("Joined", orders.Joined, self.joined.put_nowait)
        self.stream.on_notice("Exited", orders.Exited, self.exits.append)
        orders.write_address(paths.coordinator, orders.Address(self.stream.address, "c", 60.0))

    async def order(self, handler: str, message: msgspec.Struct, kind: type[msgspec.Struct]) -> msgspec.Struct:
        return await self.stream.request(orders.index_of(NAME), handler, message, kind, timeout_s=60.0)
