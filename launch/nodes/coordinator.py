"""The other nodes of a trial as the launcher sees them: one RemoteNode each, over one bound socket.

    waiting ──agent connects, answers a Ping──> joined ──no answer for lease_s + margin──> lost = waiting
                                                   └──── another agent takes its place ──────┘

consumes     orders of the supervisor; Exited, StopAsked of the agents
waits for    an agent of each node; its answer to each Ping
ends with    End to every agent, and the removal of the coordinator's file. If it is killed, the file stays: the next
             coordinator waits for the leases of the agents

`agent-ends-first`: an agent counts its lease from its last Pong that has arrived here, which the next Ping proves. The
coordinator counts from that arrival, and adds a margin. So the processes of a lost node have ended when the supervisor
learns of it, unless the agent cannot run: then the leases of its workers fence them.

Every process of a lost node ends with a named cause. A process that is started on the node after that waits for another
agent, within a bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
import uuid
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from realsys.config.paths import TrialPaths
from realsys.errors import StreamError, WaitTimeout, WorkerLost
from realsys.launch.nodes import orders
from realsys.launch.nodes.base import CANNOT_START, LOCAL, Exit, Listener, Node, OnExit, Order, Process
from realsys.launch.nodes.local_executor import open_executor
from realsys.stream.request_reply import MasterStream
from realsys.stream.security import ensure_keys

log = logging.getLogger(__name__)
Reply = TypeVar("Reply", bound=msgspec.Struct)

PINGS_PER_LEASE = 5
_JOIN_LOOK_S = 3600.0


@dataclass(frozen=True, slots=True)
class Terms:
    """Settings of the socket and of the leases.

    host       address to bind
    lease_s    time without an answer after which a node is lost
    join_s     time that a process waits for an agent of its node
    """

    host: str
    lease_s: float
    join_s: float


class AgentStream(MasterStream):
    """The coordinator's end of the stream."""

    kind = "node_agent"


class _RemoteProcess(Process):
    def __init__(self, node: RemoteNode, serial: int, order: Order, on_exit: OnExit) -> None:
        self.order = order
        self.on_exit = on_exit
        self.serial = serial
        self.ordered = False  # True once the order was sent to an agent
        self.waits: asyncio.TimerHandle | None = None  # end of the wait for an agent
        self.started = time.monotonic()
        self._node = node

    def signal(self, number: int) -> None:
        self._node.signal(self, number)

    def kill(self) -> None:
        self._node.signal(self, signal.SIGKILL, group=True)


