"""Contract of a node: a machine that starts processes, signals them and reports their ends.

    Node ── local_executor.py this machine: the launcher starts the processes itself
         └─ coordinator.py    another one: its agent (node_agent.py) has an executor, and takes orders over a socket

A node decides nothing. Which process runs where, what a death means and in which order a run stops is up to the
supervisor, which uses all nodes in the same way.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from realsys.errors import RealsysError, WaitTimeout

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
class ProcessOrder:
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


class Process:
    """A process that was ordered and has not ended. ``pid`` is 0 until the node has started it.

    This class stands for one that could not be started: its signals go nowhere.
    """

    started = 0.0  # monotonic seconds
    pid = 0
    host = ""

    @property
    def id(self) -> ProcessId:
        return ProcessId(self.host, self.pid)

    def signal(self, number: int) -> None:
        """Send a signal to the process alone."""

    def kill(self) -> None:
        """Send SIGKILL to the process and its group."""


@dataclass(slots=True)
class NodeListener:
    """Functions that a node calls on the event loop.

    stop  the node got this signal, which asks it to stop
    fail  the node's connection has failed, so that its processes cannot be watched
    say   takes a line for the user
    """

    stop: Callable[[int], None] = lambda signum: None
    fail: Callable[[Exception], None] = lambda exc: None
    say: Callable[[str], None] = lambda text: None


class SupervisedNode(ABC):
    """One machine. All methods are called on the event loop, and only ``ready`` and ``end`` wait."""

    def __init__(self) -> None:
        self.listener = NodeListener()

    @property
    def address(self) -> str:
        """Address at which other nodes reach this one; "" on a single machine, and while no machine has its place."""
        return ""

    @abstractmethod
    async def ready(self, timeout_s: float) -> None:
        """Return when the node can start processes. Raises WaitTimeout, which names the node, or ConfigError."""

    @abstractmethod
    def start(self, order: ProcessOrder, on_exit: OnExit) -> Process:
        """Start a process. ``on_exit`` is called once, after this has returned, also if it cannot be started."""

    @abstractmethod
    async def end(self, timeout_s: float) -> list[str]:
        """Kill everything that the node has started, with all descendants.

        Returns the names of the descendants that had outlived their process.
        """


async def all_ready(nodes: Mapping[str, SupervisedNode], timeout_s: float) -> None:
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


# ---- messages between the coordinator and the agent of a node, and the file in which agents find the coordinator
#
#     coordinator ──Ping──> agent       Pong     each proves that the other one lives
#                 ──Start─>             Started  pid; or Exited with the problem
#                 ──Signal>             Done
#                 ──End───>             Ended    the agent kills everything, and ends
#                 <──Joined, Exited, StopAsked   notices
#
# An agent says Joined first, with what its machine has. It gets no process before its first Pong has arrived.
#
# They travel on the request-reply stream (``realsys.cluster.stream``): a connection that is cut loses and doubles none
# of them, and of each node only the newest agent may speak. The stream has keys on every address, loopback included: a
# peer that can speak here can start programs.


#: Bounds of what the receiver passes on to the kernel, or shows: another value is refused when it is decoded.
Serial = Annotated[int, msgspec.Meta(ge=0)]
Pid = Annotated[int, msgspec.Meta(ge=0, le=1 << 22)]
SignalNumber = Annotated[int, msgspec.Meta(ge=1, le=64)]
ReturnCode = Annotated[int, msgspec.Meta(ge=-64, le=255)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]

PYTHON = "{python}"  # first word of a command: the Python of the agent, which may be in a container
KILL_MARGIN_S = 2.0  # time in which an agent kills its processes after its lease


def without_python(argv: Sequence[str]) -> list[str]:
    """Return a command for another machine: PYTHON stands for the interpreter of this process."""
    return [PYTHON if argv[0] == sys.executable else argv[0], *argv[1:]]


def with_python(argv: Sequence[str]) -> list[str]:
    """Return a command with the interpreter of this process in the place of PYTHON."""
    return [sys.executable if argv[0] == PYTHON else argv[0], *argv[1:]]


class Ping(msgspec.Struct, frozen=True):
    """Sign of life of the coordinator. It is sent after the reply to the one before has arrived."""

    lease_s: Seconds


class Pong(msgspec.Struct, frozen=True):
    """Reply to Ping. ``incarnation``: of the agent on the stream; another one has taken the place of this one."""

    incarnation: str


class Joined(msgspec.Struct, frozen=True):
    """Notice: an agent can take orders.

    agent        its index on the stream
    name         of its machine, unique in the trial
    host         as its processes write it into their error files
    address      at which other machines reach it
    cpus, memory cores, and free bytes
    gpus         number of GPUs that it may use
    gpu_memory   bytes of the smallest of them; 0: not known
    problem      why its processes could not work; then the run must not use it
    """

    agent: Serial
    incarnation: str
    name: str
    host: str
    address: str
    cpus: Serial
    memory: Serial
    gpus: Serial
    gpu_memory: Serial
    problem: str = ""


class Start(msgspec.Struct, frozen=True):
    """An Order. The coordinator chooses ``serial``, which names the process from then on.

    An agent of another ``incarnation`` ignores it: the coordinator will count the process as lost.
    """

    incarnation: str
    serial: Serial
    argv: list[str]
    env: dict[str, str]
    log: str
    log_bytes: Serial
    keep_last_words: bool
    gpus: list[Serial]


class Started(msgspec.Struct, frozen=True):
    """Reply to Start. ``pid`` is 0 if the process could not be started."""

    pid: Pid


class SendSignal(msgspec.Struct, frozen=True):
    """Signal to a process; ``group``: SIGKILL to the process and its group instead."""

    serial: Serial
    number: SignalNumber
    group: bool = False


class Done(msgspec.Struct, frozen=True):
    """Reply to Signal."""


class EndRun(msgspec.Struct, frozen=True):
    """The last request: kill everything."""

    timeout_s: Seconds


class AllEnded(msgspec.Struct, frozen=True):
    """Reply to End. ``killed``: names of descendants that had outlived their process."""

    killed: list[str]


class Exited(msgspec.Struct, frozen=True):
    """Notice of an Exit."""

    agent: Serial
    serial: Serial
    returncode: ReturnCode
    time: Seconds
    log_end: str
    problem: str


class StopAsked(msgspec.Struct, frozen=True):
    """Notice: the agent got a signal that asks it to stop, and waits for the coordinator's End."""

    agent: Serial
    signal: SignalNumber


