"""A directory that one operation holds open.

All paths are relative to one descriptor, and a file counts as missing only if the top folder of its path is in that
directory. So a directory that is renamed or mounted again in the middle of an operation never makes a file look
missing: the operation ends in the directory in which it began, or fails with OSError.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Self

_MISSING = (FileNotFoundError, NotADirectoryError)
_CHUNK_BYTES = 1 << 16


class HeldDirectory:
    """The directory at ``path``, from its opening until ``close``. All methods raise OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, path: str, flags: int) -> int:
        """Open a file. Returns a descriptor, which the caller must close."""
        return os.open(path, flags | os.O_CLOEXEC, 0o666, dir_fd=self._descriptor)

    def read(self, path: str) -> bytes | None:
        """Return the content of a file, or None if it is missing."""
        try:
            descriptor = self.open(path, os.O_RDONLY)
        except _MISSING:
            self._check_top_of(path)
            return None
        try:
            content = os.read(descriptor, _CHUNK_BYTES)
            while chunk := os.read(descriptor, _CHUNK_BYTES):
                content += chunk
            return content
        finally:
            os.close(descriptor)

    def write(self, path: str, content: bytes) -> None:
        """Create a file."""
        with open(self.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(content)

    def names(self, path: str) -> list[str]:
        """Return the names in a folder; [] if it is missing."""
        try:
            descriptor = self.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except _MISSING:
            self._check_top_of(path)
            return []
        try:
            return os.listdir(descriptor)
        finally:
            os.close(descriptor)

    def make(self, path: str) -> None:
        """Create a folder and those above it. Does nothing if it exists."""
        try:
            os.mkdir(path, dir_fd=self._descriptor)
        except FileExistsError:
            return
        except FileNotFoundError:
            self.make(os.path.dirname(path))
            self.make(path)

    def rename(self, source: str, target: str) -> None:
        """Rename a file, which replaces ``target``."""
        os.rename(source, target, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def link(self, source: str, target: str) -> None:
        """Give a file a second name. Raises FileExistsError."""
        os.link(source, target, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def remove(self, path: str) -> bool:
        """Remove a file. Returns False if it was missing."""
        try:
            os.unlink(path, dir_fd=self._descriptor)
        except _MISSING:
            self._check_top_of(path)
            return False
        return True

    def files(self, path: str) -> Iterator[str]:
        """Yield the files below a folder, the deepest first."""
        with contextlib.suppress(FileNotFoundError):
            for folder, _, names, _ in os.fwalk(path, topdown=False, dir_fd=self._descriptor):
                yield from (f"{folder}/{name}" for name in names)

    def remove_tree(self, path: str) -> None:
        """Remove a folder and all below it. Does nothing if it is missing."""
        with contextlib.suppress(FileNotFoundError):
            for _, folders, names, descriptor in os.fwalk(path, topdown=False, dir_fd=self._descriptor):
                for name in names:
                    os.unlink(name, dir_fd=descriptor)
                for name in folders:
                    os.rmdir(name, dir_fd=descriptor)
            os.rmdir(path, dir_fd=self._descriptor)

    def _check_top_of(self, path: str) -> None:
        """Raise FileNotFoundError if the first folder of ``path`` is missing: then nothing is known of the file."""
        os.stat(path.partition("/")[0], dir_fd=self._descriptor)
