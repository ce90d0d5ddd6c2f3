"""Child processes: the one way in which launcher, verifier pool and SGLang's keeper start, watch and kill them.

    ChildProcess       one process that leads its own session, watched through a pidfd on the event loop
    SocketChild        one that speaks with this process over a socket
    GuardedProcess     a server of another package with all its processes, which end with this process
    LogBound           how much of what such a server prints is passed on to our log
    kill_descendants   kills all processes below this one, also those that left their group
    Backoff            delays between restarts in a row

`pid-stays-valid`: the kernel may reuse a pid, which is also the id of the group, once the process is reaped. A group is
killed before its leader is reaped, and never after that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil

from realsys.cluster.children.fork_server import Forked, ForkServer

log = logging.getLogger(__name__)

HEALTHY_AFTER_S = 300.0  # a process that ran longer gets its restart budget back
LONGEST_BACKOFF_S = 30.0
LAST_WORDS = 300  # characters of what a child printed that are shown
_ROUND_S = 0.1  # between two rounds of kill_descendants


class ChildProcess:
    """A running process. Belongs to the event loop that runs when it is started."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        output: int | IO[bytes],
        *,
        stdin: int = subprocess.DEVNULL,
        inherit: Sequence[int] = (),
        on_exit: Callable[[], None] | None = None,
        server: ForkServer | None = None,
    ) -> None:
        """Start ``argv``; stdout and stderr go to ``output``, and the descriptors ``inherit`` stay open in it.

        ``on_exit`` is called on the event loop. ``server`` forks the process, if it has the program's modules; such a
        process has no ``stdin``. Raises OSError; no process is left then.
        """
        self.started = time.monotonic()
        self._on_exit = on_exit
        self._exited = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.popen: subprocess.Popen[bytes] | Forked
        if server is not None:
            file = output if isinstance(output, int) else output.fileno()
            self.popen = server.start(argv, env, file, file, inherit)
        else:
            self.popen = subprocess.Popen(
                argv,
                env=dict(env),
                stdin=stdin,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=tuple(inherit),
                start_new_session=True,  # a group to kill as a whole; Ctrl-C reaches the parent only
            )
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:  # without a pidfd the end of the process would go unnoticed
            self._kill_group()
            self.popen.wait()
            raise
        self._loop.add_reader(self._pidfd, self._notice)

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, or minus the signal; None before ``reap``."""
        return self.popen.returncode

    async def exits_within(self, timeout_s: float | None) -> bool:
        """Return True if the process exits within ``timeout_s``. It is not reaped, so the pid stays valid."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._exited.wait()
        except TimeoutError:
            return False
        return True

    def signal(self, number: int) -> None:
        """Send a signal to the process alone. Does nothing after its end."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                # Through the pidfd: Popen.send_signal polls first, which would reap the process.
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """Send SIGKILL to the process and its group. Does nothing once it is reaped."""
        if self.returncode is None:
            self._kill_group()

    async def end(self, timeout_s: float | None) -> bool:
        """Kill the process and its group, and reap it. Returns False if it is still there after ``timeout_s``."""
        self.kill()
        if not await self.exits_within(timeout_s):
            log.error("process %d was killed and is still there after %g s", self.pid, timeout_s)
            return False
        self.reap()
        return True

    def reap(self) -> int:
        """Kill the rest of the group and collect the process, which must have exited. Returns its return code."""
        if self.popen.returncode is None:
            self._loop.remove_reader(self._pidfd)
            self._kill_group()  # before the wait: `pid-stays-valid`
            self.popen.wait()
            os.close(self._pidfd)
        return self.popen.wait()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)

    def _notice(self) -> None:
        self._loop.remove_reader(self._pidfd)  # it stays readable, so the loop would spin
        self._exited.set()
        if self._on_exit is not None:
            self._on_exit()


class SocketChild:
    """A child process that speaks with this process over a socket. Its output goes to a temporary file."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        name: str,
        kind: socket.SocketKind = socket.SOCK_STREAM,
        inherit: Sequence[int] = (),
    ) -> None:
        """Start ``argv`` with two more arguments: the descriptor of its end, and the pid of this process.

        ``name``: part of the name of the file; ``inherit``: as in ChildProcess. Raises OSError.
        """
        # A file and not a pipe: the child may print more than this process wants to read.
        self._printed = tempfile.TemporaryFile("a+b", buffering=0, prefix=f"realsys-{name}-")  # noqa: SIM115
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, kind)
        try:
            with theirs:
                argv = [*argv, str(theirs.fileno()), str(os.getpid())]
                self.process = ChildProcess(argv, env, self._printed, inherit=[theirs.fileno(), *inherit])
        except OSError:
            self.close()
            raise

    def said(self) -> str:
        """Return the end of the output since the last call, in one line."""
        if self._printed.closed or not (size := os.fstat(self._printed.fileno()).st_size):
            return ""
        text = os.pread(self._printed.fileno(), 4 * LAST_WORDS, max(0, size - 4 * LAST_WORDS))
        self._printed.truncate(0)
        return " ".join(text.decode("utf-8", "replace").split())[-LAST_WORDS:]

    def close(self) -> None:
        """Close the socket and the file."""
        self.socket.close()
        self._printed.close()


