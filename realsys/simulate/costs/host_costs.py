"""Cost model of a host: processes that compute share its cores, and each slows the others down.

    process computes ──use(cores)──> Host ──speed──> every process that computes

Each process gets the same share of the cores that it wants: speed = cores / (wanted cores), at most 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from realsys.simulate.clock import Clock
from realsys.simulate.scenarios import HostSettings


class Process(Protocol):
    """A process whose work takes longer while others compute."""

    def set_speed(self) -> None:
        """Continue at the host's new ``speed``."""
        ...


class Host:
    """Cores of one host. ``speed`` is that of every process that computes, over its speed alone."""

    def __init__(self, settings: HostSettings) -> None:
        self.settings = settings
        self.speed = 1.0
        self._wanted: dict[Process, float] = {}

    def use(self, process: Process, cores: float) -> None:
        """Let ``process`` compute on ``cores`` from now on; 0: it waits. The speed of all follows."""
        if not self.settings.cores:
            return
        if cores:
            self._wanted[process] = cores
        else:
            self._wanted.pop(process, None)
        wanted = sum(self._wanted.values())
        speed = min(1.0, self.settings.cores / wanted) if wanted else 1.0
        if speed != self.speed:
            self.speed = speed
            for other in list(self._wanted):
                if other is not process:
                    other.set_speed()


class Job:
    """Work of ``seconds`` on ``cores`` of a host, which calls ``done`` at its end."""

    def __init__(self, clock: Clock, host: Host, cores: float, seconds: float, done: Callable[[], None]) -> None:
        self._clock = clock
        self._host = host
        self._left = seconds
        self._done = done
        self._number = 0  # plans of its end: only the last one counts
        self._since = clock.now
        self._speed = 1.0
        host.use(self, cores)
        self.set_speed()

    def set_speed(self) -> None:
        """Plan the end of the work at the host's speed."""
        now = self._clock.now
        self._left = max(0.0, self._left - self._speed * (now - self._since))
        self._since, self._speed = now, self._host.speed
        self._number += 1
        self._clock.after(self._left / self._speed, self._end, self._number)

    def cancel(self) -> None:
        """Stop without calling ``done``."""
        self._number += 1
        self._host.use(self, 0.0)

    def _end(self, number: int) -> None:
        if number == self._number:
            self.cancel()
            self._done()