class RemoteNode(Node):
    """One node with an agent. ``index``: of the agent on the stream."""

    def __init__(self, name: str, index: int, stream: MasterStream, terms: Terms) -> None:
        super().__init__()
        self.name = name
        self._index = index
        self._stream = stream
        self._terms = terms
        self._host = ""
        self._incarnation = ""  # that of the agent on the stream
        self._serial = 0
        self._processes: dict[int, _RemoteProcess] = {}
        self._joined = asyncio.Event()

    # ---- the agent

    async def watch(self) -> None:
        """Wait for an agent and ping it until it is lost; again and again, until cancelled."""
        try:
            while True:
                with contextlib.suppress(WaitTimeout):
                    await self._stream.barrier([self._index], _JOIN_LOOK_S)
                    await self._ping()
        except Exception as exc:
            self.listener.fail(exc)

    async def _ping(self) -> None:
        """Return when the agent is lost."""
        heard, heard_at = time.monotonic(), time.time()
        try:
            while True:
                left = heard + self._terms.lease_s + orders.KILL_MARGIN_S - time.monotonic()
                pong = await self._ask(orders.Ping(self._terms.lease_s), orders.Pong, left)
                if self._joined.is_set() and pong.incarnation != self._incarnation:
                    self._lose("another agent took its place", heard_at)
                heard, heard_at = time.monotonic(), time.time()
                if not self._joined.is_set():
                    self._join(pong)
                await asyncio.sleep(self._terms.lease_s / PINGS_PER_LEASE)
        except WaitTimeout:
            why = f"nothing was heard from its agent for {time.monotonic() - heard:.0f} s"
            self._stream.lose(self._index, why)  # refused from now on: its processes count as dead
            self._lose(why, heard_at)
        except WorkerLost:
            self._lose("another agent took its place", heard_at)

    def _join(self, agent: orders.Pong) -> None:
        log.info("node %s joined: host %s", self.name, agent.host)
        self._host, self._incarnation = agent.host, agent.incarnation
        self._joined.set()
        for process in list(self._processes.values()):
            self._order(process)

    def _lose(self, why: str, heard: float) -> None:
        """End all processes that the agent had. The next agent gets the orders that follow."""
        log.info("node %s is lost: %s", self.name, why)
        if not self._joined.is_set():
            return
        self._joined.clear()
        lost = f"was lost with its node {self.name}: {why}"
        for process in [process for process in self._processes.values() if process.ordered]:
            self._end_of(process.serial, Exit(-signal.SIGKILL, heard, lost=lost))

    # ---- processes

    async def ready(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._joined.wait()
        except TimeoutError:
            raise WaitTimeout(self._no_agent(timeout_s)) from None

    def _no_agent(self, timeout_s: float) -> str:
        return f"no agent of node {self.name} joined within {timeout_s:g} s (cluster.connect_timeout_s): see its output"

    def start(self, order: Order, on_exit: OnExit) -> Process:
        self._serial += 1
        process = self._processes[self._serial] = _RemoteProcess(self, self._serial, order, on_exit)
        if self._joined.is_set():
            self._order(process)
        else:
            problem = self._no_agent(self._terms.join_s)
            ended = Exit(CANNOT_START, time.time(), problem=problem)
            loop = asyncio.get_running_loop()
            process.waits = loop.call_later(self._terms.join_s, self._end_of, process.serial, ended)
        return process

    def _order(self, process: _RemoteProcess) -> None:
        if process.waits is not None:
            process.waits.cancel()
        process.ordered = True
        process.host = self._host
        process.started = time.monotonic()
        order = process.order
        message = orders.Start(
            self._incarnation,
            process.serial,
            list(order.argv),
            dict(order.env),
            str(order.log),
            order.log_bytes,
            order.keep_last_words,
        )

        def started(reply: asyncio.Future[orders.Started]) -> None:
            if answered := self._answer(reply):
                process.pid = answered.pid

        self._ask(message, orders.Started).add_done_callback(started)

    def signal(self, process: _RemoteProcess, number: int, *, group: bool = False) -> None:
        """Send a signal to a process. One that waits for an agent ends here."""
        if process.serial not in self._processes:
            return
        if process.ordered:
            self._ask(orders.Signal(process.serial, number, group), orders.Done).add_done_callback(self._answer)
            return
        # Not in this call: the caller may go through all processes, and the end of one may start others.
        ended = Exit(-number, time.time())
        asyncio.get_running_loop().call_soon(self._end_of, process.serial, ended)

    def exited(self, notice: orders.Exited) -> None:
        """Handle the agent's notice."""
        ended = Exit(notice.returncode, notice.time, notice.log_end, problem=notice.problem)
        self._end_of(notice.serial, ended)

    def _end_of(self, serial: int, ended: Exit) -> None:
        process = self._processes.pop(serial, None)
        if process is not None:
            if process.waits is not None:
                process.waits.cancel()
            process.on_exit(ended)

    async def end(self, timeout_s: float) -> list[str]:
        if not self._joined.is_set():
            return []
        try:
            reply = await self._ask(orders.End(timeout_s), orders.Ended, 2 * timeout_s + orders.KILL_MARGIN_S)
        except (WaitTimeout, WorkerLost, StreamError) as exc:  # it ends with its lease
            log.info("node %s: the agent did not confirm its end: %s", self.name, exc)
            return []
        return [f"{name} on {self._host}" for name in reply.killed]

    # ---- requests

    def _ask(
        self, message: msgspec.Struct, kind: type[Reply], timeout_s: float = _JOIN_LOOK_S
    ) -> asyncio.Future[Reply]:
        return self._stream.request(self._index, type(message).__name__, message, kind, timeout_s=timeout_s)

    def _answer(self, reply: asyncio.Future[Reply]) -> Reply | None:
        """Return the answer. An agent that is lost gives none, and its processes end with it."""
        if reply.cancelled():
            return None
        match reply.exception():
            case None:
                return reply.result()
            case WorkerLost() | WaitTimeout():
                return None
            case error:
                assert isinstance(error, Exception)
                self.listener.fail(error)
                return None


@contextlib.asynccontextmanager
async def open_nodes(
    names: Collection[str], paths: TrialPaths, terms: Terms, inherit: Sequence[int] = ()
) -> AsyncIterator[dict[str, Node]]:
    """Return the nodes of a trial by name. ``inherit``: descriptors that processes of this machine keep open.

    Without names of other nodes no socket is bound.
    """
    others = sorted(set(names) - {LOCAL})
    async with contextlib.AsyncExitStack() as stack:
        nodes: dict[str, Node] = {}
        if others:
            nodes |= await stack.enter_async_context(_open_remote(others, paths, terms))
        if LOCAL in names:
            nodes[LOCAL] = await stack.enter_async_context(open_executor(inherit))
        yield nodes


@contextlib.asynccontextmanager
async def _open_remote(names: Sequence[str], paths: TrialPaths, terms: Terms) -> AsyncIterator[dict[str, RemoteNode]]:
    # Keys on loopback too: a peer that can speak on this socket can start programs as this user.
    stream = AgentStream(terms.host, keys=ensure_keys(paths.keys))
    nodes = [RemoteNode(name, index, stream, terms) for index, name in enumerate(names)]

    def asked(notice: orders.StopAsked) -> None:
        nodes[notice.node].listener.stop(notice.signal)

    stream.on_notice("Exited", orders.Exited, lambda notice: nodes[notice.node].exited(notice))
    stream.on_notice("StopAsked", orders.StopAsked, asked)
    watches = [asyncio.create_task(node.watch()) for node in nodes]
    try:
        address = orders.Address(stream.address, list(names), uuid.uuid4().hex, terms.lease_s)
        orders.write_address(paths.coordinator, address)
        yield dict(zip(names, nodes, strict=True))
        # Not after an error: then agents may have processes, and the next launcher must wait for their leases.
        paths.coordinator.unlink(missing_ok=True)
    finally:
        for node in nodes:
            node.listener = Listener()  # requests that are pending now fail
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        stream.close()
