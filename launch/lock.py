"""One launcher per trial folder: a lock that the kernel gives back when its holders are gone, however they ended.

The launcher takes it and lets every worker inherit it. So it is free only when nothing of a run can write into the
folder any more: after a launcher that was killed, its workers have some seconds to stop, and the next one waits for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from pathlib import Path

import psutil

from realsys.errors import ConfigError

_LOOK_AGAIN_S = 0.05


class TrialLock:
    """Holds ``path`` until it is closed. ``fd`` is for children to inherit."""

    def __init__(self, path: Path, trial: str, *, patience_s: float) -> None:
        """Raises ConfigError naming the holder; workers that a dead launcher left have ``patience_s`` to end."""
        self._path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._take(trial, time.monotonic() + patience_s)
        except BaseException:
            os.close(self.fd)
            raise

    def _take(self, trial: str, deadline: float) -> None:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return self._still_there(trial)
            if (pid := _holder(self._path)) is not None:
                raise held_by(pid, trial)
            if time.monotonic() >= deadline:
                left = ", ".join(map(str, _workers_of(self._path.parent))) or "unknown"
                problem = f"{self._path} is still held by processes of its last run (pid {left}); end them first"
                raise ConfigError("trial", trial, problem)
            threading.Event().wait(_LOOK_AGAIN_S)  # a lock of the kernel sends no event to wait for with a bound

    def _still_there(self, trial: str) -> None:
        """Who held it before may have removed the folder."""
        try:
            found = self._path.stat().st_ino
        except FileNotFoundError:
            found = -1
        if found != os.fstat(self.fd).st_ino:
            problem = f"another launcher removed {self._path.parent} at this moment; try again"
            raise ConfigError("trial", trial, problem)

    def sign(self) -> None:
        """From now on the file names this process as the one that runs the trial."""
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, b"%d\n" % os.getpid(), 0)

    def close(self) -> None:
        """Give it back, once the children that inherited it are gone too."""
        os.close(self.fd)


def held_by(pid: int, trial: str) -> ConfigError:
    problem = f"is run by another launcher, pid {pid}; stop that first, or choose another name"
    return ConfigError("trial", trial, problem)


def running_launcher(path: Path) -> int | None:
    """The pid of the live launcher that holds the lock, None if there is none. Changes nothing."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(path)
    finally:
        os.close(fd)
    return None


def _holder(path: Path) -> int | None:
    try:
        pid = int(path.read_text("ascii"))
    except (OSError, ValueError):  # being made, or never signed
        return None
    return pid if psutil.pid_exists(pid) else None


def _workers_of(root: Path) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "--trial-dir" in (line := process.cmdline()) and str(root) in line:
                found.append(process.pid)
    return sorted(found)
