"""Locks on files, between processes of one host. The kernel ends a lock with its process. No torch."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path


class FileLock:
    """A lock that is held, until ``release``."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def take(cls, path: Path, *, shared: bool = False) -> FileLock | None:
        """Lock the file ``path``, which is made if its folder is there. None if the lock is held, or the file removed.

        Raises OSError if the file cannot be opened.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            # Whoever removes the file holds its lock. A lock on a removed file would exclude no later process.
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return cls(descriptor)
        os.close(descriptor)
        return None

    def touch(self) -> None:
        """Set the file's time, as a sign of life."""
        os.utime(self._descriptor)

    def release(self) -> None:
        """End the lock. A second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
