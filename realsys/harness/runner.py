"""Runner of a user's agent: a zygote that forks a keeper and an episode for each connection.

    RolloutWorker ──agent──> zygote: imports and builds the agent once
         │                     │ fork, per episode
         └──data──> keeper ────┘ holds the connection, reads the output, counts memory and processes
         <─result──    └─fork─> episode: run(data, base_url, api_key, http_client)

The zygote spares each episode the time of the imports. The keeper is the subreaper of its episode: it finds and kills
every process that the episode started, also one that left its group or ignores signals. It does so when the episode has
ended, when a limit is reached, and when the RolloutWorker closes the connection. If the keeper is killed, the zygote is
the next subreaper and does it. Accidents are kept apart from other episodes; an agent that attacks both is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from .contract import CapturedRun, described, load, problem_of
from .keeper import Keeper, children_of, field_of, kill_all

LENGTH = struct.Struct("!I")
MAX_MESSAGE = 1 << 17  # bytes on the zygote's socket
_TASK_S = 30.0  # bound on the arrival of the row
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(argv: list[str]) -> None:
    """``--check NAME ARGUMENTS``: print the problem of an agent. ``SOCKET PARENT``: serve episodes."""
    if argv[0] == "--check":
        answer = os.dup(1)
        os.dup2(2, 1)  # the module may print
        os.write(answer, json.dumps({"problem": check(argv[1], json.loads(argv[2]))}).encode())
        return
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == int(argv[1]):
        with socket.socket(fileno=int(argv[0])) as control:
            control.set_inheritable(False)
            serve(control)


def check(name: str, arguments: dict[str, Any]) -> str:
    """Return the problem of the agent ``name`` in this interpreter; "" if it has none."""
    try:
        return problem_of(load(name), arguments)
    except (Exception, SystemExit) as error:  # the module is the user's: reported
        return described(error).in_words()


# ---- zygote


def serve(control: socket.socket) -> None:
    """Load the agent, and start a keeper for each connection that arrives, until the socket is closed."""
    first = json.loads(control.recv(MAX_MESSAGE))
    try:
        agent = CapturedRun(load(first["agent"]), first["arguments"], first["timeout_s"])
    except (Exception, SystemExit) as error:  # the module is the user's: reported
        control.send(json.dumps({"failed": described(error)}).encode())
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the module may have changed it
    gc.collect()
    gc.freeze()  # a collection in a fork would copy all pages of the modules
    control.send(json.dumps({"threads": len(os.listdir("/proc/self/task"))}).encode())
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _Zygote(control, agent).serve()


class _Zygote:
    """Start of keepers, and the end of what a killed one leaves."""

    def __init__(self, control: socket.socket, agent: CapturedRun) -> None:
        self._control = control
        self._agent = agent
        self._keepers: dict[int, int] = {}  # pidfd -> pid
        self._of_the_module = children_of(os.getpid())  # processes that its import has started
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    def serve(self) -> None:
        """Start a keeper for each connection that arrives, until the socket is closed."""
        while True:
            for ready, _ in self._poll.poll():
                if ready in self._keepers:
                    self._collect(ready)
                elif not self._start():
                    return

    def _start(self) -> bool:
        """Start a keeper. Returns False if the socket is closed."""
        data, descriptors, _, _ = socket.recv_fds(self._control, MAX_MESSAGE, 1)
        if not data:
            return False
        with socket.socket(fileno=descriptors[0]) as connection:
            try:
                keeper = os.fork()
            except OSError as error:
                send(connection, {"reached": "start", "printed": f"{type(error).__name__}: {error}"})
                return True
            if keeper == 0:
                self._control.close()
                _leave(functools.partial(keep, connection, self._agent, json.loads(data)))
        ended = os.pidfd_open(keeper)
        self._keepers[ended] = keeper
        self._poll.register(ended, select.POLLIN)
        return True

    def _collect(self, ended: int) -> None:
        """Collect a keeper that has ended. If it was killed, its processes are children of the zygote now."""
        self._poll.unregister(ended)
        os.close(ended)
        if os.waitpid(self._keepers.pop(ended), 0)[1] != 0:
            kill_all(spared={*self._keepers.values(), *self._of_the_module})


def keep(connection: socket.socket, agent: CapturedRun, limits: dict[str, Any]) -> None:
    """Start an episode, watch it to its end, kill all that it has left, and send its result."""
    os.setsid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    connection.settimeout(_TASK_S)
    task = _receive(connection)
    connection.settimeout(None)
    result, output = os.pipe(), os.pipe()
    own = os.getpid()
    child = os.fork()
    if child == 0:
        connection.close()
        _leave(functools.partial(_play, agent, task, limits, (result[1], output[1]), own))
    os.close(result[1])
    os.close(output[1])
    keeper = Keeper(child, connection.fileno(), result[0], output[0], limits)
    try:
        keeper.watch()
    finally:
        kill_all()
    message = json.loads(bytes(keeper.result)) if keeper.result and not keeper.reached else {}
    printed = bytes(keeper.printed).decode("utf-8", "replace")
    ended = {"code": keeper.code, "reached": keeper.reached, "printed": printed, "bytes": keeper.bytes}
    send(connection, {**message, **ended})


def _leave(work: Callable[[], None]) -> NoReturn:
    """Do the work of a fork and end the process, whatever happens."""
    code = 1
    try:
        work()
        code = 0
    except BaseException:  # the process boundary: logged
        traceback.print_exc()
    finally:
        os._exit(code)


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send a message behind its length. Does nothing if the other side is closed."""
    data = json.dumps(message).encode()
    with contextlib.suppress(OSError):
        connection.sendall(LENGTH.pack(len(data)) + data)


