"""Starts the processes of a trial, restarts what may be restarted, stops all of them.

    consumes     ProcessSpecs
    waits for    the exit of any child (a pidfd each, on the event loop), SIGINT/SIGTERM/SIGHUP
    ends when    the MasterWorker exits 0 (done), a training process dies or a restart budget is spent (failed),
                 or a signal arrives (interrupted)
    leaves       no process: every child leads a session of its own, and the launcher is the subreaper of them all

Children get SIGTERM and ``stop_timeout_s``; then their whole group gets SIGKILL, and so does any descendant left.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from launch.plan import ProcessSpec

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FIRST_BACKOFF_S = 0.5
_LONGEST_BACKOFF_S = 30.0
_KILL_TIMEOUT_S = 2.0
_HEALTHY_AFTER_S = 300.0  # a worker that ran this long gets its restart budget back
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Death:
    """A process that ended though nobody asked it to."""

    name: str
    pid: int
    returncode: int
    time: float  # unix seconds
    log: Path

    @property
    def killed(self) -> bool:
        """By SIGKILL: from outside, and never because another process failed."""
        return self.returncode == -signal.SIGKILL

    @property
    def how(self) -> str:
        if self.returncode >= 0:
            return f"exited with code {self.returncode}"
        hint = " (out of memory?)" if self.killed else ""
        try:
            return f"was killed by {signal.Signals(-self.returncode).name}{hint}"
        except ValueError:
            return f"was killed by signal {-self.returncode}"


@dataclass(slots=True)
class Outcome:
    """How the run ended. ``restarted`` holds the deaths that a restart made good."""

    status: Literal["done", "failed", "interrupted"]
    reason: str
    signal: int | None = None
    deaths: list[Death] = field(default_factory=list)
    restarted: list[Death] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)  # what had to be killed, because it did not stop in time


@dataclass(slots=True)
class _Child:
    spec: ProcessSpec
    process: subprocess.Popen[bytes] | None = None
    pidfd: int = -1
    started: float = 0.0
    restarts: int = 0
    pending: asyncio.TimerHandle | None = None


class Supervisor:
    """Owns the child processes of one trial from start to end."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        *,
        stop_timeout_s: float,
        max_restarts: int,
        say: Callable[[str], None],
        hopeless: Callable[[Death], bool] = lambda death: False,
        first_backoff_s: float = _FIRST_BACKOFF_S,
    ) -> None:
        """``say`` gets a line per restart and kill. ``hopeless``: a restart would meet the same end (bad input)."""
        self._children = [_Child(spec) for spec in specs]
        self._stop_timeout_s = stop_timeout_s
        self._max_restarts = max_restarts
        self._say = say
        self._hopeless = hopeless
        self._first_backoff_s = first_backoff_s
        self._outcome: Outcome | None = None
        self._deaths: list[Death] = []
        self._restarted: list[Death] = []
        self._ended = asyncio.Event()
        self._hurry = asyncio.Event()  # a second signal: do not wait for an orderly stop
        self._all_gone = asyncio.Event()
        self._others: set[int] = set()
        self._killing = False

    @property
    def restarts(self) -> int:
        return len(self._restarted)

    def running(self) -> dict[str, int]:
        """Name -> pid of the processes that are up."""
        return {c.spec.name: c.process.pid for c in self._children if c.process is not None}

    async def run(self) -> Outcome:
        """Start everything, wait for the end of the run, stop everything."""
        self._others = {child.pid for child in psutil.Process().children()}
        with _subreaper(), self._signals():
            try:
                for child in self._children:
                    self._start(child)
                await self._ended.wait()
            finally:
                killed = await self._stop()
        assert self._outcome is not None
        self._outcome.deaths, self._outcome.restarted = self._deaths, self._restarted
        self._outcome.killed = killed
        return self._outcome

    def interrupt(self, signum: int) -> None:
        """End the run as a signal does; the second call stops it the hard way."""
        if self._outcome is not None:
            self._hurry.set()
            return
        self._end(Outcome("interrupted", f"stopped by {signal.Signals(signum).name}", signal=signum))

    # ---- one process

    def _start(self, child: _Child) -> None:
        child.pending = None
        if self._outcome is not None:
            return
        spec = child.spec
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with spec.log.open("ab") as log:
                child.process = subprocess.Popen(
                    spec.argv,
                    env=_environment(spec.env),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a group to kill as a whole; Ctrl-C reaches the launcher only
                )
        except OSError as exc:
            self._end(Outcome("failed", f"{spec.name} cannot be started: {exc}"))
            return
        child.started = time.monotonic()
        child.pidfd = os.pidfd_open(child.process.pid)
        asyncio.get_running_loop().add_reader(child.pidfd, self._on_exit, child)

    def _on_exit(self, child: _Child) -> None:
        process = child.process
        assert process is not None
        asyncio.get_running_loop().remove_reader(child.pidfd)
        os.close(child.pidfd)
        # Before the zombie is reaped its pid, and so the group's id, cannot have been given to anybody else.
        _kill_group(process.pid)
        returncode = process.wait()
        child.process, child.pidfd = None, -1
        self._reap_orphans()
        death = Death(child.spec.name, process.pid, returncode, time.time(), child.spec.log)
        if self._outcome is None:
            self._judge(child, death)
        elif death.killed and not self._killing:
            self._deaths.append(death)  # not by us: others may have ended because of it, and been noticed first
        if not self.running():
            self._all_gone.set()

    def _judge(self, child: _Child, death: Death) -> None:
        """Decide what a death nobody asked for means."""
        spec = child.spec
        if spec.kind == "master_worker" and death.returncode == 0:
            self._end(Outcome("done", "the MasterWorker finished"))
            return
        if not spec.restart or self._hopeless(death):
            self._deaths.append(death)
            self._end(Outcome("failed", f"{spec.name} {death.how}"))
            return
        if time.monotonic() - child.started > _HEALTHY_AFTER_S:
            child.restarts = 0
        if child.restarts >= self._max_restarts:
            self._deaths.append(death)
            problem = f"{spec.name} {death.how}, after {child.restarts} restarts (cluster.max_restarts)"
            self._end(Outcome("failed", problem))
            return
        delay = min(_LONGEST_BACKOFF_S, self._first_backoff_s * 2**child.restarts)
        child.restarts += 1
        self._restarted.append(death)
        self._say(
            f"{spec.name} {death.how}; restart {child.restarts}/{self._max_restarts} in {delay:.1f} s ({spec.log})"
        )
        child.pending = asyncio.get_running_loop().call_later(delay, self._start, child)

    def _end(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._ended.set()

    # ---- the end

    async def _stop(self) -> list[str]:
        """Stop every process; returns the names of those that had to be killed."""
        if self._outcome is None:  # an exception in the launcher itself
            self._end(Outcome("failed", "the launcher failed"))
        for child in self._children:
            if child.pending is not None:
                child.pending.cancel()
            if child.process is not None:
                child.process.send_signal(signal.SIGTERM)
        if not self.running():
            self._all_gone.set()
        await _first_of(self._stop_timeout_s, self._all_gone, self._hurry)
        killed, self._killing = list(self.running()), True
        for child in self._children:
            if child.process is not None:
                _kill_group(child.process.pid)
        await _first_of(_KILL_TIMEOUT_S, self._all_gone)
        killed += self._sweep()
        if killed:
            self._say(f"killed, because they did not stop within {self._stop_timeout_s:g} s: {', '.join(killed)}")
        return killed

    def _sweep(self) -> list[str]:
        """Kill the descendants that outlived their parents, wherever they hid (own session, double fork)."""
        left = [p for p in self._descendants() if _alive(p)]
        names = []
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                names.append(f"{process.name()} (pid {process.pid})")
                process.kill()
        psutil.wait_procs(left, timeout=_KILL_TIMEOUT_S)
        self._reap_orphans()
        return names

    def _descendants(self) -> list[psutil.Process]:
        mine = [p for p in psutil.Process().children() if p.pid not in self._others]
        found = list(mine)
        for process in mine:
            with contextlib.suppress(psutil.NoSuchProcess):
                found += process.children(recursive=True)
        return found

    def _reap_orphans(self) -> None:
        """Collect dead processes that were handed to the launcher as subreaper; its own are Popen's business."""
        own = {c.process.pid for c in self._children if c.process is not None} | self._others
        for process in psutil.Process().children():
            if process.pid not in own and not _alive(process):
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for signum in _STOP_SIGNALS:
            loop.add_signal_handler(signum, self.interrupt, signum)
        try:
            yield
        finally:
            for signum in _STOP_SIGNALS:
                loop.remove_signal_handler(signum)


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    # With the pid a child can tell that the launcher died before the child asked to die with it.
    env = {**os.environ, **extra, "REALSYS_PARENT_PID": str(os.getpid())}
    if "PYTHONPATH" in extra and os.environ.get("PYTHONPATH"):
        env["PYTHONPATH"] = os.pathsep.join((extra["PYTHONPATH"], os.environ["PYTHONPATH"]))
    return env


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


async def _first_of(timeout_s: float, *events: asyncio.Event) -> None:
    """Wait until one of the events is set or the time is over."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)


@contextlib.contextmanager
def _subreaper() -> Iterator[None]:
    """Orphaned descendants become children of this process instead of init's, so that none can get lost."""
    libc = ctypes.CDLL(None, use_errno=True)

    def set_to(value: int) -> None:
        if libc.prctl(_PR_SET_CHILD_SUBREAPER, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")

    set_to(1)
    try:
        yield
    finally:
        set_to(0)