async def lines_of(pipe: IO[bytes], longest: int = 1 << 16) -> AsyncIterator[bytes]:
    """Yield the lines of a pipe without their ends, until all its writers have closed it. A longer line is cut off."""
    stream = asyncio.StreamReader()
    protocol: Any = asyncio.StreamReaderProtocol(stream)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
    rest = b""
    try:
        while chunk := await stream.read(1 << 16):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                yield line[:longest]
            rest = rest[:longest]
        if rest:
            yield rest
    finally:
        transport.close()


def is_logged(count: int) -> bool:
    """Return True if the output of a child that prints for the ``count``-th time is logged: ever more rarely."""
    return count <= 10 or count & (count - 1) == 0


class Backoff:
    """Budget of ``max_restarts`` restarts in a row; each waits twice as long as the one before."""

    def __init__(self, max_restarts: int, first_s: float) -> None:
        self.restarts = 0  # restarts in a row
        self.max_restarts = max_restarts
        self._first_s = first_s

    def next_delay(self, ran_s: float) -> float | None:
        """Return the seconds until the next restart, or None if the budget is spent.

        ``ran_s`` of more than HEALTHY_AFTER_S gives the budget back first.
        """
        if ran_s > HEALTHY_AFTER_S:
            self.restarts = 0
        if self.restarts >= self.max_restarts:
            return None
        delay: float = min(LONGEST_BACKOFF_S, self._first_s * 2.0**self.restarts)
        self.restarts += 1
        return delay


def how_it_ended(returncode: int) -> str:
    """Return the end of a process in words: ``exited with code 3``, ``was killed by SIGTERM``."""
    if returncode >= 0:
        return f"exited with code {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"


def child_pids() -> set[int]:
    """Return the pids of the present children of this process."""
    return {child.pid for child in psutil.Process().children()}


def resident_bytes_below(pid: int) -> int:
    """Return the memory in RAM of all processes below ``pid``. It reads every process of the machine: milliseconds."""
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += child.memory_info().rss
    return total


def reap_orphans(spare: Collection[int]) -> None:
    """Collect dead children that this process inherited as subreaper. ``spare``: pids that others collect."""
    for pid in child_pids().difference(spare):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def kill_descendants(
    timeout_s: float, spare: Collection[int] = (), may_end: Callable[[psutil.Process], bool] = lambda process: False
) -> list[str]:
    """Kill and reap everything below this process, which must be a subreaper. Returns the names of the living ones.

    Round by round, because the orphans of a killed child become children. ``spare`` and the processes below them are
    left alone. A process for which ``may_end`` is true gets the whole time to exit.
    """
    deadline = time.monotonic() + timeout_s
    killed: dict[int, str] = {}
    while left := [child for child in psutil.Process().children() if child.pid not in spare]:
        for child in left:
            if not may_end(child) and (name := _kill(child)):
                killed.setdefault(child.pid, name)
        rest = deadline - time.monotonic()
        psutil.wait_procs(left, timeout=max(0.0, min(rest, _ROUND_S)))  # reaps
        if rest <= 0:
            break
    return list(killed.values())


