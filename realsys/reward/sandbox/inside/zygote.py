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
import select
import signal
import socket
import sys
import time
from typing import Any

from . import child, confine, kernel, preload, uses

MAX_MESSAGE = 1 << 16
MAX_DESCRIPTORS = 8
KILLED = "killed"  # "reached" of a program that neither it nor the zygote has ended
LOOK_S = 0.05  # mean time between two checks of the CPU time and memory of a program and its children


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
        self.waiting = uses.Waiting(self.born)
        self.last: dict[int, uses.Use] = {}
        self.reached = ""
        self.killed = False  # the zygote has killed it
        self.peak_mb = 0.0

    def mark(self, tree: dict[int, uses.Use]) -> None:
        """Begin another run."""
        self._look_at_waiting(tree)
        self.waiting.begin()
        self.begin = time.monotonic()
        self.cpu_before_s = self._cpu_s(tree)

    def _cpu_s(self, tree: dict[int, uses.Use]) -> float:
        """Return the CPU time of all processes until now."""
        # A program may have the kernel forget its ended children. A number may also have been given to another one.
        gone = [use for pid, use in self.last.items() if pid not in tree or tree[pid].born != use.born]
        collected_s = sum(use.children_s for use in tree.values()) - sum(use.children_s for use in self.last.values())
        self.ended_cpu_s += max(0.0, sum(use.cpu_s + use.children_s for use in gone) - max(0.0, collected_s))
        self.last = tree
        return self.ended_cpu_s + sum(use.cpu_s + use.children_s for use in tree.values())

    def look(self, tree: dict[int, uses.Use]) -> None:
        """Find which limit it has reached, from the use of its processes.

        The outside watches the clock of a program that answers calls: it knows when a call begins.
        """
        cpu_s = self._cpu_s(tree) - self.cpu_before_s
        memory_mb = sum(use.memory_mb for use in tree.values())
        self._look_at_waiting(tree)
        self.peak_mb = max(self.peak_mb, memory_mb)
        if self.reached:
            return
        # Memory first: CPU time grows until the program ends, so a late look finds that limit reached as well.
        if memory_mb > self.limits["memory_mb"]:
            self.reached = "memory"
        elif cpu_s > self.limits["cpu_s"]:
            self.reached = "cpu"
        elif self.limits["watch_clock"] and self._own_s() > self.limits["wall_s"]:
            self.reached = "wall"

    def _look_at_waiting(self, tree: dict[int, uses.Use]) -> None:
        self.waiting.look(time.monotonic(), uses.tasks_of(tree), uses.last_pid(), uses.stolen())

    def _own_s(self) -> float:
        """Return the time of this run, without the time in which it or its partner had no processor."""
        partner_s = self.partner.waiting.run_s if self.partner else 0.0
        return time.monotonic() - self.begin - self.waiting.run_s - partner_s


class Zygote:
    """Forks children, watches them, reports how they ended."""

    def __init__(self, control: socket.socket, setup: dict[str, Any]) -> None:
        self._control = control
        self._setup = setup
        self._user = os.geteuid(), os.getegid()
        self._children: dict[int, _Running] = {}  # pidfd -> child
        self._oom_kills = uses.oom_kills()

    def serve(self) -> None:
        """Answer until the outside closes its end."""
        while True:
            # At random times: a program cannot arrange to be idle whenever it is looked at.
            wait = LOOK_S * (0.5 + os.urandom(1)[0] / 255) if self._children else None
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
                each.mark(uses.tree_of(each.pid, uses.all_uses()))
            elif each.number == message.get("ask"):
                each.look(uses.tree_of(each.pid, uses.all_uses()))
                self._send({"id": each.number, "waited_s": each.waiting.run_s})
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
        code = os.waitstatus_to_exitcode(status)
        run_cpu_s = min(ended.limits["cpu_s"] + ended.cpu_before_s, ended.limits["process_cpu_s"])
        if not ended.reached and cpu_s > run_cpu_s:
            ended.reached = "cpu"
        elif not ended.reached and code and self._is_victim(ended, code):
            ended.reached = KILLED
        peak = max(ended.peak_mb, usage.ru_maxrss / 1024)
        answer = {"id": ended.number, "code": code, "cpu_s": cpu_s, "peak_mb": peak, "reached": ended.reached}
        self._send({**answer, "waited_s": ended.waiting.waited_s})

    def _is_victim(self, ended: _Running, code: int) -> bool:
        """Return True if the machine ended a failed program, or a process of it: it had no memory left."""
        before, self._oom_kills = self._oom_kills, uses.oom_kills()
        if ended.killed:
            return False
        # No program can send this signal to the first process of its namespace.
        return self._oom_kills > before or (code == -signal.SIGKILL and self._setup["namespaces"])

    def _look(self, running: list[_Running]) -> None:
        """Kill children that reach a limit, with all their processes."""
        found = uses.all_uses()
        for each in running:
            each.look(uses.tree_of(each.pid, found))
            if each.reached:
                self._kill(each)

    def _kill(self, child_of: _Running) -> None:
        """Kill a child. All others in its namespace of processes die with it."""
        if select.select([child_of.pidfd], [], [], 0)[0]:
            return  # it has ended
        child_of.killed = True
        if self._setup["namespaces"]:
            os.kill(child_of.pid, signal.SIGKILL)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child_of.pid, signal.SIGKILL)

    def _send(self, message: dict[str, Any]) -> None:
        self._control.sendall(json.dumps(message).encode())


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
    child.rehearse(setup)
    preload.freeze()
    control.sendall(
        json.dumps({"up": True, "landlock": kernel.landlock_abi(), "seccomp": confine.has_filter()}).encode()
    )
    Zygote(control, setup).serve()
