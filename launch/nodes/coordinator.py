"""The machines of a trial as the launcher sees them: one session with each agent, over one bound socket.

    agent ──Joined──> session ──first Pong──> bound to a node, or a spare
                         ├──no Pong for lease_s + margin──> lost: a spare takes the node, or the node waits
                         ├──unreadable message────────────> no more Pings, and so lost
                         └──another agent of its name─────> lost, and the new one joins

consumes     orders of the supervisor; Joined, Exited, StopAsked of the agents
waits for    an agent for each node; its answer to each Ping
ends with    End to every agent, and the removal of the coordinator's file. If it is killed, or an agent does not
             answer, the file stays: the next coordinator waits for the leases of the agents

`agent-ends-first`: an agent counts its lease from its last Pong that has arrived here, which the next Ping proves. The
coordinator counts from that arrival, and adds a margin. So the processes of a lost node have ended when the supervisor
learns of it, unless the agent cannot run: then the leases of its workers fence them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from realsys.cluster.network import join_host_port
from realsys.cluster.stream.master_stream import MasterStream
from realsys.cluster.stream.security import ensure_keys
from realsys.config.device_plan import Needs
from realsys.config.machine import NodeDevices
from realsys.config.paths import TrialPaths
from realsys.errors import ConfigError, DecodeError, RealsysError, WaitTimeout, WorkerLost
from realsys.launch.nodes import orders
from realsys.launch.nodes.local_executor import open_executor
from realsys.launch.nodes.orders import (
    CANNOT_START,
    LOCAL,
    Exit,
    NodeListener,
    OnExit,
    Process,
    ProcessOrder,
    SupervisedNode,
    no_agent,
)

log = logging.getLogger(__name__)
Reply = TypeVar("Reply", bound=msgspec.Struct)

PINGS_PER_LEASE = 5
_ORDER_S = 3600.0  # bound on the answer to an order: a lost agent is found by its Pings
_END_S = 2.0
_LOOK_S = 0.5  # seconds between two questions to the launcher


@dataclass(frozen=True, slots=True)
class Terms:
    """Settings of the socket and of the leases.

    host       address to bind
    lease_s    time without an answer after which a machine is lost
    join_s     time that a process waits for a machine
    agents     ``cluster.host``, ``.interface`` and ``.machines``, from which agents find their addresses
    problem    returns why no more agents can come; "" if they can
    first      name of the launcher's own machine, if it has an agent: it gets the first node
    """

    host: str
    lease_s: float
    join_s: float
    agents: tuple[str, str, int] = ("127.0.0.1", "", 0)
    problem: Callable[[], str] = lambda: ""
    first: str = ""


class AgentStream(MasterStream):
    """The coordinator's end of the stream."""

    kind = "node_agent"

    on_unreadable: Callable[[int, DecodeError], None] = lambda worker, error: None

    def unreadable(self, worker: int, error: DecodeError) -> None:
        """Give up this agent alone."""
        self.on_unreadable(worker, error)


class NodeSession(ABC):
    """Connection to the agent of one machine.

    joined  its notice
    ending  End was sent
    ended   it has answered that no process is left
    """

    joined: orders.Joined
    ending = False
    ended = False

    @abstractmethod
    def ask(self, message: msgspec.Struct, kind: type[Reply], timeout_s: float | None = None) -> asyncio.Future[Reply]:
        """Send an order and return the future of its reply."""


class _Agent(NodeSession):
    """One agent that has joined. ``heard`` is in monotonic seconds, ``heard_at`` in unix seconds."""

    def __init__(self, joined: orders.Joined, stream: AgentStream) -> None:
        self.joined = joined
        self.heard = time.monotonic()
        self.heard_at = time.time()
        self.is_known = False  # True once it has answered: it is bound to a node, or a spare
        self.problem = ""  # why it gets no more Pings
        self.watch: asyncio.Task[None] | None = None
        self._stream = stream

    @property
    def machine(self) -> NodeDevices:
        joined = self.joined
        sizes = (joined.cpus, joined.memory, joined.gpus)
        return NodeDevices(joined.name, *sizes, gpu_memory=joined.gpu_memory)

    def ask(self, message: msgspec.Struct, kind: type[Reply], timeout_s: float | None = None) -> asyncio.Future[Reply]:
        timeout_s = _ORDER_S if timeout_s is None else timeout_s
        name = type(message).__name__
        reply = self._stream.request(self.joined.agent, name, message, kind, timeout_s=timeout_s)
        reply.add_done_callback(self._check)
        return reply

    def _check(self, reply: asyncio.Future[Reply]) -> None:
        if not reply.cancelled() and isinstance(error := reply.exception(), DecodeError):
            self._stream.unreadable(self.joined.agent, error)


