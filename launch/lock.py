"""One launcher per trial folder: a lock that the kernel frees when all of its holders have ended, however they ended.

The launcher takes it and lets every worker inherit it. So it is free only when no process of a run can write into the
folder any more: workers of a killed launcher have some seconds to stop, and the next launcher waits for them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Self

from realsys.cluster.store.file_store import boot_id
from realsys.errors import ConfigError

_LOOK_AGAIN_S = 0.05


class _Signature(NamedTuple):
    """Process that ran the trial last. ``started``: clock ticks since boot; with the pid it identifies the process."""

    pid: int
    started: int
    boot: str
    host: str

    @classmethod
    def of_this_process(cls) -> Self:
        started = _started(os.getpid())
        assert started is not None
        return cls(os.getpid(), started, boot_id(), socket.gethostname())

    @classmethod
    def read(cls, path: Path) -> Self | None:
        try:
            pid, started, boot, host = path.read_text("utf-8").split()
            return cls(int(pid), int(started), boot, host)
        except (OSError, ValueError):  # being made, never signed, or written by another realsys
            return None

    @property
    def alive(self) -> bool:
        """True if the process runs on this machine."""
        return self.boot == boot_id() and _started(self.pid) == self.started


class TrialLock:
    """Lock on ``path`` until it is closed. Children inherit ``fd``."""

    def __init__(
        self, path: Path, trial: str, *, retry_timeout_s: float, say: Callable[[str], None] = lambda text: None
    ) -> None:
        """Take the lock; workers that a dead launcher left have ``retry_timeout_s`` to end.

        ``say`` gets a line if the lock waits for them. Raises ConfigError naming the holder.
        """
        self._path, self._trial = path, trial
        try:
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as exc:
            raise self._unusable("opened for writing", exc) from None
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            try:
                self._take(retry_timeout_s, say)
            except OSError as exc:
                raise self._unusable("locked", exc) from None
            undo.pop_all()

    def _take(self, retry_timeout_s: float, say: Callable[[str], None]) -> None:
        deadline, looks = time.monotonic() + retry_timeout_s, 0
        while not self._taken():
            if (pid := _live_holder(self._path)) is not None:
                raise held_by(pid, self._trial)
            if time.monotonic() >= deadline:
                problem = f"{self._path} is still held by {_holders(self._path)}; wait until they end, or end them"
                raise ConfigError("trial", self._trial, problem)
            looks += 1
            if looks == 2:  # `running_launcher` holds the lock for a moment, too
                say(f"waiting up to {retry_timeout_s:g} s for {_holders(self._path)}")
            threading.Event().wait(_LOOK_AGAIN_S)  # the kernel sends no event for a lock
        self._still_there()

    def _taken(self) -> bool:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _still_there(self) -> None:
        """Raise ConfigError if the holder before removed the folder."""
        try:
            found = self._path.stat().st_ino
        except FileNotFoundError:
            found = -1
        if found != os.fstat(self.fd).st_ino:
            problem = f"another launcher removed {self._path.parent} at this moment: try again"
            raise ConfigError("trial", self._trial, problem)

    def sign(self) -> None:
        """Write this process into the file as the one that runs the trial. Raises ConfigError."""
        line = " ".join(map(str, _Signature.of_this_process())) + "\n"
        try:
            os.ftruncate(self.fd, 0)
            os.pwrite(self.fd, line.encode(), 0)
        except OSError as exc:
            raise self._unusable("written", exc) from None

    def close(self) -> None:
        """Close it; the lock is free once the children that inherited it have ended, too."""
        os.close(self.fd)

    def _unusable(self, what: str, exc: OSError) -> ConfigError:
        problem = (
            f"{self._path} cannot be {what}: {exc.strerror}: the trial folder must be writable, and its file system "
            "must have locks (flock); set another fileroot"
        )
        return ConfigError("trial", self._trial, problem)


def held_by(pid: int, trial: str) -> ConfigError:
    problem = f"is run by another launcher, pid {pid}; stop that first, or choose another name"
    return ConfigError("trial", trial, problem)


def running_launcher(path: Path) -> int | None:
    """Return the pid of the live launcher that holds the lock, None if no such process is visible. Writes nothing."""
    return _live_holder(path) if is_held(path) else None


def is_held(path: Path, *, if_unknown: bool = False) -> bool:
    """Return True if a process holds a lock on the file, on any host whose locks this one sees. Changes nothing.

    ``if_unknown``: the answer if that cannot be found out, as for a file of another user.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return if_unknown
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return if_unknown
    finally:
        os.close(fd)
    return False


def ran_here(path: Path) -> bool:
    """Return True if the last launcher ran on this machine since its boot: here ``is_held`` tells if it has ended."""
    signature = _Signature.read(path)
    return signature is not None and signature.boot == boot_id()


def _live_holder(path: Path) -> int | None:
    """Return the pid of the launcher that signed, None if that process has ended."""
    signature = _Signature.read(path)
    return signature.pid if signature is not None and signature.alive else None


def _holders(path: Path) -> str:
    """Describe the holders of the lock if the launcher that signed has ended."""
    if pids := _pids_that_hold(path):
        listed = ", ".join(map(str, pids))
        return f"processes of its last run, or a launcher that is starting (pid {listed})"
    last = _Signature.read(path)
    by = "" if last is None else f"; the last launcher was pid {last.pid} on {last.host}"
    return f"invisible processes of another user, container or host{by}"


def _pids_that_hold(path: Path) -> list[int]:
    """Return the processes on this machine that hold or inherited the lock, without those that wait for it."""
    file = str(path.resolve())
    return sorted(int(process.name) for process in Path("/proc").glob("[0-9]*") if _holds(process, file))


def _holds(process: Path, file: str) -> bool:
    """Return True if the process with this folder in /proc has ``file`` open and locked."""
    try:
        descriptors = list((process / "fd").iterdir())
    except OSError:  # it has ended, or belongs to another user
        return False
    return any(_is_lock(process, fd.name, file) for fd in descriptors)


def _is_lock(process: Path, fd: str, file: str) -> bool:
    """Return True if this file descriptor of the process is ``file``, locked; False if it is closed meanwhile."""
    try:
        return os.readlink(process / "fd" / fd) == file and "FLOCK" in (process / "fdinfo" / fd).read_text()
    except OSError:
        return False


def _started(pid: int) -> int | None:
    """Return when the process started, in clock ticks since boot; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
