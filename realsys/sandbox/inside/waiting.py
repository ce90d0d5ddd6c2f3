"""Waiting: the time in which the machine had no processor for a program. Without I/O: the zygote checks /proc.

`own-wait-counts`: if a program makes its own threads wait for each other, this is its own time.

1. Waiting is free if no thread ran meanwhile. So a program pays with CPU time for the waiting that it causes. So is the
   time in which the host of a virtual machine took a processor away, which no thread counts as waiting.
2. If children were started since the last check, and several threads can run at this check or at the last, nothing is
   free: the CPU time of a child that ended between two checks may be unknown. Checks have random distances, so that
   children cannot hide from them.
"""

from __future__ import annotations

from typing import NamedTuple


class Task(NamedTuple):
    """A thread. ``ran_s``, ``waited_s``: since its start."""

    runnable: bool
    ran_s: float
    waited_s: float


_NONE = Task(False, 0.0, 0.0)


class Waiting:
    """Waiting time of one run of a program. ``begin`` begins another run."""

    def __init__(self, now: float) -> None:
        self.waited_s = 0.0
        self._before_s = 0.0
        self._now = now
        self._tasks: dict[int, Task] = {}
        self._parallel = False
        self._last_pid = 0
        self._stolen: tuple[float, ...] = ()

    @property
    def run_s(self) -> float:
        """Return the waiting time of this run."""
        return self.waited_s - self._before_s

    def begin(self) -> None:
        """Begin another run."""
        self._before_s = self.waited_s

    def look(self, now: float, tasks: dict[int, Task], last_pid: int, stolen: tuple[float, ...] = ()) -> None:
        """Count the waiting since the last look.

        ``last_pid``: number of the newest thread of the machine. ``stolen``: seconds for which each processor was taken
        away since the boot.
        """
        grown = [(task, self._tasks.get(number, _NONE)) for number, task in tasks.items()]
        longest_s = max((task.waited_s - last.waited_s for task, last in grown), default=0.0)
        ran_s = sum(max(0.0, task.ran_s - last.ran_s) for task, last in grown)
        parallel = sum(task.runnable for task in tasks.values()) > 1
        if last_pid == self._last_pid or not (parallel or self._parallel):
            # The longest, not the sum: threads may wait at the same time.
            stolen_s = max(map(float.__sub__, stolen, self._stolen), default=0.0)
            self.waited_s += max(0.0, min(longest_s + stolen_s, now - self._now - ran_s))
        self._now, self._tasks, self._parallel, self._last_pid = now, tasks, parallel, last_pid
        self._stolen = stolen
