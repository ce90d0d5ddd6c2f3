"""Folders of this host in which the servers of a trial share copies, and the room there. No torch.

    /dev/shm/realsys-weights-{uid}-{digest of the trial}/
        members                       every server of the trial on this host holds a shared lock
        staging-0, staging-1, ...     turns of the servers that stage
        v00000007.0001.3fa9c1e2/      a copy

The name has the trial folder with its inode, so two trials never share a name. A folder without a live member is
removed by the next server of any trial of the user.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from realsys.cluster.files import FileLock
from realsys.config.machine import free_host_bytes
from realsys.errors import WeightsError

SHARED_MEMORY = Path("/dev/shm")
MEMBERS = "members"
_PREFIX = f"realsys-weights-{os.getuid()}-"
_HEADROOM = 1.1
POLL_S = 0.02  # flock has no timeout, so a wait for a lock polls
_ENTER_S = 10.0


def places() -> list[Path]:
    """Return the folders for copies, best first: shared memory, then the folder for temporary files."""
    shared = [SHARED_MEMORY] if os.access(SHARED_MEMORY, os.W_OK) else []
    return [*shared, Path(tempfile.gettempdir())]


def folder_name(trial: Path) -> str:
    """Return the name of the folder of a trial in each place."""
    path = trial.resolve()
    # The inode tells apart trials of one path in containers that share /dev/shm.
    inode = path.stat().st_ino if path.exists() else 0
    return f"{_PREFIX}{xxhash.xxh3_64_hexdigest(f'{inode}:{path}'.encode())}"


@dataclass(frozen=True, slots=True)
class Membership:
    """The folder of a trial in one place, and this server's membership."""

    folder: Path
    lock: FileLock

    @classmethod
    def enter(cls, folder: Path) -> Membership:
        """Make the folder if it is not there, and become a member. Raises WeightsError."""
        end = time.monotonic() + _ENTER_S
        try:
            while time.monotonic() < end:  # once more if the last member removes the folder now
                if lock := _member_lock(folder):
                    return cls(folder, lock)
                time.sleep(POLL_S)
        except OSError as error:
            raise WeightsError(f"{folder} cannot be used: {error.strerror}") from error
        raise WeightsError(f"{folder} is being removed for {_ENTER_S:g} s: remove it by hand")

    def leave(self) -> None:
        """End the membership. The last member removes the folder."""
        self.lock.release()
        _remove_unused(self.folder)


def _member_lock(folder: Path) -> FileLock | None:
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise WeightsError(f"{folder} belongs to another user: remove it")
    with contextlib.suppress(FileNotFoundError):
        return FileLock.take(folder / MEMBERS, shared=True)
    return None


def sweep(where: Sequence[Path] = ()) -> None:
    """Remove the folders of all trials of this user that have no live member."""
    for place in where or places():
        for folder in place.glob(f"{_PREFIX}*"):
            _remove_unused(folder)


def _remove_unused(folder: Path) -> None:
    with contextlib.suppress(OSError):  # another process removes it, or it is not ours
        if lock := FileLock.take(folder / MEMBERS):
            # Renamed first: a server that starts now must not lose its files.
            gone = folder.rename(folder.with_name(f"{folder.name}.{os.getpid()}.gone"))
            lock.release()
            shutil.rmtree(gone)


def free_bytes(place: Path) -> int:
    """Return the room in a place. A disk in memory reports more than there is: all processes share the memory."""
    free = shutil.disk_usage(place).free
    return min(free, free_host_bytes()) if _in_memory(place) else free


def choose(where: Sequence[Path], size: int, version: int) -> Path:
    """Return the first place with room for ``size`` bytes. Raises WeightsError if there is none."""
    free = {place: free_bytes(place) for place in where}
    for place, room in free.items():
        if size * _HEADROOM < room:
            return place
    rooms = ", ".join(f"{place} has {room / 1e9:.2f} GB" for place, room in free.items())
    raise WeightsError(
        f"no room on this host for the copy of version {version} ({size / 1e9:.2f} GB, {_HEADROOM - 1:.0%} to spare): "
        f"{rooms}: allow the job or container more memory (--mem, --shm-size), or let TMPDIR name a local disk"
    )


def _in_memory(path: Path) -> bool:
    """Return True if ``path`` is on a disk in memory."""
    kinds = dict(_mounts())
    return next((kinds[str(each)] for each in (path, *path.parents) if str(each) in kinds), "") in ("tmpfs", "ramfs")


def _mounts() -> Iterator[tuple[str, str]]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text("utf-8", errors="replace").splitlines():
            _, path, kind, *_ = line.split(" ")
            yield path, kind
