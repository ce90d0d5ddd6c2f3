"""The trainer as the supervisor sees it: ModelWorkers and MasterWorker, which end and restart together.

running ──first death──> _LAST_WORDS_S for the others ──> killed ──last one gone──> (supervisor decides) ──> running
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from realsys.launch.nodes.base import Process, ProcessId
from realsys.launch.processes.children import Child
from realsys.launch.processes.restart_policy import Death

_LAST_WORDS_S = 2.0  # time for the peers of a failed process to report: the cause may be theirs


class Trainer:
    """Processes of a trainer that restarts; none if the death of one ends the run."""

    def __init__(self, children: Sequence[Child]) -> None:
        self.children = list(children)
        self.starts = 1
        self.deaths: list[Death] = []  # since it was last complete
        self._complete: list[Process] = []  # its processes, when it was last complete
        self._killed = False
        self._timer: asyncio.TimerHandle | None = None  # the kill, or the next start

    @property
    def running(self) -> bool:
        return any(child.process is not None for child in self.children)

    @property
    def processes(self) -> frozenset[ProcessId]:
        """Its processes, when it was last complete."""
        return frozenset(process.id for process in self._complete)

    @property
    def ran_s(self) -> float:
        """Seconds since its last start."""
        return time.monotonic() - min((process.started for process in self._complete), default=time.monotonic())

    def killed(self, child: Child, death: Death) -> bool:
        """Return True if this death is the trainer's own kill."""
        return self._killed and death.killed and not death.lost and child in self.children

    def add_death(self, death: Death) -> None:
        """Count a death, unless it is the trainer's own kill; after the first one, kill the others soon."""
        if self._killed:
            self.deaths += [] if death.killed and not death.lost else [death]
            return
        self.deaths.append(death)
        if len(self.deaths) == 1:
            # A killed process was not failed by a peer, so there are no last words to wait for.
            self.later(0.0 if death.killed else _LAST_WORDS_S, self._kill)

    def take_deaths(self) -> list[Death]:
        """Return the deaths since it was last complete, and forget them."""
        self.cancel()
        deaths, self.deaths = self.deaths, []
        self._killed = False
        return deaths

    def mark_complete(self) -> None:
        """Note the processes after a start."""
        self._complete = [child.process for child in self.children if child.process is not None]

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call ``action`` on the event loop after ``delay_s``, unless ``cancel`` is called before."""
        self._timer = asyncio.get_running_loop().call_later(delay_s, action)

    def cancel(self) -> None:
        """Cancel the next kill or start."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _kill(self) -> None:
        self._killed = True
        for child in self.children:
            child.kill()