class Coordinator:
    """The agents of a trial, and the nodes of its plan. Make it with ``open_nodes``."""

    def __init__(self, needs: Mapping[str, Needs], stream: AgentStream, terms: Terms) -> None:
        self.nodes = {name: RemoteNode(name, terms.join_s, self._address_of) for name in needs}
        self._binding = Binding(needs, terms.first)
        self._stream = stream
        self._terms = terms
        self._agents: dict[int, _Agent] = {}  # index on the stream -> agent
        self._had: dict[str, str] = {}  # node -> machine that has it, or had it last
        self._was_complete = False  # every node has had a machine
        stream.on_unreadable = self._unreadable
        stream.on_notice("Joined", orders.Joined, self._joined)
        stream.on_notice("Exited", orders.Exited, self._exited)
        stream.on_notice("StopAsked", orders.StopAsked, lambda notice: self._listener.stop(notice.signal))

    @property
    def _listener(self) -> NodeListener:
        """Listener of the supervisor. All nodes have it."""
        return next(iter(self.nodes.values())).listener

    def _address_of(self, node: str) -> str:
        return self.nodes[node].address

    # ---- joins

    def _joined(self, notice: orders.Joined) -> None:
        if earlier := self._agents.get(notice.agent):
            self._lose(earlier, earlier.problem or "its agent joined again")
        agent = self._agents[notice.agent] = _Agent(notice, self._stream)
        agent.watch = asyncio.create_task(self._watch(agent))

    async def _watch(self, agent: _Agent) -> None:
        """Ping the agent until it is lost.

        An agent whose message cannot be read gets no more Pings, and is lost when its lease is over.
        """
        try:
            lease_s = self._terms.lease_s
            while True:
                pong = await agent.ask(orders.Ping(lease_s), orders.Pong, self._left_s(agent))
                if pong.incarnation != agent.joined.incarnation:
                    raise WorkerLost("another agent answers")
                agent.heard, agent.heard_at = time.monotonic(), time.time()
                if not agent.is_known:
                    agent.is_known = True
                    self._take(agent)
                await asyncio.sleep(lease_s / PINGS_PER_LEASE)
        except WaitTimeout as error:
            self._stream.lose(agent.joined.agent, str(error))  # refused from now on: its processes count as dead
        except (DecodeError, WorkerLost):
            pass  # unreadable, or another agent of its name has spoken: its Joined follows
        except Exception as exc:
            self._listener.fail(exc)
            return
        await asyncio.sleep(self._left_s(agent))
        silent = f"nothing was heard from its agent for {time.monotonic() - agent.heard:.0f} s"
        self._lose(agent, agent.problem or silent)

    def _unreadable(self, index: int, error: DecodeError) -> None:
        self._stream.lose(index, str(error))
        if agent := self._agents.get(index):
            agent.problem = f"a message of its agent cannot be read: {error}"

    def _left_s(self, agent: _Agent) -> float:
        """Return the time in which the agent must be heard; below 0 after it."""
        return agent.heard + self._terms.lease_s + orders.KILL_MARGIN_S - time.monotonic()

    def _take(self, agent: _Agent) -> None:
        """Bind an agent that has answered, or keep it as a spare."""
        if problem := agent.joined.problem or self._binding.misfit(agent.machine):
            if not self._was_complete:
                self.refuse(ConfigError("cluster.nodes", len(self.nodes), problem))
            else:
                self._listener.say(f"{problem}: it is not used")
            return
        node = self._binding.join(agent.machine)
        log.info("%s joined: host %s, %s", agent.joined.name, agent.joined.host, node or "a spare")
        if node:
            self._bind(node, agent)

    def _bind(self, name: str, agent: _Agent) -> None:
        machine = agent.joined.name
        if self._was_complete and self._had[name] != machine:
            self._listener.say(f"{machine} takes the place of {self._had[name]}, as node {name}")
        self._had[name] = machine
        self.nodes[name].bind(agent)
        self._was_complete = self._was_complete or not self._binding.free
        for node in self.nodes.values():
            node.order_waiting()

    def _lose(self, agent: _Agent, why: str) -> None:
        """Forget the agent. A spare takes its node after the processes have ended."""
        if self._agents.get(agent.joined.agent) is not agent:
            return
        del self._agents[agent.joined.agent]
        if agent.watch is not asyncio.current_task() and agent.watch is not None:
            agent.watch.cancel()
        log.info("%s is lost: %s", agent.joined.name, why)
        if not self._binding.knows(agent.joined.name):
            return
        node, spare = self._binding.leave(agent.joined.name)
        if not node:
            self._listener.say(f"the spare {agent.joined.name} was lost: {why}")
            return
        self.nodes[node].lose(why, agent.heard_at)
        if spare:
            self._bind(node, next(each for each in self._agents.values() if each.joined.name == spare))

    def _exited(self, notice: orders.Exited) -> None:
        agent = self._agents.get(notice.agent)
        node = self._binding.node_of(agent.joined.name) if agent else ""
        if node:
            self.nodes[node].exited(notice)

    # ---- end

    def refuse(self, error: RealsysError) -> None:
        """End every wait for a machine."""
        for name in self._binding.free:
            self.nodes[name].refuse(error)

    async def watch_launcher(self) -> None:
        """End the waits for machines when the launcher has failed. Ends by cancellation."""
        try:
            while True:
                if problem := self._terms.problem():
                    self.refuse(RealsysError(problem))
                await asyncio.sleep(_LOOK_S)
        except Exception as exc:  # the launcher may be code of the user
            self._listener.fail(exc)

    async def end_agents(self) -> bool:
        """End the agents that are left: spares, and those of a run that did not begin.

        Returns False if one has not answered: it may have processes until the end of its lease.
        """
        agents = list(self._agents.values())
        await asyncio.gather(*(end_of_agent(agent, _END_S) for agent in agents))
        return all(agent.ended for agent in agents)

    async def close(self) -> None:
        """Stop all sessions."""
        watches = [agent.watch for agent in self._agents.values() if agent.watch is not None]
        for node in self.nodes.values():
            node.listener = NodeListener()  # requests that are pending now fail
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)