def _kill(process: psutil.Process) -> str:
    """Kill a process. Returns its name, or "" if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        if process.status() != psutil.STATUS_ZOMBIE:
            name = f"{process.name()} (pid {process.pid})"
            process.kill()
            return name
    return ""


# ---- a server of another package, under a guard (guard.py) that ends all its processes with this process


_GUARD = Path(__file__).with_name("guard.py")
_TAIL_LINES = 15
_LINE_LIMIT = 4000  # characters of a line that is passed on: SGLang prints all its settings in one line
_LOG_LIMIT = 200_000  # characters that are passed on in a minute: a dying vLLM prints a traceback for each open request
_LOG_WINDOW_S = 60.0
#: last line of a traceback of Python, perhaps behind vLLM's ``(process pid) ERROR date time [file:line]``
_CAUSE = re.compile(r"(?:\([^)]*\) )?(?:ERROR [^]]*\] )?[\w.]*(?:Error|Exception): ")
_STOP_TIMEOUT_S = 10.0
_LAST_WORDS_S = 2.0
_DEATH_S = 10.0  # the guard needs up to 7 s to end the other processes
_MEMORY_S = 10.0  # between two measurements of memory, which read all processes of the machine


class GuardedProcess:
    """A server of another package with all its processes. Belongs to the event loop that started it."""

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], remove: Path, guard: Sequence[str] = ()
    ) -> None:
        """Start ``command`` under the guard, with further arguments ``guard`` of that. Raises OSError.

        name    its word in messages, and in lower case its log
        remove  folder of its temporary files, which is removed when it ends
        """
        self.name = name
        self._output = logging.getLogger(name.lower())
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._cause, self._cause_at = "", -math.inf
        argv = [sys.executable, "-E", "-P", str(_GUARD), *guard, "--remove", str(remove), "--", *command]
        log.info("starting %s", " ".join(command))
        env = {**env, "TMPDIR": str(remove)}
        self._process = ChildProcess(argv, env, subprocess.PIPE, stdin=subprocess.PIPE)
        self._reader = asyncio.create_task(self._forward(), name=f"{name} log")
        self.ended = asyncio.create_task(self._wait(), name=f"{name} exit")
        self._measure_at = 0.0
        self._resident_bytes = 0

    @property
    def pid(self) -> int:
        """Pid of the guard, which leads the session of all processes."""
        return self._process.pid

    def tail(self) -> str:
        """Return the last lines of the output, joined, behind the first error of the last minute that had one.

        vLLM prints why a process of it has died long before its last lines, which only say that it has.
        """
        first = [self._cause, "..."] if self._cause and self._cause not in self._tail else []
        return " | ".join([*first, *self._tail]) or "none"

    async def last_words(self) -> str:
        """Return how the process ended, or that it runs, with its last lines. Call it before ``kill``.

        A process that has just died is given some seconds, in which the guard ends the others.
        """
        done, _ = await asyncio.wait({self.ended}, timeout=_DEATH_S)
        how = self.ended.result() if done else "still runs"
        return f"{self.name} {how}; its last lines: {self.tail()}"

    async def resident_bytes(self) -> int:
        """Return the memory in RAM of all processes of the server, as it was within the last seconds."""
        if (now := time.monotonic()) >= self._measure_at:
            self._measure_at = now + _MEMORY_S
            self._resident_bytes = await asyncio.to_thread(resident_bytes_below, self.pid)
        return self._resident_bytes

    def kill(self) -> None:
        """Kill the process tree; ``ended`` resolves when it is gone."""
        assert self._process.popen.stdin is not None
        self._process.popen.stdin.close()  # the guard then kills everything

    async def stop(self, timeout_s: float = _STOP_TIMEOUT_S) -> None:
        """Kill the process tree and wait until it is gone; after ``timeout_s`` kill the guard, too."""
        self.kill()
        done, _ = await asyncio.wait({self.ended}, timeout=timeout_s)
        if not done:
            log.error("the guard of %s did not end within %.0f s; killing it", self.name, timeout_s)
            self._process.kill()
            await self.ended

    async def _wait(self) -> str:
        """Return how the process ended, after all its output is logged."""
        await self._process.exits_within(None)
        code = self._process.reap()
        # If the guard was killed, a process that it would have found may still hold the pipe open.
        await asyncio.wait({self._reader}, timeout=_LAST_WORDS_S)
        self._reader.cancel()
        return how_it_ended(128 - code if code > 128 else code)  # the guard exits with 128 + the signal

    async def _forward(self) -> None:
        """Consume the output to its end. Its first lines name the cause of a flood, so the later ones are left out."""
        pipe = self._process.popen.stdout
        assert pipe is not None
        bound = LogBound(_LOG_LIMIT, _LOG_WINDOW_S)
        try:
            async for line in lines_of(pipe, _LINE_LIMIT):
                if text := line.decode("utf-8", "replace").rstrip():
                    self._take(text, bound, time.monotonic())
        finally:
            self._note(bound.left_out)

    def _take(self, text: str, bound: LogBound, now: float) -> None:
        self._tail.append(text[:300])
        if now > self._cause_at + _LOG_WINDOW_S and _CAUSE.match(text):
            self._cause, self._cause_at = text[:300], now
        self._note(bound.closed(now))
        if bound.admits(len(text)):
            self._output.info("%s", text)

    def _note(self, left_out: int) -> None:
        if left_out:
            self._output.warning("%d lines left out: more than %d characters in a minute", left_out, _LOG_LIMIT)


class LogBound:
    """Bound on the output that is passed on: ``limit`` characters in each window of ``window_s``."""

    def __init__(self, limit: int, window_s: float) -> None:
        self.left_out = 0  # lines, in this window
        self._limit = limit
        self._window_s = window_s
        self._end = -math.inf
        self._passed = 0

    def closed(self, now: float) -> int:
        """Begin a new window if ``now`` is after this one. Returns the lines that this one has left out, once."""
        if now < self._end:
            return 0
        left_out, self.left_out = self.left_out, 0
        self._end, self._passed = now + self._window_s, 0
        return left_out

    def admits(self, size: int) -> bool:
        """Count a line of ``size`` characters. Returns True if it is passed on; after one that is not, none is."""
        self._passed += size
        if self._passed <= self._limit:
            return True
        self.left_out += 1
        return False
