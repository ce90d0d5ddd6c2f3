"""The zygote: a process in the sandbox that forks a confined process per program. It never sees a program.

    outside ──{id, mode, limits} + descriptors──> zygote ──clone──> child (PID 1 of its own namespace)
    outside <──{id, status, cpu_s, ...}────────── zygote <──exit─── child, and all that it started
    outside ──────────source, tests─────(descriptors)─────────────> child

Sources and tests go from the outside to the child directly: no program finds those of another in its memory, which is
a copy of the zygote's.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import re
import select
import signal
import socket
import sys
import time
from typing import Any, NamedTuple

from . import child, confine, kernel, preload, rehearsal

MAX_MESSAGE = 1 << 16
MAX_DESCRIPTORS = 8
LOOK_S = 0.05  # between two checks of the CPU time and memory of a program and its children
_TICKS = os.sysconf("SC_CLK_TCK")
_OWN_KB = re.compile(rb"^Rss(?:Anon|Shmem):\s*(\d+)", re.M)


class _Use(NamedTuple):
    """Use of a process."""

    parent: int
    born: int
    threads: int
    cpu_s: float
    children_s: float  # CPU time of the children that it has collected
    memory_mb: float


class _Running:
    """A child: its number and limits, and the limit that it reached. ``partner``: the program that a test calls.

    ``mark`` begins another run of it: a program that answers calls has its limits for each call.
    """

    def __init__(self, message: dict[str, Any], pid: int, partner: _Running | None) -> None:
        self.number: int = message["id"]
        self.limits: dict[str, Any] = message["limits"]
        self.partner = partner
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.born = time.monotonic()
        self.begin = self.born
        self.cpu_before_s = 0.0
        self.ended_cpu_s = 0.0  # CPU time of processes that ended, and that no other process has collected
        self.waited_before_s = 0.0
        self.waited_s = 0.0  # waiting time in this run
        self.all_waited_s = 0.0
        self.last: dict[int, _Use] = {}
        self.reached = ""
        self.peak_mb = 0.0

    def mark(self, tree: dict[int, _Use]) -> None:
        """Begin another run."""
        self.begin = time.monotonic()
        self.cpu_before_s = self._cpu_s(tree)
        self.waited_before_s = _waited_s(self.pid)
        self.waited_s = 0.0

    def _cpu_s(self, tree: dict[int, _Use]) -> float:
        """Return the CPU time of all processes until now."""
        # A program may have the kernel forget its ended children. A number may also have been given to another one.
        gone = [use for pid, use in self.last.items() if pid not in tree or tree[pid].born != use.born]
        collected_s = sum(use.children_s for use in tree.values()) - sum(use.children_s for use in self.last.values())
        self.ended_cpu_s += max(0.0, sum(use.cpu_s + use.children_s for use in gone) - max(0.0, collected_s))
        self.last = tree
        return self.ended_cpu_s + sum(use.cpu_s + use.children_s for use in tree.values())

    def look(self, tree: dict[int, _Use]) -> None:
        """Find which limit it has reached, from the use of its processes.

        The outside watches the clock of a program that answers calls: it knows when a call begins.
        """
        cpu_s = self._cpu_s(tree) - self.cpu_before_s
        memory_mb = sum(use.memory_mb for use in tree.values())
        if sum(use.threads for use in tree.values()) == 1:
            # Time in which the machine had no processor for it is not its own. Several wait for each other, too.
            self.all_waited_s = _waited_s(self.pid)
            self.waited_s = self.all_waited_s - self.waited_before_s
        self.peak_mb = max(self.peak_mb, memory_mb)
        if self.reached:
            return
        if cpu_s > self.limits["cpu_s"]:
            self.reached = "cpu"
        elif memory_mb > self.limits["memory_mb"]:
            self.reached = "memory"
        elif self.limits["watch_clock"] and self._own_s() > self.limits["wall_s"]:
            self.reached = "wall"

    def _own_s(self) -> float:
        """Return the time of this run, without the time in which it or its partner had no processor."""
        return time.monotonic() - self.begin - self.waited_s - (self.partner.waited_s if self.partner else 0.0)


class Zygote:
    """Forks children, watches them, reports how they ended."""

    def __init__(self, control: socket.socket, setup: dict[str, Any]) -> None:
        self._control = control
        self._setup = setup
        self._user = os.geteuid(), os.getegid()
        self._children: dict[int, _Running] = {}  # pidfd -> child

    def serve(self) -> None:
        """Answer until the outside closes its end."""
        while True:
            wait = LOOK_S if self._children else None
            ready, _, _ = select.select([self._control.fileno(), *self._children], [], [], wait)
            for descriptor in ready:
                if descriptor in self._children:
                    self._collect(self._children.pop(descriptor))
            if self._control.fileno() in ready and not self._command():
                return
            now = time.monotonic()
            if old := [each for each in self._children.values() if now - each.born > LOOK_S]:
                self._look(old)

    def _command(self) -> bool:
        data, ancillary, _, _ = self._control.recvmsg(MAX_MESSAGE, socket.CMSG_SPACE(4 * MAX_DESCRIPTORS))
        if not data:
            return False
        message = json.loads(data)
        for each in self._children.values():
            if each.number == message.get("kill"):
                self._kill(each)
            elif each.number == message.get("mark"):
                each.mark(_tree(each.pid, _uses()))
            elif each.number == message.get("ask"):
                each.look(_tree(each.pid, _uses()))
                self._send({"id": each.number, "waited_s": each.waited_s})
        if "mode" not in message:
            return True
        descriptors = array.array("i")
        for _, _, part in ancillary:
            descriptors.frombytes(part)
        self._start(message, list(descriptors))
        return True

    def _start(self, message: dict[str, Any], descriptors: list[int]) -> None:
        flags = kernel.NAMESPACES if self._setup["namespaces"] else 0
        try:
            pid = kernel.fork_into(flags)
        except OSError as error:
            self._send({"id": message["id"], "error": str(error)})
        else:
            if pid == 0:
                self._be_child(message, descriptors)
            partner = [each for each in self._children.values() if each.number == message["partner"]]
            child_of = _Running(message, pid, partner[0] if partner else None)
            self._children[child_of.pidfd] = child_of
        for descriptor in descriptors:
            os.close(descriptor)

    def _be_child(self, message: dict[str, Any], descriptors: list[int]) -> None:
        """Run the child. Never returns."""
        try:
            self._control.close()
            for other in self._children:
                os.close(other)
            child.main(message, descriptors, self._setup, self._user)
        finally:
            os._exit(child.BROKEN)

    def _collect(self, ended: _Running) -> None:
        os.close(ended.pidfd)
        _, status, usage = os.wait4(ended.pid, 0)
        cpu_s = usage.ru_utime + usage.ru_stime
        if not ended.reached and cpu_s - ended.cpu_before_s > ended.limits["cpu_s"]:
            ended.reached = "cpu"
        peak = max(ended.peak_mb, usage.ru_maxrss / 1024)
        code = os.waitstatus_to_exitcode(status)
        answer = {"id": ended.number, "code": code, "cpu_s": cpu_s, "peak_mb": peak, "reached": ended.reached}
        self._send({**answer, "waited_s": ended.all_waited_s})

    def _look(self, running: list[_Running]) -> None:
        """Kill children that reach a limit, with all their processes."""
        uses = _uses()
        for each in running:
            each.look(_tree(each.pid, uses))
            if each.reached:
                self._kill(each)

    def _kill(self, child_of: _Running) -> None:
        """Kill a child. All others in its namespace of processes die with it."""
        if self._setup["namespaces"]:
            os.kill(child_of.pid, signal.SIGKILL)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child_of.pid, signal.SIGKILL)

    def _send(self, message: dict[str, Any]) -> None:
        self._control.sendall(json.dumps(message).encode())


def _uses() -> dict[int, _Use]:
    """Return what each process has used."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return {pid: use for pid in pids if (use := _use(pid))}