class Address(msgspec.Struct, frozen=True):
    """Content of the coordinator's file.

    host, interface, machines  of the configuration (``cluster``): with them an agent finds its own address
    """

    address: str
    coordinator: str  # differs at every start
    lease_s: Seconds
    host: str = "127.0.0.1"
    interface: str = ""
    machines: Serial = 0


def index_of(name: str) -> int:
    """Return the index of an agent on the stream: a hash of its name, so that the newest agent of a name speaks."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")


def write_address(path: Path, address: Address) -> None:
    """Replace the coordinator's file. Atomic: an agent reads all of it or an earlier one."""
    staged = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    staged.write_bytes(msgspec.json.encode(address))
    os.replace(staged, path)


def outlive_agents(path: Path, say: Callable[[str], None]) -> None:
    """Wait for the end of all processes on other nodes, if their coordinator has left its file: they may live."""
    if (earlier := read_address(path)) is not None:
        wait_s = earlier.lease_s + KILL_MARGIN_S
        say(f"the last launcher left agents behind: waiting {wait_s:g} s, until their processes have ended")
        threading.Event().wait(wait_s)
        path.unlink(missing_ok=True)


def read_address(path: Path) -> Address | None:
    """Return the coordinator's file, None if it does not exist. Raises RealsysError if it is malformed."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Address)
    except OSError:  # not written yet, or the folder is not there yet
        return None
    except (ValueError, msgspec.MsgspecError) as exc:
        raise RealsysError(f"{path}: {exc}: it must be written by the launcher of this realsys") from None
