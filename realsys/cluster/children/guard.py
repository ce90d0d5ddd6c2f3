"""The process between a worker and a server of another package. It ends with the worker, and kills the server first.

    generation server ──stdin──> guard ──> sglang.launch_server ──> scheduler, detokenizer, ...
    RolloutWorker     ──stdin──> guard ──> environment server of verifiers ──> harnesses, tools, ...

waits for    the end of its standard input (the worker closed it, or ended in whatever way) or the command's exit
ends with    the command's exit status; before that it kills every process below it and removes their shared memory

SGLang's processes ask the kernel to die with their parents, but only after they have imported torch: those that are
orphaned earlier would stay. The guard is a subreaper, so it inherits and kills them. If the guard itself is killed, the
kernel kills SGLang's main process, and the others die with that.

Run by path without PYTHON* variables: the environment is meant for SGLang's interpreter, not for this one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # this realsys, also from a checkout

from realsys.cluster.children.child_process import kill_descendants
from realsys.cluster.files import occupy
from realsys.cluster.prctl import become_subreaper, die_with_parent

_TRACKER_GRACE_S = 2.0
_KILL_S = 5.0
_LOOK_MS = 1000.0  # period of the search for shared memory, until some is found
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(argv: Sequence[str] | None = None) -> int:
    """``guard.py [--grace S] [--remove DIR] [--shared PATTERN] -- COMMAND...``"""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--grace", type=float, default=0.0, help="seconds between SIGTERM for the command and SIGKILL")
    parser.add_argument("--shared", default="", help="expression for files of shared memory to remove at the end")
    parser.add_argument("--remove", type=Path, help="folder to remove at the end")
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args(argv)
    # A stop comes through the pipe. A signal to the whole group must not end the guard before SGLang.
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    become_subreaper()
    if arguments.remove is not None:
        occupy(arguments.remove)
    try:
        return _run(arguments.command, arguments.grace, arguments.shared)
    finally:
        if arguments.remove is not None:
            shutil.rmtree(arguments.remove, ignore_errors=True)


def _run(command: Sequence[str], grace_s: float, shared: str) -> int:
    guard = os.getpid()

    def prepare() -> None:  # runs in the forked child; safe, because the guard has only one thread
        for number in _STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        if not die_with_parent(signal.SIGKILL, guard):
            os._exit(1)

    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=prepare)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return 127
    poller = select.poll()
    end = os.pidfd_open(child.pid)
    poller.register(end, select.POLLIN)
    poller.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    segments = set[Path]()
    # Searched while the command lives: its children die with it, and then their memory maps are gone.
    while not poller.poll(None if segments or not shared else _LOOK_MS):
        segments = _segments(shared)
        for segment in segments:
            print(f"guard: {segment} goes when {command[0]} does", flush=True)
    segments |= _segments(shared)
    if grace_s and child.poll() is None:
        child.terminate()
        select.select([end], [], [], grace_s)
    status = child.poll()
    # A resource tracker exits after its users, and first removes the semaphores that they left.
    kill_descendants(_TRACKER_GRACE_S, may_end=_is_tracker)
    kill_descendants(_KILL_S)
    for segment in segments:
        segment.unlink(missing_ok=True)
    if status is None:
        return 0
    return status if status >= 0 else 128 - status


def _segments(shared: str) -> set[Path]:
    """Return the shared memory of the processes below this one whose names match ``shared``."""
    segments: set[Path] = set()
    if not shared:
        return segments
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8", errors="replace")
            segments |= {Path(name) for name in re.findall(rf"({shared})$", maps, re.MULTILINE)}
    return segments


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except psutil.Error:
        return False


if __name__ == "__main__":
    sys.exit(main())
