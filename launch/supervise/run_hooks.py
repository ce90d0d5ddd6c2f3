"""Bounds of a run, and what the supervisor calls outside of itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from realsys.cluster.failure import ErrorRecord
from realsys.launch.process_plan import ProcessSpec
from realsys.launch.supervise.restart_policy import NO_CHECKPOINT
from realsys.observe.events import EventKind


class Say(Protocol):
    """Takes a line for the user; ``kind`` and ``process`` are those of its event (realsys.observe.events)."""

    def __call__(self, text: str, kind: EventKind = "note", process: str = "") -> None: ...


async def _ready(_: ProcessSpec, __: str) -> None:
    return None


async def _no_launcher() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of a run.

    stop_progress_s  time that a stop waits for the next progress of the MasterWorker
    min_share        share of the workers of a kind that must be left when one is given up
    join_s           time that the start waits for the agents of other nodes
    log_bytes        bound on the log of a process
    room_s           time that restarts wait for room on a full disk: a person or a cleaning job may make some, but
                     the GPUs are idle until then
    """

    stop_timeout_s: float
    stop_progress_s: float
    max_restarts: int
    first_backoff_s: float = 0.5
    min_share: float = 0.0
    join_s: float = 120.0
    log_bytes: int = 1 << 24
    room_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Hooks:
    """Functions of the run that the supervisor calls.

    say               takes a line for each restart and kill
    launch            starts the agents of other nodes
    errors            returns the error files of the trial's processes
    checkpoint        returns the step of the newest complete one, or NO_CHECKPOINT
    finished          returns True if a MasterWorker that exited 0 has finished the run
    name_store_ready  returns when the run's own name store answers; takes its process, and the address of its node
    outside           returns a cause outside of the processes, such as a full disk, or ""
    no_room           returns that the disk has no room for a step, or ""
    stopping          returns the progress of a stop: what the MasterWorker does (the user reads its first line), and
                      the bytes that were written
    """

    say: Say
    launch: Callable[[], Awaitable[None]] = _no_launcher
    errors: Callable[[], Sequence[ErrorRecord]] = lambda: ()
    checkpoint: Callable[[], int] = lambda: NO_CHECKPOINT
    finished: Callable[[], bool] = lambda: True
    name_store_ready: Callable[[ProcessSpec, str], Awaitable[None]] = _ready
    outside: Callable[[], str] = lambda: ""
    no_room: Callable[[], str] = lambda: ""
    stopping: Callable[[], tuple[str, int]] = lambda: ("", 0)
