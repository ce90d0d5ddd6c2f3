"""One node of the plan on another machine, as the launcher sees it.

    free ──bind(session)──> bound ──lose──> free        every process of a lost node ends with a named cause

A process that is started while the node is free waits, within a bound, for a machine. The same holds while another node
is free whose address the process needs.
"""

from __future__ import annotations

import asyncio
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

import msgspec

from realsys.cluster.network import join_host_port
from realsys.errors import DecodeError, RealsysError, WaitTimeout, WorkerLost
from realsys.launch.nodes import orders
from realsys.launch.nodes.base import CANNOT_START, Exit, Node, OnExit, Order, Process, no_agent

Reply = TypeVar("Reply", bound=msgspec.Struct)


class Session(ABC):
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


class _RemoteProcess(Process):
    def __init__(self, node: RemoteNode, serial: int, order: Order, on_exit: OnExit) -> None:
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


class RemoteNode(Node):
    """A node of the plan. ``address_of``: returns the address of any node, "" while it is free."""

    def __init__(self, name: str, join_s: float, address_of: Callable[[str], str]) -> None:
        super().__init__()
        self.name = name
        self.join_s = join_s
        self._address_of = address_of
        self._session: Session | None = None
        self._refused: RealsysError | None = None
        self._serial = 0
        self._processes: dict[int, _RemoteProcess] = {}
        self._changed = asyncio.Event()

    @property
    def address(self) -> str:
        return self._session.joined.address if self._session else ""

    # ---- the machine

    def bind(self, session: Session) -> None:
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

    def start(self, order: Order, on_exit: OnExit) -> Process:
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
            order = orders.Signal(process.serial, number, group)
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


async def end_of_agent(session: Session, timeout_s: float) -> list[str]:
    """Have an agent end. Returns the names of the processes that it had to kill."""
    if session.ending:
        return []
    session.ending = True
    try:
        reply = await session.ask(orders.End(timeout_s), orders.Ended, 2 * timeout_s + orders.KILL_MARGIN_S)
    except RealsysError:  # lost, silent, or its answer cannot be read: it ends with its lease
        return []
    session.ended = True
    return [f"{name} on {session.joined.host}" for name in reply.killed]
