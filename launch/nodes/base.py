"""Contract of a node: a machine that starts processes, signals them and reports their ends.

    Node ── local_executor.py this machine: the launcher starts the processes itself
         └─ remote_node.py    another one: its agent (node_agent.py) has an executor, and takes orders over a socket

A node decides nothing. Which process runs where, what a death means and in which order a run stops is up to the
supervisor, which uses all nodes in the same way.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from realsys.errors import WaitTimeout

LOCAL = "this machine"  # name of the launcher's own node
CANNOT_START = 127  # return code of a process that could not be started, as of a shell
EXIT_NO_MACHINE = 4  # exit code of a launcher that lacks a machine: another start may have one


class MachineMissing(WaitTimeout):
    """Some machines joined in time, others did not: the next start may have better ones."""


class ProcessId(NamedTuple):
    """A process of a trial on several machines; one machine may use a pid that another one uses, too."""

    host: str
    pid: int


@dataclass(frozen=True, slots=True)
class NodePort:
    """A port of a node whose address is known once a machine has taken its place."""

    node: str
    port: int


@dataclass(frozen=True, slots=True)
class Order:
    """A process to start. ``env`` is laid over the environment of the node.

    gpus              indexes of the node's GPUs that the process may use
    addresses         further variables of its environment, with a node's ``host:port``
    log               takes the output; the node moves it to ``.log.1`` when it has more than ``log_bytes``
    keep_last_words   keep a copy of the log's end, because an earlier process has died
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    log: Path
    log_bytes: int
    keep_last_words: bool = False
    gpus: tuple[int, ...] = ()
    addresses: Mapping[str, NodePort] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Exit:
    """End of a process. ``time`` is in unix seconds; of a lost node, the time at which it was heard last.

    log_end  output since the start, up to a bound, if it failed
    lost     why the node counts as dead, if the process ended with its node
    problem  why the process could not be started
    no_machine  a machine was lost, and no other one took its place in time
    """

    returncode: int
    time: float
    log_end: str = ""
    lost: str = ""
    problem: str = ""
    no_machine: bool = False


OnExit = Callable[[Exit], None]


class Process(ABC):
    """A process that was ordered and has not ended. ``pid`` is 0 until the node has started it."""

    started = 0.0  # monotonic seconds
    pid = 0
    host = ""

    @property
    def id(self) -> ProcessId:
        return ProcessId(self.host, self.pid)

    @abstractmethod
    def signal(self, number: int) -> None:
        """Send a signal to the process alone."""

    @abstractmethod
    def kill(self) -> None:
        """Send SIGKILL to the process and its group."""


@dataclass(slots=True)
class Listener:
    """Functions that a node calls on the event loop.

    stop  the node got this signal, which asks it to stop
    fail  the node's connection has failed, so that its processes cannot be watched
    say   takes a line for the user
    """

    stop: Callable[[int], None] = lambda signum: None
    fail: Callable[[Exception], None] = lambda exc: None
    say: Callable[[str], None] = lambda text: None


class Node(ABC):
    """One machine. All methods are called on the event loop, and only ``ready`` and ``end`` wait."""

    def __init__(self) -> None:
        self.listener = Listener()

    @property
    def address(self) -> str:
        """Address at which other nodes reach this one; "" on a single machine, and while no machine has its place."""
        return ""

    @abstractmethod
    async def ready(self, timeout_s: float) -> None:
        """Return when the node can start processes. Raises WaitTimeout, which names the node, or ConfigError."""

    @abstractmethod
    def start(self, order: Order, on_exit: OnExit) -> Process:
        """Start a process. ``on_exit`` is called once, after this has returned, also if it cannot be started."""

    @abstractmethod
    async def end(self, timeout_s: float) -> list[str]:
        """Kill everything that the node has started, with all descendants.

        Returns the names of the descendants that had outlived their process.
        """


async def all_ready(nodes: Mapping[str, Node], timeout_s: float) -> None:
    """Return when all nodes can start processes.

    Raises MachineMissing, WaitTimeout if no machine joined at all (then the next start would fail, too), or another
    error of a node.
    """
    ended = await asyncio.gather(*(node.ready(timeout_s) for node in nodes.values()), return_exceptions=True)
    for error in ended:
        if error is not None and not isinstance(error, WaitTimeout):
            raise error
    if missing := [name for name, error in zip(nodes, ended, strict=True) if error is not None]:
        kind = MachineMissing if len(missing) < len(nodes) else WaitTimeout
        raise kind(no_agent(missing, timeout_s))


def no_agent(names: Sequence[str], timeout_s: float) -> str:
    """Return the message about nodes for which no machine came."""
    shown = f"node{'s' if len(names) > 1 else ''} {', '.join(names)}"
    problem = f"no agent for {shown} joined within {timeout_s:g} s (cluster.connect_timeout_s)"
    return f"{problem}: see the output of the agents"