@contextlib.asynccontextmanager
async def open_nodes(
    needs: Mapping[str, Needs], paths: TrialPaths, terms: Terms, inherit: Sequence[int] = ()
) -> AsyncIterator[dict[str, SupervisedNode]]:
    """Return the nodes of a trial by name. ``inherit``: descriptors that processes of this machine keep open.

    ``needs``: node -> what its processes take. Without nodes on other machines no socket is bound.
    """
    others = {name: needs[name] for name in needs if name != LOCAL}
    async with contextlib.AsyncExitStack() as stack:
        nodes: dict[str, SupervisedNode] = {}
        if others:
            nodes |= await stack.enter_async_context(_open_remote(others, paths, terms))
        if LOCAL in needs:
            nodes[LOCAL] = await stack.enter_async_context(open_executor(inherit))
        yield nodes


@contextlib.asynccontextmanager
async def _open_remote(
    needs: Mapping[str, Needs], paths: TrialPaths, terms: Terms
) -> AsyncIterator[Mapping[str, RemoteNode]]:
    # Keys on loopback too: a peer that can speak on this socket can start programs as this user.
    stream = AgentStream(terms.host, keys=ensure_keys(paths.keys))
    coordinator = Coordinator(needs, stream, terms)
    watch = asyncio.create_task(coordinator.watch_launcher())
    try:
        address = orders.Address(stream.address, uuid.uuid4().hex, terms.lease_s, *terms.agents)
        orders.write_address(paths.coordinator, address)
        yield coordinator.nodes
        # Also after an error the file stays: then agents may have processes, and the next launcher must wait.
        if await coordinator.end_agents():
            paths.coordinator.unlink(missing_ok=True)
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await coordinator.close()
        stream.close()


# ---- one node of the plan on another machine, as the launcher sees it
#
#     free ──bind(session)──> bound ──lose──> free        every process of a lost node ends with a named cause
#
# A process that is started while the node is free waits, within a bound, for a machine. The same holds while another
# node is free whose address the process needs.


class _RemoteProcess(Process):
    def __init__(self, node: RemoteNode, serial: int, order: ProcessOrder, on_exit: OnExit) -> None:
        self.order = order
        self.on_exit = on_exit
        self.serial = serial
        self.ordered = False  # True once the order was sent to an agent
        self.waits: asyncio.TimerHandle | None = None  # end of the wait for a machine
        self.started = time.monotonic()
        self._node = node

    def signal(self, number: int) -> None:
        self._node.signal(self, number)

    def kill(self) -> None:
        self._node.signal(self, signal.SIGKILL, group=True)


