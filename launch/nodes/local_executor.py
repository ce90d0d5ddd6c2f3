"""The executor of one node: starts processes, watches them through their pidfds, bounds their logs.

    consumes     orders
    waits for    the exit of any child
    leaves       no process: every child leads its own session, and the executor is the subreaper of all descendants

It runs in the launcher, and in the agent of every other node. It decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from realsys.cluster.children.child_process import ChildProcess, child_pids, kill_descendants, reap_orphans
from realsys.cluster.prctl import subreaper
from realsys.cluster.process import PARENT_PID, SHIELDED
from realsys.config.machine import own_gpus, visible_to
from realsys.launch.nodes import preload
from realsys.launch.nodes.orders import CANNOT_START, Exit, OnExit, Process, ProcessOrder, SupervisedNode
from realsys.launch.supervise.failures import keep_bounded, keep_last_words, log_since

log = logging.getLogger(__name__)

_ORPHANS_END_S = 1.0  # time that the children of workers which have ended have to end, too


class _Running(Process):
    """A child of this process."""

    def __init__(self, child: ChildProcess, log: Path, log_start: int) -> None:
        self.child = child
        self.pid = child.pid
        self.host = socket.gethostname()
        self.started = child.started
        self.log = log
        self.log_start = log_start  # size of the log at the start, in bytes

    def signal(self, number: int) -> None:
        shielded = number == signal.SIGTERM and SHIELDED in os.environ
        self.child.signal(signal.SIGINT if shielded else number)

    def kill(self) -> None:
        self.child.kill()


class Executor(SupervisedNode):
    """The processes of this machine. Make it with ``open_executor``."""

    def __init__(self, inherit: Sequence[int] = ()) -> None:
        """``inherit``: descriptors that every process keeps open."""
        super().__init__()
        self.log_bytes: dict[Path, int] = {}  # bound of each log
        self._inherit = tuple(inherit)
        self._gpus = own_gpus()
        self._earlier = child_pids()  # not ours to kill
        self._running: set[_Running] = set()
        self._exited = asyncio.Event()

    async def ready(self, timeout_s: float) -> None:
        """Wait for the fork servers. Without them processes are slower to start, and no less right."""
        await asyncio.to_thread(preload.wait, timeout_s)

    def start(self, order: ProcessOrder, on_exit: OnExit) -> Process:
        try:
            env = {**order.env, **visible_to(order.gpus, self._gpus)}
            order.log.parent.mkdir(parents=True, exist_ok=True)
            if order.keep_last_words:
                keep_last_words(order.log)
            self.log_bytes[order.log] = order.log_bytes
            with order.log.open("ab") as output:
                log_start = output.tell()
                exited = functools.partial(self._on_exit, on_exit)
                child = ChildProcess(
                    order.argv,
                    _environment(env),
                    output,
                    inherit=self._inherit,
                    on_exit=lambda: exited(process),
                    server=preload.server_of(order.argv),
                )
            process = _Running(child, order.log, log_start)
            self._running.add(process)
            return process
        except OSError as exc:
            problem = Exit(CANNOT_START, time.time(), problem=str(exc))
            asyncio.get_running_loop().call_soon(on_exit, problem)
            return Process()

    def _on_exit(self, on_exit: OnExit, process: _Running) -> None:
        self._running.discard(process)
        returncode = process.child.reap()
        reap_orphans(self._earlier.union(running.pid for running in self._running))
        # No output for a signal: the log does not hold its cause.
        end = log_since(process.log, process.log_start) if returncode > 0 else ""
        self._exited.set()
        on_exit(Exit(returncode, time.time(), end))

    async def end(self, timeout_s: float) -> list[str]:
        orderly = not self._running
        for process in self._running:
            process.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._running:
                    self._exited.clear()
                    await self._exited.wait()
        spare = self._earlier.union(process.pid for process in self._running)
        if orderly:  # else nothing may outlive the lease
            kill_descendants(_ORPHANS_END_S, spare, may_end=lambda process: True)
        return kill_descendants(timeout_s, spare)


@contextlib.asynccontextmanager
async def open_executor(inherit: Sequence[int] = ()) -> AsyncIterator[Executor]:
    """Return the executor of this machine. Inside the block, logs are bounded and orphans are inherited."""
    with subreaper():
        executor = Executor(inherit)
        bounding = asyncio.create_task(keep_bounded(executor.log_bytes))
        try:
            yield executor
        finally:
            bounding.cancel()
            [result] = await asyncio.gather(bounding, return_exceptions=True)
            if isinstance(result, Exception):
                log.error("the logs were not bounded", exc_info=result)


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    # A child that finds another parent than this pid knows that we died before it could ask to die with us.
    env = {**os.environ, **extra, PARENT_PID: str(os.getpid())}
    if "PYTHONPATH" in extra and os.environ.get("PYTHONPATH"):
        env["PYTHONPATH"] = os.pathsep.join((extra["PYTHONPATH"], os.environ["PYTHONPATH"]))
    return env
