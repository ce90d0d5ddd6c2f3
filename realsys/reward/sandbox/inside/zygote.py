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
import gc
import json
import os
import re
import select
import signal
import socket
import sys
import time
from typing import Any, NamedTuple

from . import confine, kernel, plain, program, unit_tests

MAX_MESSAGE = 1 << 16
MAX_DESCRIPTORS = 8
KILLED = "killed"  # "reached" of a program that neither it nor the zygote has ended
#: modules that programs import most
_COMMON = (
    "ast bisect collections copy datetime decimal fractions functools heapq io itertools json math operator os random "
    "re statistics string sys threading time traceback typing"
)
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
        self.waiting = Waiting(self.born)
        self.last: dict[int, Use] = {}
        self.reached = ""
        self.killed = False  # the zygote has killed it
        self.peak_mb = 0.0

    def mark(self, tree: dict[int, Use]) -> None:
        """Begin another run."""
        self._look_at_waiting(tree)
        self.waiting.begin()
        self.begin = time.monotonic()
        self.cpu_before_s = self._cpu_s(tree)

    def _cpu_s(self, tree: dict[int, Use]) -> float:
        """Return the CPU time of all processes until now."""
        # A program may have the kernel forget its ended children. A number may also have been given to another one.
        gone = [use for pid, use in self.last.items() if pid not in tree or tree[pid].born != use.born]
        collected_s = sum(use.children_s for use in tree.values()) - sum(use.children_s for use in self.last.values())
        self.ended_cpu_s += max(0.0, sum(use.cpu_s + use.children_s for use in gone) - max(0.0, collected_s))
        self.last = tree
        return self.ended_cpu_s + sum(use.cpu_s + use.children_s for use in tree.values())

    def look(self, tree: dict[int, Use]) -> None:
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

    def _look_at_waiting(self, tree: dict[int, Use]) -> None:
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
        self.waiting.look(time.monotonic(), tasks, last_pid(), stolen())

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
        self._oom_kills = oom_kills()

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
                each.mark(tree_of(each.pid, all_uses()))
            elif each.number == message.get("ask"):
                each.look(tree_of(each.pid, all_uses()))
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
            _run_child(message, descriptors, self._setup, self._user)
        finally:
            os._exit(BROKEN)

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
        before, self._oom_kills = self._oom_kills, oom_kills()
        if ended.killed:
            return False
        # No program can send this signal to the first process of its namespace.
        return self._oom_kills > before or (code == -signal.SIGKILL and self._setup["namespaces"])

    def _look(self, running: list[_Running]) -> None:
        """Kill children that reach a limit, with all their processes."""
        found = all_uses()
        for each in running:
            each.look(tree_of(each.pid, found))
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
    for name in _COMMON.split():
        __import__(name)  # once for all programs
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
    _prepare(setup)
    control.sendall(b"up")
    Zygote(control, setup).serve()


# ---- a child: confines itself, says that it is ready, and then runs what the outside sends
#
# The zygote rehearses what each child does, with programs of this module only. A child shares the memory of the zygote
# until it writes to it; then the kernel copies that page. The interpreter writes to memory when it runs code for the
# first times: it specializes instructions, and fills caches. After the rehearsal most of that is done, and a child
# copies fewer pages.


BROKEN = 99  # exit code of a child that could not begin; it has not said that it is ready
READY = b"ready"
_NICE = 10  # so that the zygote, which watches over the limits, runs first
_REHEARSALS = 20  # the interpreter specializes instructions that ran 8 times
_PROGRAM = "def double(n):\n    return 2 * n\n\n\nif __name__ == '__main__':\n    print(double(int(input())))\n"
_TESTS = "def check(f):\n    assert f([1]) == [1]\n\n\ncheck(double)\n"


def _run_child(message: dict[str, Any], descriptors: list[int], setup: dict[str, Any], user: tuple[int, int]) -> None:
    """Run the child; it ends the process."""
    mode, limits = message["mode"], message["limits"]
    gc.disable()
    channel, *rest = _low(descriptors)
    try:
        os.setpgid(0, 0)
        if not setup["namespaces"]:
            kernel.die_with_parent()
        else:
            confine.enter_namespaces(*user)
            confine.own_folders(int(limits["disk_mb"]))
        os.chdir(confine.TMP)
        os.umask(0o077)
        with contextlib.suppress(OSError):
            os.nice(_NICE)
        confine.limit(limits, namespaces=setup["namespaces"])
        if setup["namespaces"]:
            confine.give_up(setup["readable"])
    except OSError as error:
        plain.send(channel, f"broken: {error}".encode())
        os._exit(BROKEN)
    plain.send(channel, READY)
    data = plain.receive(channel)
    if data is None:
        os._exit(BROKEN)
    task = plain.decode(data)
    del data
    gc.enable()
    if mode == "test":
        unit_tests.run(task, channel, rest[0])
    elif mode == "command":
        program.command(task, channel, rest)
    elif mode == "serve":
        os.close(channel)
        program.serve(task, rest[0])
    else:
        os.close(channel)
        program.run(task, rest)


def _low(descriptors: list[int]) -> list[int]:
    """Move the descriptors to 3, 4, ..., make 0, 1 and 2 null, and close all others."""
    high = [os.dup2(each, 200 + place) for place, each in enumerate(descriptors)]
    null = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    low = [os.dup2(each, 3 + place, inheritable=False) for place, each in enumerate(high)]
    os.closerange(3 + len(low), 1 << 16)
    return low


class _Link(unit_tests.Link):
    """A link to no program: functions return their argument."""

    def ask(
        self, operation: str, target: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        return lambda value: value


def _prepare(setup: dict[str, Any]) -> None:
    """Have the zygote do what children do, leave everything as it was, and make its modules final."""
    before = sys.argv, sys.modules["__main__"]
    for _ in range(_REHEARSALS):
        if setup["namespaces"]:
            confine.rehearse(setup["readable"])
        task = plain.decode(plain.encode({"source": _PROGRAM, "function": "double", "trusted": [], "files": (b"",)}))
        namespace = program.load_source(task["source"], "program")
        request = plain.decode(plain.encode(("call", "double", [1], {})))
        plain.decode(plain.encode(("ok", program.answer_request(namespace, [], request)), lambda value: 0))
        unit_tests.test({**task, "source": _TESTS}, _Link(-1))
        null = os.open("/dev/null", os.O_RDWR)
        for mode in ("r", "w"):
            with program.open_text(null, mode) as file:
                file.read() if mode == "r" else file.write("1\n")
        os.close(null)
    sys.argv, sys.modules["__main__"] = before
    del sys.modules["program"]
    sys.path[:] = [path for path in sys.path if path != "/realsys"]
    gc.collect()
    gc.freeze()  # a child that collects garbage does not touch, and so not copy, the memory of the modules


# ---- time, processors and memory that a program uses
#
# Waiting is the time in which the machine had no processor for the program; it is counted without I/O.
#
# `own-wait-counts`: if a program makes its own threads wait for each other, this is its own time.
#
# 1. Waiting is free if no thread ran meanwhile. So a program pays with CPU time for the waiting that it causes. So is
#    the time in which the host of a virtual machine took a processor away, which no thread counts as waiting.
# 2. If children were started since the last check, and several threads can run at this check or at the last, nothing
#    is free: the CPU time of a child that ended between two checks may be unknown. Checks have random distances, so
#    that children cannot hide from them.


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
