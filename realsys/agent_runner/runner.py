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
import glob
import json
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection
from typing import Any, NoReturn

from .contract import CapturedRun, described, load, problem_of

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
    with connection.makefile("rb") as file:
        task = json.loads(file.readline())
    connection.settimeout(None)
    result, output = os.pipe(), os.pipe()
    own = os.getpid()
    child = os.fork()
    if child == 0:
        connection.close()
        _leave(functools.partial(_play, agent, task, limits, (result[1], output[1]), own))
    os.close(result[1])
    os.close(output[1])
    keeper = EpisodeKeeper(child, connection.fileno(), result[0], output[0], limits)
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
    """Send a message as a line. Does nothing if the other side is closed."""
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")


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
        # seed the random states of this fork anew, as Python does for ``random``
        for name in ("numpy.random", "torch"):
            seed = getattr(sys.modules.get(name), "seed", None)
            if seed is not None:
                seed()
        message = json.dumps({"returned": _returned(agent, task)}, default=_number)
    except BaseException as error:  # the process boundary: the user's code may raise anything; reported
        message = json.dumps({"failed": described(error)})
    with contextlib.suppress(Exception):  # the user may have replaced or closed them
        sys.stdout.flush()
        sys.stderr.flush()
    data = message.encode()
    while data:
        data = data[os.write(result, data) :]


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


# ---- keeper of one episode: reads its output, counts its memory and processes, and kills all that it started


MAX_RESULT = 1 << 20  # bytes that run may return, as JSON
PRINTED = 4096  # last bytes of the output that are kept
_LOOK_S = 1.0  # between two measurements of memory and processes
_KILL_S = 5.0  # bound on the end of killed processes


class EpisodeKeeper:
    """Watch over the process ``child``.

    reached  limit that it reached: memory, processes, result; closed: the connection is; "": none
    code     exit code, or minus the signal
    """

    def __init__(self, child: int, connection: int, result: int, output: int, limits: dict[str, Any]) -> None:
        self._child = child
        self._limits = limits
        self._result = result
        self._output = output
        self._ended = os.pidfd_open(child)
        self._poll = select.poll()
        self._poll.register(self._ended, select.POLLIN)
        self._poll.register(connection, select.POLLRDHUP)
        for pipe in (result, output):
            os.set_blocking(pipe, False)
            self._poll.register(pipe, select.POLLIN)
        self.result = bytearray()
        self.printed = bytearray()
        self.bytes = 0  # length of the output
        self.reached = ""
        self.code = -int(signal.SIGKILL)

    def watch(self) -> None:
        """Return when the episode has ended or must be killed."""
        look = time.monotonic() + _LOOK_S
        while not self.reached:
            ready = {descriptor for descriptor, _ in self._poll.poll(_LOOK_S * 1000)}
            printed = self._next(self._output)
            self.bytes += len(printed)
            self.printed = (self.printed + printed)[-PRINTED:]
            self.result += self._next(self._result)
            if len(self.result) > MAX_RESULT:
                self.reached = "result"
            if self._ended in ready:
                self.code = os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])
                return
            if ready - {self._result, self._output}:
                self.reached = "closed"
            elif time.monotonic() > look:
                self.reached = self.reached or reached(self._limits)
                look = time.monotonic() + _LOOK_S

    def _next(self, pipe: int) -> bytes:
        """Read what a pipe holds now: at most 1 MiB, so that the limits are checked while an agent prints."""
        try:
            chunk = os.read(pipe, MAX_RESULT)
        except BlockingIOError:
            return b""
        if not chunk:
            with contextlib.suppress(KeyError):
                self._poll.unregister(pipe)  # it stays readable, so the loop would spin
        return chunk


def reached(limits: dict[str, Any]) -> str:
    """Return the limit that the processes below this one have reached together, or ""."""
    below = descendants(os.getpid())
    if len(below) > limits["processes"]:
        return "processes"
    bound = 2 * limits["memory_mb"] * 1024  # KiB; the kernel bounds each process, too
    # Pages that a fork shares with the zygote count in every process: exact numbers only if these are too large.
    if sum(field_of(pid, "status", "RssAnon") for pid in below) > bound:
        return "memory" if sum(field_of(pid, "smaps_rollup", "Pss_Anon") for pid in below) > bound else ""
    return ""


def field_of(pid: int, file: str, name: str) -> int:
    """Return a number of /proc in KiB; 0 if the process has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/{file}") as lines:
        for line in lines:
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
    return 0


def descendants(pid: int, spared: Collection[int] = ()) -> list[int]:
    """Return all processes below ``pid``, also those that have ended and are not collected yet.

    ``spared`` and the processes below them are left out.
    """
    below: list[int] = []
    waiting = [pid]
    while waiting:
        children = [child for child in children_of(waiting.pop()) if child not in spared]
        below += children
        waiting += children
    return below


def children_of(pid: int) -> list[int]:
    """Return the children of a process; none if it has ended."""
    children: list[int] = []
    for thread in glob.glob(f"/proc/{pid}/task/*/children"):
        with contextlib.suppress(OSError), open(thread) as file:
            children += map(int, file.read().split())
    return children


def kill_all(spared: Collection[int] = ()) -> None:
    """Kill all processes below this one, but for ``spared`` and the processes below them.

    Orphans of a killed process become children of their subreaper, so there are several rounds.
    """
    deadline = time.monotonic() + _KILL_S
    while (below := descendants(os.getpid(), spared)) and time.monotonic() < deadline:
        for pid in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in below:
            with contextlib.suppress(ChildProcessError):  # not a child, or not yet
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.001)
