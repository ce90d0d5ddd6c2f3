"""Keeper of one episode: reads its output, counts its memory and processes, and kills all that it started."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Collection, Iterator
from typing import Any

MAX_RESULT = 1 << 20  # bytes that run may return, as JSON
PRINTED = 4096  # last bytes of the output that are kept
_LOOK_S = 1.0  # between two measurements of memory and processes
_KILL_S = 5.0  # bound on the end of killed processes
_CHUNK = 1 << 16


class Keeper:
    """Watch over the process ``child``.

    reached  limit that it reached: memory, processes, result; closed: the connection is; "": none
    code     exit code, or minus the signal
    """

    def __init__(self, child: int, connection: int, result: int, output: int, limits: dict[str, Any]) -> None:
        self._child = child
        self._limits = limits
        self._result = result
        self._output = output
        self._ended = os.pidfd_open(child)
        self._poll = select.poll()
        self._poll.register(self._ended, select.POLLIN)
        self._poll.register(connection, select.POLLRDHUP)
        for pipe in (result, output):
            os.set_blocking(pipe, False)
            self._poll.register(pipe, select.POLLIN)
        self.result = bytearray()
        self.printed = bytearray()
        self.bytes = 0  # length of the output
        self.reached = ""
        self.code = -int(signal.SIGKILL)

    def watch(self) -> None:
        """Return when the episode has ended or must be killed."""
        look = time.monotonic() + _LOOK_S
        while not self.reached:
            ready = {descriptor for descriptor, _ in self._poll.poll(_LOOK_S * 1000)}
            self._read()
            if self._ended in ready:
                self.code = os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])
                return
            if ready - {self._result, self._output}:
                self.reached = "closed"
            elif time.monotonic() > look:
                self.reached = self.reached or reached(self._limits)
                look = time.monotonic() + _LOOK_S

    def _read(self) -> None:
        for chunk in self._chunks(self._output):
            self.bytes += len(chunk)
            self.printed = (self.printed + chunk)[-PRINTED:]
        for chunk in self._chunks(self._result):
            self.result += chunk
        if len(self.result) > MAX_RESULT:
            self.reached = "result"

    def _chunks(self, pipe: int) -> Iterator[bytes]:
        """Yield what a pipe holds now: at most 2 MiB, so that the limits are checked while an agent prints."""
        for _ in range(2 * MAX_RESULT // _CHUNK):
            chunk = self._chunk(pipe)
            if not chunk:
                return
            yield chunk

    def _chunk(self, pipe: int) -> bytes:
        try:
            chunk = os.read(pipe, _CHUNK)
        except BlockingIOError:
            return b""
        if not chunk:
            with contextlib.suppress(KeyError):
                self._poll.unregister(pipe)  # it stays readable, so the loop would spin
        return chunk


def reached(limits: dict[str, Any]) -> str:
    """Return the limit that the processes below this one have reached together, or ""."""
    below = descendants(os.getpid())
    if len(below) > limits["processes"]:
        return "processes"
    bound = 2 * limits["memory_mb"] * 1024  # KiB; the kernel bounds each process, too
    # Pages that a fork shares with the zygote count in every process: exact numbers only if these are too large.
    if sum(field_of(pid, "status", "RssAnon") for pid in below) > bound:
        return "memory" if sum(field_of(pid, "smaps_rollup", "Pss_Anon") for pid in below) > bound else ""
    return ""


def field_of(pid: int, file: str, name: str) -> int:
    """Return a number of /proc in KiB; 0 if the process has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/{file}") as lines:
        for line in lines:
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
    return 0


def descendants(pid: int, spared: Collection[int] = ()) -> list[int]:
    """Return all processes below ``pid``, also those that have ended and are not collected yet.

    ``spared`` and the processes below them are left out.
    """
    below: list[int] = []
    waiting = [pid]
    while waiting:
        children = [child for child in children_of(waiting.pop()) if child not in spared]
        below += children
        waiting += children
    return below


def children_of(pid: int) -> list[int]:
    """Return the children of a process; none if it has ended."""
    with contextlib.suppress(OSError):
        threads = os.listdir(f"/proc/{pid}/task")
        return [child for thread in threads for child in _children(pid, thread)]
    return []


def _children(pid: int, thread: str) -> list[int]:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as children:
        return [int(child) for child in children.read().split()]
    return []


def kill_all(spared: Collection[int] = ()) -> None:
    """Kill all processes below this one, but for ``spared`` and the processes below them.

    Orphans of a killed process become children of their subreaper, so there are several rounds.
    """
    deadline = time.monotonic() + _KILL_S
    while (below := descendants(os.getpid(), spared)) and time.monotonic() < deadline:
        for pid in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in below:
            with contextlib.suppress(ChildProcessError):  # not a child, or not yet
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.001)