class RemoteNode(SupervisedNode):
    """A node of the plan. ``address_of``: returns the address of any node, "" while it is free."""

    def __init__(self, name: str, join_s: float, address_of: Callable[[str], str]) -> None:
        super().__init__()
        self.name = name
        self.join_s = join_s
        self._address_of = address_of
        self._session: NodeSession | None = None
        self._refused: RealsysError | None = None
        self._serial = 0
        self._processes: dict[int, _RemoteProcess] = {}
        self._changed = asyncio.Event()

    @property
    def address(self) -> str:
        return self._session.joined.address if self._session else ""

    # ---- the machine

    def bind(self, session: NodeSession) -> None:
        """Take a machine. ``order_waiting`` must follow, for this node and for those that need its address."""
        self._session = session
        self._refused = None
        self._changed.set()

    def order_waiting(self) -> None:
        """Send the orders that have waited for a machine or for an address."""
        for process in list(self._processes.values()):
            if not process.ordered:
                self._order(process)

    def lose(self, why: str, heard: float) -> None:
        """End all processes that the machine had; ``heard``: unix time at which it was heard last."""
        assert self._session is not None
        machine = self._session.joined.name
        shown = self.name if machine == self.name else f"{self.name} ({machine})"
        lost = f"was lost with its node {shown}: {why}"
        self._session = None
        self._changed.clear()
        for process in [process for process in self._processes.values() if process.ordered]:
            self._end_of(process.serial, Exit(-signal.SIGKILL, heard, lost=lost))

    def refuse(self, error: RealsysError) -> None:
        """End every wait for a machine: none can come, or the one that came does not suit."""
        self._refused = error
        self._changed.set()
        for process in [process for process in self._processes.values() if not process.ordered]:
            self._end_of(process.serial, Exit(CANNOT_START, time.time(), problem=str(error)))

    async def ready(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            raise WaitTimeout(no_agent([self.name], timeout_s)) from None
        if self._refused is not None:
            raise self._refused

    # ---- processes

    def start(self, order: ProcessOrder, on_exit: OnExit) -> Process:
        self._serial += 1
        process = self._processes[self._serial] = _RemoteProcess(self, self._serial, order, on_exit)
        self._order(process)
        if not process.ordered:
            problem = str(self._refused or no_agent([self.name], self.join_s))
            ended = Exit(CANNOT_START, time.time(), problem=problem, no_machine=self._refused is None)
            wait_s = 0.0 if self._refused else self.join_s
            process.waits = asyncio.get_running_loop().call_later(wait_s, self._end_of, process.serial, ended)
        return process

    def _order(self, process: _RemoteProcess) -> None:
        """Send the order, if the node has a machine and all addresses are known."""
        order = process.order
        addresses = {name: (self._address_of(at.node), at.port) for name, at in order.addresses.items()}
        if self._session is None or not all(host for host, _ in addresses.values()):
            return
        if process.waits is not None:
            process.waits.cancel()
        process.ordered = True
        process.host = self._session.joined.host
        process.started = time.monotonic()
        message = orders.Start(
            self._session.joined.incarnation,
            process.serial,
            orders.without_python(order.argv),
            {**order.env, **{name: join_host_port(*address) for name, address in addresses.items()}},
            str(order.log),
            order.log_bytes,
            order.keep_last_words,
            list(order.gpus),
        )

        def started(reply: asyncio.Future[orders.Started]) -> None:
            if answered := self._answer(reply):
                process.pid = answered.pid

        self._session.ask(message, orders.Started).add_done_callback(started)

    def signal(self, process: _RemoteProcess, number: int, *, group: bool = False) -> None:
        """Send a signal to a process. One that waits for a machine ends here."""
        if process.serial not in self._processes:
            return
        if process.ordered and self._session is not None:
            order = orders.SendSignal(process.serial, number, group)
            self._session.ask(order, orders.Done).add_done_callback(self._answer)
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
        return [] if self._session is None else await end_of_agent(self._session, timeout_s)

    def _answer(self, reply: asyncio.Future[Reply]) -> Reply | None:
        """Return the answer. An agent that is lost, or will be, gives none, and its processes end with it."""
        if reply.cancelled():
            return None
        match reply.exception():
            case None:
                return reply.result()
            case WorkerLost() | WaitTimeout() | DecodeError():
                return None
            case error:
                assert isinstance(error, Exception)
                self.listener.fail(error)
                return None


async def end_of_agent(session: NodeSession, timeout_s: float) -> list[str]:
    """Have an agent end. Returns the names of the processes that it had to kill."""
    if session.ending:
        return []
    session.ending = True
    try:
        reply = await session.ask(orders.EndRun(timeout_s), orders.AllEnded, 2 * timeout_s + orders.KILL_MARGIN_S)
    except RealsysError:  # lost, silent, or its answer cannot be read: it ends with its lease
        return []
    session.ended = True
    return [f"{name} on {session.joined.host}" for name in reply.killed]


# ---- which machine has which node of the plan. Pure: no I/O, no clock
#
#     machine joins ──> the node that bears its name, else the node that it had, else the first free node that it fits,
#                   │   of those that need GPUs if it has any
#                   └─> a spare, if no node is free
#     machine lost  ──> its node is free ──> the first spare that fits takes it, else the next machine that joins
#
# `one-machine` a node has at most one machine, and a machine at most one node `first` the first node waits for the
# launcher's own machine until that joins: to lose it ends the run in any case `fits` a machine gets only a node whose
# processes it can hold


@dataclass(slots=True)
class Binding:
    """Nodes of a plan with their needs, and the machines that have joined.

    ``first``: name of the launcher's machine, for which the first node is kept; "" without such a machine, and once it
    has joined.
    """

    needs: Mapping[str, Needs]
    first: str = ""
    machine_of: dict[str, str] = field(default_factory=dict)  # node -> machine; bound nodes only
    spares: dict[str, NodeDevices] = field(default_factory=dict)  # machines without a node, in the order of their joins
    _machines: dict[str, NodeDevices] = field(default_factory=dict)
    _last: dict[str, str] = field(default_factory=dict)  # machine -> node that it had last

    @property
    def free(self) -> list[str]:
        """Nodes without a machine, in the order of the plan."""
        return [node for node in self.needs if node not in self.machine_of]

    def knows(self, machine: str) -> bool:
        """Return True if the machine has joined and is not lost."""
        return machine in self._machines

    def node_of(self, machine: str) -> str:
        """Return the node that the machine has, or ""."""
        return next((node for node, name in self.machine_of.items() if name == machine), "")

    def misfit(self, machine: NodeDevices) -> str:
        """Return why no node of the plan suits the machine; "" if one does."""
        nodes = [machine.name] if machine.name in self.needs else list(self.needs)
        problems = [(node, self.needs[node].problem(machine)) for node in nodes]
        if any(not problem for _, problem in problems):
            return ""
        node, problem = next((each for each in problems if each[0] in self.free), problems[0])
        return f"{machine.name} cannot be {node}: {problem}"

    def join(self, machine: NodeDevices) -> str:
        """Add a machine that has joined. Returns the node that it gets, "" if it is a spare."""
        assert machine.name not in self._machines, f"{machine.name} has joined already"
        self._machines[machine.name] = machine
        if machine.name == self.first:
            self._last[machine.name] = next(iter(self.needs))
            self.first = ""
        node = next((node for node in self._wishes(machine) if node in self.free), "")
        if node:
            self._bind(node, machine.name)
        else:
            self.spares[machine.name] = machine
        return node

    def leave(self, name: str) -> tuple[str, str]:
        """Remove a machine that is lost. Returns its node and the spare that takes it; "" for none."""
        del self._machines[name]
        self.spares.pop(name, None)
        node = self.node_of(name)
        if not node:
            return "", ""
        del self.machine_of[node]
        spare = next((each.name for each in self.spares.values() if node in self._wishes(each)), "")
        if spare:
            del self.spares[spare]
            self._bind(node, spare)
        return node, spare

    def _bind(self, node: str, machine: str) -> None:
        self.machine_of[node] = machine
        self._last[machine] = node

    def _wishes(self, machine: NodeDevices) -> list[str]:
        """Nodes that the machine may have, the preferred ones first."""
        if machine.name in self.needs:
            return [machine.name]
        kept = next(iter(self.needs)) if self.first else ""
        fitting = [node for node, needs in self.needs.items() if node != kept and not needs.problem(machine)]
        # A machine with GPUs must not take a node that needs none while another one needs them.
        return sorted(fitting, key=lambda node: (node != self._last.get(machine.name), not self.needs[node].gpus))
