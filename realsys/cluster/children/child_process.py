"""Child processes: the one way in which launcher, verifier pool and SGLang's keeper start, watch and kill them.

    ChildProcess       one process that leads its own session, watched through a pidfd on the event loop
    kill_descendants   kills all processes below this one, also those that left their group
    Backoff            delays between restarts in a row

`pid-stays-valid`: the kernel may reuse a pid, which is also the id of the group, once the process is reaped. A group is
killed before its leader is reaped, and never after that.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import IO

import psutil

from realsys.cluster.children.fork_server import Forked, ForkServer

HEALTHY_AFTER_S = 300.0  # a process that ran longer gets its restart budget back
LONGEST_BACKOFF_S = 30.0
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