def _receive(connection: socket.socket) -> dict[str, Any]:
    def exactly(size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            chunk = connection.recv(min(size - len(data), 1 << 20))
            if not chunk:
                raise EOFError("the connection was closed")
            data += chunk
        return bytes(data)

    message: dict[str, Any] = json.loads(exactly(LENGTH.unpack(exactly(LENGTH.size))[0]))
    return message


# ---- episode


def _play(agent: CapturedRun, task: dict[str, Any], limits: dict[str, Any], ends: tuple[int, int], keeper: int) -> None:
    """Run the agent. Its result or its error goes to the first end, its output to the second."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # the kernel may kill the keeper for its memory
    if os.getppid() != keeper:  # it ended before
        return
    os.setsid()
    result, output = ends
    for stream in (1, 2):
        os.dup2(output, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    own = field_of(os.getpid(), "status", "VmData") * 1024  # bytes of the modules
    resource.setrlimit(resource.RLIMIT_DATA, (own + (limits["memory_mb"] << 20),) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        _reseed()
        message = json.dumps({"returned": _returned(agent, task)}, default=_number)
    except BaseException as error:  # the process boundary: the user's code may raise anything; reported
        message = json.dumps({"failed": described(error)})
    with contextlib.suppress(Exception):  # the user may have replaced or closed them
        sys.stdout.flush()
        sys.stderr.flush()
    data = message.encode()
    while data:
        data = data[os.write(result, data) :]


def _reseed() -> None:
    """Seed the random states of this fork anew, as Python does for ``random``."""
    for name in ("numpy.random", "torch"):
        seed = getattr(sys.modules.get(name), "seed", None)
        if seed is not None:
            seed()


def _returned(agent: CapturedRun, task: dict[str, Any]) -> Any:
    arguments = task["data"], task["base_url"], task["api_key"]
    if not agent.is_async:
        return agent.call(*arguments, agent.make_client())

    async def run() -> Any:
        return await agent.call(*arguments, agent.make_client())

    return asyncio.run(run())


def _number(value: Any) -> float:
    """Convert a number of a library, such as numpy's."""
    try:
        return float(value)
    except (TypeError, ValueError):
        problem = f"run returned a {type(value).__name__}: it must return a number, a dict of plain values, or None"
        raise TypeError(problem) from None


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")
