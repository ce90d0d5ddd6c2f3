"""The process between a generation server and SGLang. It sees to it that nothing of SGLang outlives the server.

    server ──stdin──> guard ──> sglang.launch_server ──> scheduler, detokenizer, ...

waits for    the end of its standard input (the server closed it, or is gone, however it went) or SGLang's exit
ends with    SGLang's exit status; first every process below it is killed, and what they left in memory is removed

SGLang's processes ask the kernel to die with their parents, but only once they have imported torch: those that are
orphaned before would stay. As a subreaper the guard inherits them, and finds them. If the guard is killed itself,
SGLang's main process dies by the kernel's hand, and the others with it.

Run by path, with the standard library only: the environment is meant for SGLang's interpreter.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_TRACKER_GRACE_S = 2.0
_LOOK_MS = 1000.0  # between two looks for what SGLang has in shared memory, until it has something
_libc = ctypes.CDLL(None, use_errno=True)


def main(argv: Sequence[str] | None = None) -> int:
    """``guard.py [--remove DIR] -- COMMAND...``"""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--remove", type=Path, help="folder to remove at the end")
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args(argv)
    # A stop comes through the pipe. A signal sent to the whole group must not end the guard before its charges.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        return _run(arguments.command)
    finally:
        if arguments.remove is not None:
            shutil.rmtree(arguments.remove, ignore_errors=True)


def _run(command: Sequence[str]) -> int:
    guard = os.getpid()

    def prepare() -> None:  # in the child: this process has one thread only, so nothing can be half-done there
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != guard:
            os._exit(1)

    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=prepare)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return 127
    pidfd = os.pidfd_open(child.pid)
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    poller.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    segments = set[Path]()
    # While it lives: it takes its children with it, and nobody can say then what they had mapped.
    while not poller.poll(None if segments else _LOOK_MS):
        segments = _segments()
        for segment in segments:
            print(f"guard: {segment} goes when SGLang does", flush=True)
    status = child.poll()
    _kill_all(segments)
    if status is None:
        return 0
    return status if status >= 0 else 128 - status


def _kill_all(segments: set[Path]) -> None:
    """Kill and reap everything below this process; the orphans of what dies come to it in turn. ``segments`` go too."""
    segments |= _segments()
    deadline = time.monotonic() + _TRACKER_GRACE_S
    while children := _children(os.getpid()):
        # A resource tracker ends by itself once its users have, and first removes the semaphores they left.
        trackers = {pid for pid in children if _is_tracker(pid)} if time.monotonic() < deadline else set()
        for pid in children:
            if pid not in trackers:
                os.kill(pid, signal.SIGKILL)  # not reaped yet, so the pid is still its own
                os.waitpid(pid, 0)
        for pid in trackers:
            _wait(pid, deadline)
    for segment in segments:
        segment.unlink(missing_ok=True)


def _wait(pid: int, deadline: float) -> None:
    """Reap it if it ends in time."""
    pidfd = os.pidfd_open(pid)
    try:
        if select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            os.waitpid(pid, 0)
    finally:
        os.close(pidfd)


def _children(pid: int) -> list[int]:
    """Of a process that may have ended."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(child) for child in task.read_text(encoding="ascii").split()]
    return found


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for child in _children(pid):
        found += [child, *_descendants(child)]
    return found


def _segments() -> set[Path]:
    return {segment for pid in _descendants(os.getpid()) for segment in _load_segments(pid)}


def _load_segments(pid: int) -> set[Path]:
    """The shared memory that SGLang writes its load to. It never removes it itself."""
    with contextlib.suppress(OSError):
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
        return {Path(name) for name in re.findall(r"(/dev/shm/sglang_loads_\S+)$", maps, re.MULTILINE)}
    return set()


def _is_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
