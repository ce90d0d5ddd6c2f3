"""Time, processors and memory that a program uses, for the zygote.

Waiting is the time in which the machine had no processor for the program; it is counted without I/O.

`own-wait-counts`: if a program makes its own threads wait for each other, this is its own time.

1. Waiting is free if no thread ran meanwhile. So a program pays with CPU time for the waiting that it causes. So is the
   time in which the host of a virtual machine took a processor away, which no thread counts as waiting.
2. If children were started since the last check, and several threads can run at this check or at the last, nothing is
   free: the CPU time of a child that ended between two checks may be unknown. Checks have random distances, so that
   children cannot hide from them.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple


class ThreadUse(NamedTuple):
    """A thread. ``ran_s``, ``waited_s``: since its start."""

    runnable: bool
    ran_s: float
    waited_s: float


_NONE = ThreadUse(False, 0.0, 0.0)


class Waiting:
    """Waiting time of one run of a program. ``begin`` begins another run."""

    def __init__(self, now: float) -> None:
        self.waited_s = 0.0
        self._before_s = 0.0
        self._now = now
        self._tasks: dict[int, ThreadUse] = {}
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

    def look(self, now: float, tasks: dict[int, ThreadUse], last_pid: int, stolen: tuple[float, ...] = ()) -> None:
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


# ---- use of processors and memory by the processes of a program, as /proc has it


_TICKS = os.sysconf("SC_CLK_TCK")
_OWN_KB = re.compile(rb"^Rss(?:Anon|Shmem):\s*(\d+)", re.M)
_OOM_KILLS = re.compile(rb"^oom_kill (\d+)", re.M)


class Use(NamedTuple):
    """Use of a process."""

    runnable: bool  # state of its first thread
    parent: int
    born: int
    threads: int
    cpu_s: float
    children_s: float  # CPU time of the children that it has collected
    memory_mb: float


def all_uses() -> dict[int, Use]:
    """Return the use of each process."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return {pid: use for pid in pids if (use := _use(pid))}


def tree_of(root: int, uses: dict[int, Use]) -> dict[int, Use]:
    """Return the uses of a child and its descendants. Orphans are its children: it is the first in its namespace."""
    tree: dict[int, Use] = {}
    todo = [root]
    while todo:
        pid = todo.pop()
        if pid in uses and pid not in tree:
            tree[pid] = uses[pid]
            todo += [other for other, use in uses.items() if use.parent == pid]
    return tree


def tasks_of(tree: dict[int, Use]) -> dict[int, ThreadUse]:
    """Return all threads of these processes."""
    tasks: dict[int, ThreadUse] = {}
    for pid, use in tree.items():
        if use.threads == 1:
            tasks[pid] = ThreadUse(use.runnable, *_scheduled(f"/proc/{pid}"))
            continue
        try:
            names = os.listdir(f"/proc/{pid}/task")
        except OSError:
            continue  # it has ended
        for name in names:
            folder = f"/proc/{pid}/task/{name}"
            tasks[int(name)] = ThreadUse(_stat(folder)[:1] == [b"R"], *_scheduled(folder))
    return tasks


def last_pid() -> int:
    """Return the number of the newest process or thread."""
    return int(_read("/proc/loadavg").split()[-1])


def stolen() -> tuple[float, ...]:
    """Return for each processor the seconds for which the host of this virtual machine has taken it away."""
    lines = [line.split() for line in _read("/proc/stat").splitlines() if line.startswith(b"cpu")]
    return tuple(int(fields[8]) / _TICKS for fields in lines[1:])  # the first line has the sum


def oom_kills() -> int:
    """Return the number of processes that the kernel has ended because the machine had no memory left."""
    match = _OOM_KILLS.search(_read("/proc/vmstat"))
    return int(match[1]) if match else 0


def _use(pid: int) -> Use | None:
    fields, status = _stat(f"/proc/{pid}"), _read(f"/proc/{pid}/status")
    if not fields or not status:
        return None  # it has ended
    cpu, children = (sum(map(int, fields[at : at + 2])) / _TICKS for at in (11, 13))
    # Pages of files, such as libraries, are not its own; files in memory are RssShmem while they are mapped.
    memory_mb = sum(int(size) for size in _OWN_KB.findall(status)) / 1024
    return Use(fields[0] == b"R", int(fields[1]), int(fields[19]), int(fields[17]), cpu, children, memory_mb)


def _stat(folder: str) -> list[bytes]:
    return _read(f"{folder}/stat").rpartition(b")")[2].split()


def _scheduled(folder: str) -> tuple[float, float]:
    """Return the time in which a thread ran, and the time in which it could run and had no processor."""
    fields = _read(f"{folder}/schedstat").split()
    return (int(fields[0]) / 1e9, int(fields[1]) / 1e9) if len(fields) > 1 else (0.0, 0.0)


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
