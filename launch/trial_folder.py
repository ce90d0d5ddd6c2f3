"""One launcher per trial folder: a lock that the kernel frees when all of its holders have ended, however they ended.

The launcher takes it and lets every worker inherit it. So it is free only when no process of a run can write into the
folder any more: workers of a killed launcher have some seconds to stop, and the next launcher waits for them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Self

import msgspec

from realsys.cluster.names.connect import make_name_store, trial_names
from realsys.cluster.names.file_store import boot_id
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.errors import ConfigError, RealsysError

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
        # the holder before may have removed the folder
        try:
            found = self._path.stat().st_ino
        except FileNotFoundError:
            found = -1
        if found != os.fstat(self.fd).st_ino:
            problem = f"another launcher removed {self._path.parent} at this moment: try again"
            raise ConfigError("trial", self._trial, problem)

    def _taken(self) -> bool:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

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


# ---- keys of a trial in a name store that outlives it: claimed before its processes start, removed at its end
#
#     start    wait for the leases of the last run ──> remove its keys ──> write where the trial's folder is
#     end      remove all keys, those of killed processes too
#
# A launcher that was killed removes nothing: then `realsys gc` does. The key ``folder`` names the folder of the
# trial, whose lock tells if it runs.


_POLL_S = 0.1
_END_S = 3.0  # the end of a run waits this long for a name store that does not answer


class TrialFolder(msgspec.Struct, frozen=True):
    """Value of the key ``folder``."""

    host: str
    path: str


def outlives_trials(config: Config) -> bool:
    """Return True if the name store is outside the trial folder: its keys stay when all processes have ended."""
    settings = config.cluster.name_store
    return not settings.start and (settings.backend == "etcd" or bool(settings.root))


def claim_keys(config: Config, paths: TrialPaths, say: Callable[[str], None]) -> None:
    """Remove the keys of an earlier run, and write where the trial's folder is.

    Raises ConfigError if a trial of this name runs in another folder: without its keys its workers would stop.
    """
    if not outlives_trials(config):
        return  # ``tidy`` removes it with the rest of the trial folder
    names = trial_names(config)
    store = make_name_store(config, paths)
    try:
        # workers of this folder have ended, but killed ones left their leases
        bound_s = 2 * config.cluster.lease_s
        deadline, said = time.monotonic() + bound_s, False
        while alive := store.get_subtree(names.heartbeats):
            key, value = next(iter(alive.items()))
            if time.monotonic() >= deadline:
                problem = f"runs in another folder, with the same name store ({key}: {value:.200})"
                raise ConfigError("trial", config.trial, f"{problem}: stop that first, or choose another name")
            if not said:
                say(f"waiting up to {bound_s:g} s for {len(alive)} leases of its last run to lapse")
            said = True
            threading.Event().wait(_POLL_S)
        store.clear_subtree(names.root)
        store.add(names.folder, msgspec.json.encode(TrialFolder(socket.gethostname(), str(paths.root))).decode())
    finally:
        store.close()


def remove_keys(config: Config, paths: TrialPaths, say: Callable[[str], None]) -> None:
    """Remove the keys of a trial whose processes have ended. If the name store does not answer, they stay."""
    if not outlives_trials(config):
        return
    try:
        store = make_name_store(config, paths, _END_S)
        try:
            store.clear_subtree(trial_names(config).root)
        finally:
            store.close()
    except RealsysError as error:
        say(f"the keys of this trial stay in the name store, until `realsys gc {paths.root}` removes them: {error}")


def folder_in(value: str) -> Path | None:
    """Return the trial folder in a value of the key ``folder``; None if it is on another host and not seen here.

    Raises ValueError for another value.
    """
    folder = msgspec.json.decode(value, type=TrialFolder)
    path = Path(folder.path)
    return path if folder.host == socket.gethostname() or path.is_dir() else None


# ---- puts away what a dead run left in its trial folder: names, half-written files, its report and its errors


_KEPT_ERRORS = 50  # files of earlier starts
_HALF_WRITTEN = (
    "*.tmp",
    "keys/*.tmp",
    "weights/*/*.tmp",
    "checkpoints/*.tmp",
    "hf/*.tmp",
    "record/*.tmp",
    "errors/.*",
    "stopping",
    "stop",
)


def tidy(paths: TrialPaths) -> None:
    """Remove what the last run left and the next must not meet, and nothing that training continues from.

    Raises OSError.
    """
    for left in (*own_stores(paths), *half_written(paths)):
        remove_path(left)
    paths.summary.unlink(missing_ok=True)  # `realsys status` would show it as the end of this run
    old = paths.errors / "old"
    for error in sorted(paths.errors.glob("*.json")):  # the next run must not take one for its first failure
        old.mkdir(exist_ok=True)
        error.replace(_free(old / error.name))
    for error in sorted(old.glob("*.json"), key=lambda path: path.stat().st_mtime)[:-_KEPT_ERRORS]:
        error.unlink()


def remove_half_written(paths: TrialPaths) -> None:
    """Remove the files that dead processes were writing. Raises OSError."""
    for path in half_written(paths):
        remove_path(path)


def half_written(paths: TrialPaths) -> list[Path]:
    """Return the files and folders that processes write, or were writing when they died."""
    return [path for pattern in _HALF_WRITTEN for path in sorted(paths.root.glob(pattern))]


def own_stores(paths: TrialPaths) -> list[Path]:
    """Return what the name stores of a run have in its folder. It is of use only while the trial runs."""
    own = (paths.name_store, paths.own_etcd, paths.store_address)
    return [*(path for path in own if path.exists()), *sorted(paths.keys.glob("etcd*.pem"))]


def remove_path(path: Path) -> None:
    """Remove a file, or a folder with all it has. Raises OSError."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _free(path: Path) -> Path:
    """Return ``path``, with a number if it is taken: a pid may be used again."""
    free, number = path, 2
    while free.exists():
        free, number = path.with_stem(f"{path.stem}-{number}"), number + 1
    return free