def _use(pid: int) -> _Use | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        with open(f"/proc/{pid}/status", "rb") as file:
            status = file.read()
    except OSError:
        return None  # it has ended
    cpu, children = (sum(map(int, fields[at : at + 2])) / _TICKS for at in (11, 13))
    # Pages of files, such as libraries, are not its own; files in memory are RssShmem while they are mapped.
    memory_mb = sum(int(size) for size in _OWN_KB.findall(status)) / 1024
    return _Use(int(fields[1]), int(fields[19]), int(fields[17]), cpu, children, memory_mb)


def _tree(root: int, uses: dict[int, _Use]) -> dict[int, _Use]:
    """Return the uses of a child and its descendants. Orphans are its children: it is the first in its namespace."""
    tree: dict[int, _Use] = {}
    todo = [root]
    while todo:
        pid = todo.pop()
        if pid in uses and pid not in tree:
            tree[pid] = uses[pid]
            todo += [other for other, use in uses.items() if use.parent == pid]
    return tree


def _waited_s(pid: int) -> float:
    """Return the time in which a process could run and had no processor."""
    try:
        with open(f"/proc/{pid}/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    setup = json.loads(sys.argv[2])
    confine.die_first()
    if user := setup["user"]:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    if not setup["namespaces"]:
        kernel.die_with_parent()
    kernel.set_dumpable(False)
    rehearsal.rehearse(setup)
    preload.freeze()
    control.sendall(
        json.dumps({"up": True, "landlock": kernel.landlock_abi(), "seccomp": confine.has_filter()}).encode()
    )
    Zygote(control, setup).serve()
