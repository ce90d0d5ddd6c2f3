"""The zygote: a process in the sandbox that forks a confined process per program. It never sees a program.

    outside ──{id, mode, limits} + descriptors──> zygote ──clone──> child (PID 1 of its own namespace)
    outside <──{id, status, cpu_s, ...}────────── zygote <──exit─── child, and all that it started
    outside ──────────source, tests─────(descriptors)─────────────> child

Sources and tests go from the outside to the child directly: no program finds those of another in its memory, which is
a copy of the zygote's.
"""

from __future__ import annotations

import array
import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any

from . import child, confine, kernel

MAX_MESSAGE = 1 << 16
MAX_DESCRIPTORS = 8
LOOK_S = 0.05  # between two looks at the use of CPU and memory by a program and what it started
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_MB = os.sysconf("SC_PAGE_SIZE") / (1 << 20)


class _Running:
    """A child: its number and limits, and the limit that it reached."""

    def __init__(self, message: dict[str, Any], pid: int) -> None:
        self.number: int = message["id"]
        self.limits: dict[str, Any] = message["limits"]
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.begin = time.monotonic()
        self.reached = ""
        self.peak_mb = 0.0


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
            old = [each for each in self._children.values() if now - each.begin > LOOK_S]
            if old:
                self._look(old)

    def _command(self) -> bool:
        data, ancillary, _, _ = self._control.recvmsg(MAX_MESSAGE, socket.CMSG_SPACE(4 * MAX_DESCRIPTORS))
        if not data:
            return False
        message = json.loads(data)
        if "kill" in message:
            for each in self._children.values():
                if each.number == message["kill"]:
                    os.kill(each.pid, signal.SIGKILL)
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
            child_of = _Running(message, pid)
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
        if not ended.reached and cpu_s > ended.limits["cpu_s"]:
            ended.reached = "cpu"
        peak = max(ended.peak_mb, usage.ru_maxrss / 1024)
        code = os.waitstatus_to_exitcode(status)
        self._send({"id": ended.number, "code": code, "cpu_s": cpu_s, "peak_mb": peak, "reached": ended.reached})

    def _look(self, running: list[_Running]) -> None:
        """Kill children that use too much, with what they started."""
        children: dict[int, list[int]] = {}
        use: dict[int, tuple[float, float]] = {}
        for name in os.listdir("/proc"):
            if name.isdigit() and (found := _stat(int(name))):
                parent, cpu_s, memory_mb = found
                children.setdefault(parent, []).append(int(name))
                use[int(name)] = cpu_s, memory_mb
        for each in running:
            cpu_s = memory_mb = 0.0
            todo = [each.pid]
            while todo:
                pid = todo.pop()
                todo += children.get(pid, [])
                cpu, memory = use.get(pid, (0.0, 0.0))
                cpu_s += cpu
                memory_mb += memory
            each.peak_mb = max(each.peak_mb, memory_mb)
            if cpu_s > each.limits["cpu_s"]:
                each.reached = each.reached or "cpu"
            if memory_mb > each.limits["memory_mb"]:
                each.reached = each.reached or "memory"
            if each.reached:
                os.kill(each.pid, signal.SIGKILL)

    def _send(self, message: dict[str, Any]) -> None:
        self._control.sendall(json.dumps(message).encode())


def _stat(pid: int) -> tuple[int, float, float] | None:
    """Return parent, CPU time with that of ended children, and memory of its own in MiB."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        with open(f"/proc/{pid}/statm", "rb") as file:
            pages = file.read().split()
    except OSError:
        return None  # it has ended
    ticks = sum(int(each) for each in fields[11:15])
    return int(fields[1]), ticks / _TICKS, (int(pages[1]) - int(pages[2])) * _PAGE_MB


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    setup = json.loads(sys.argv[2])
    if user := setup["user"]:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    if not setup["namespaces"]:
        kernel.die_with_parent()
    kernel.set_dumpable(False)
    child.preload()
    control.sendall(
        json.dumps({"up": True, "landlock": kernel.landlock_abi(), "seccomp": confine.has_filter()}).encode()
    )
    Zygote(control, setup).serve()
