"""Single files: written durably, with their size and checksum; locks; scratch folders. No torch."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import xxhash

#: bytes that are hashed and written at a time; few enough to stay in the CPU cache between the two
_CHUNK = 1 << 20


class FileInfo(msgspec.Struct, frozen=True):
    """Size and checksum of a file."""

    size: int  # bytes
    checksum: str  # xxh3-64 of the whole file, hex


class TensorEntry(NamedTuple):
    """One tensor of a safetensors file."""

    name: str
    dtype: str  # name in safetensors: BF16, F32, ...
    shape: Sequence[int]
    size: int  # bytes


@contextlib.contextmanager
def durable_file(path: Path) -> Iterator[BinaryIO]:
    """Open a new file, and fsync it when the block ends without an error. Raises OSError."""
    try:
        with path.open("wb") as file:
            yield file
            file.flush()
            # Without fsync the error of a full or broken network disk is lost, and after a
            # power cut the renamed folder may hold files without content.
            os.fsync(file.fileno())
    except OSError as error:
        # write() and fsync() do not name the file in their errors; open() does.
        raise OSError(error.errno, error.strerror, error.filename or str(path)) from error


def write_durably(path: Path, data: bytes) -> None:
    """Write and fsync one file. Raises OSError with its path."""
    with durable_file(path) as file:
        file.write(data)


def write_secret(path: Path, content: bytes) -> None:
    """Replace a file by one that only this user can read: its mode is set when it is created. Raises OSError."""
    staged = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)


def fsync_directory(path: Path) -> None:
    """Make the names in a folder durable: fsync of a file does not store its directory entry."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_safetensors(
    path: Path, entries: Sequence[TensorEntry], contents: Iterable[memoryview]
) -> tuple[FileInfo, list[int]]:
    """Write one fsynced safetensors file, one tensor in memory at a time.

    ``contents``: bytes of the tensors, in the order of ``entries``. Returns the file's info, and the
    byte at which each tensor begins. The checksum covers the bytes that were handed to the file
    system, so a reader verifies exactly what the writer had. Raises OSError.
    """
    digest = xxhash.xxh3_64()
    size = 0
    starts: list[int] = []
    with durable_file(path) as file:
        for content in itertools.chain([memoryview(safetensors_header(entries))], contents):
            starts.append(size)
            for at in range(0, len(content), _CHUNK):
                chunk = content[at : at + _CHUNK]
                digest.update(chunk)
                file.write(chunk)
            size += len(content)
    return FileInfo(size, digest.hexdigest()), starts[1:]


def safetensors_header(entries: Sequence[TensorEntry]) -> bytes:
    """Return the bytes of a safetensors file before its tensors, which follow in the order of ``entries``."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape, size in entries:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    body = msgspec.json.encode(header)
    body += b" " * (-len(body) % 8)  # readers map the file: the tensors must begin at a multiple of 8
    return len(body).to_bytes(8, "little") + body


#: inode, time of the last change in ns, size
FileStamp = tuple[int, int, int]


def file_stamp(path: Path) -> FileStamp | None:
    """Return what tells a file from a later one of the same name; None if it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


# ---- locks between processes of one host. The kernel ends a lock with its process


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


# ---- folders that processes have on disks in memory
#
# A process that is killed leaves its folder there, until the machine has no memory left. `realsys gc` removes a folder
# that no process has locked.


#: file in the folder that every user of it keeps locked
MEMBERS = "members"
PREFIX = "realsys-"


def occupy(folder: Path) -> int:
    """Lock ``folder`` until this process ends or closes the returned descriptor."""
    descriptor = os.open(folder / MEMBERS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor
