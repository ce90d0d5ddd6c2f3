"""Stops the processes of a trial.

    MasterWorker (takes a checkpoint while the ModelWorkers still answer; this wait lasts as long as there is progress)
      ──SIGTERM──> all others ──SIGTERM──> the name store ──SIGKILL──> every descendant, on every node

Processes that are left after ``stop_timeout_s`` get SIGKILL with their group.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence

from realsys.launch.nodes.base import Node
from realsys.launch.process_plan import NAME_STORE
from realsys.launch.processes.children import Child
from realsys.launch.processes.run_hooks import Bounds, Hooks

_KILL_TIMEOUT_S = 2.0
_LOOK_S = 0.5  # seconds between two looks at the progress of a stop
_FIRST_PROGRESS = 0.6  # share of stop_timeout_s; the MasterWorker gives up after half of it


class Changes:
    """Wakes those who wait when a process has ended, or when the run has to end."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def note(self) -> None:
        """Make all waits check their conditions."""
        self._event.set()

    async def until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Check the condition at each change, until it holds or the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._event.clear()
                    await self._event.wait()


class Stop:
    """The end of all processes, on all nodes."""

    def __init__(
        self, children: Sequence[Child], bounds: Bounds, hooks: Hooks, changes: Changes, nodes: Sequence[Node]
    ) -> None:
        self.hurry = False  # after a second signal: no orderly stop
        self.killing = False
        self._children = children
        self._bounds = bounds
        self._hooks = hooks
        self._changes = changes
        self._nodes = nodes

    async def run(self, *, orderly: bool) -> list[str]:
        """Stop every process; ``orderly``: the MasterWorker first. Returns the names of those that had to be killed."""
        workers = [child for child in self._children if child.spec.kind != NAME_STORE]
        for child in self._children:
            child.cancel()
        if orderly:
            await self._stop_master()
        began = time.monotonic()
        for child in workers:
            child.terminate()
        left = self._bounds.stop_timeout_s - (time.monotonic() - began)
        await self._changes.until(lambda: self.hurry or not pids_of(workers), left)
        self.killing = True
        killed = await self._kill(workers)
        left = self._bounds.stop_timeout_s + _KILL_TIMEOUT_S - (time.monotonic() - began)
        killed += await self._stop_name_store(left)
        ends = await asyncio.gather(*(node.end(_KILL_TIMEOUT_S) for node in self._nodes))
        killed += [name for left_over in ends for name in left_over]
        await self._changes.until(lambda: not pids_of(self._children), _KILL_TIMEOUT_S)  # killed, but not yet reaped
        if killed:
            names = ", ".join(killed)
            self._hooks.say(f"killed, because they did not stop within {self._bounds.stop_timeout_s:g} s: {names}")
        return killed

    async def _stop_master(self) -> None:
        """Stop the MasterWorker first: it needs every ModelWorker for its checkpoint. Skipped if one is missing."""
        trainer = [child for child in self._children if child.spec.on_training_side]
        if not trainer or len(pids_of(trainer)) < len(trainer):
            return
        for child in trainer:
            if child.spec.kind == "master_worker":
                child.terminate()
        await self._while_it_progresses(lambda: self.hurry or len(pids_of(trainer)) < len(trainer))

    async def _while_it_progresses(self, ended: Callable[[], bool]) -> None:
        """Return when ``ended`` holds, or ``stop_progress_s`` after the last progress. Reports the progress.

        The first progress must come soon: the trainer answers a stop immediately, also in the middle of a step.
        """
        before, moved, bound_s = ("", 0), time.monotonic(), _FIRST_PROGRESS * self._bounds.stop_timeout_s
        while not ended() and time.monotonic() < moved + bound_s:
            await self._changes.until(ended, min(_LOOK_S, bound_s))
            now = self._hooks.stopping()
            text = now[0].partition("\n")[0]
            if text and text != before[0].partition("\n")[0]:
                self._hooks.say(f"{text} (a second Ctrl-C ends the run without waiting)")
            if now != before:
                before, moved, bound_s = now, time.monotonic(), self._bounds.stop_progress_s

    async def _stop_name_store(self, timeout_s: float) -> list[str]:
        stores = [child for child in self._children if child.spec.kind == NAME_STORE]
        for child in stores:
            child.terminate()
        await self._changes.until(lambda: self.hurry or not pids_of(stores), timeout_s)
        return await self._kill(stores)

    async def _kill(self, children: Sequence[Child]) -> list[str]:
        """Kill the children that still run; returns their names."""
        killed = list(pids_of(children))
        for child in children:
            child.kill()
        await self._changes.until(lambda: not pids_of(children), _KILL_TIMEOUT_S)
        return killed


def pids_of(children: Iterable[Child]) -> dict[str, int]:
    """Return name -> pid of those that run."""
    return {child.spec.name: child.process.pid for child in children if child.process is not None}
