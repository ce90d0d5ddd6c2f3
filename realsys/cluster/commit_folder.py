"""Folders that exist completely or not at all: weight versions, checkpoints, step records. No torch.

    prepare ──> NAME.tmp/   the writers fill it, and each syncs its own files
    commit  ──> manifest ──> fsync of the folder ──> rename to NAME/ ──> fsync of the parent
    read    ──> the manifest, its checksum compared       verify ──> and those of all files
    remove  ──> the manifest first, then the rest

Rules, on which every reader relies:

- ``exists-once-committed``: a folder exists once it has its manifest and has lost ``.tmp``. A crash
  at any moment leaves a complete folder or an incomplete one, which no reader takes for complete.
- ``damage-is-named``: a file that is not what its writer wrote is an error that names the file and
  what to do. Sizes and checksums of all files are in the manifest, and the manifest has its own.
- ``older-format-is-refused``: a manifest of another format number is refused, never guessed at.
- A process that has lost its lease writes no manifest and renames nothing (``check_alive``).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import xxhash

from realsys.cluster.failpoint import failpoint
from realsys.cluster.files import FileInfo, fsync_directory, write_durably
from realsys.cluster.lease import CheckAlive, unleased
from realsys.errors import MALFORMED, RealsysError

TEMPORARY, DAMAGED = ".tmp", ".damaged"  # suffixes of folders that are not complete
_READERS = 4  # threads that verify
_CHUNK = 1 << 22  # bytes read at a time


class FolderManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all manifests. ``files``: every other file of the folder, by name."""

    files: dict[str, FileInfo] = {}


class _Envelope(msgspec.Struct):
    """File content of a manifest: the manifest as it was encoded, and the checksum of those bytes."""

    format: int = 0
    checksum: str = ""
    content: msgspec.Raw = msgspec.Raw()


@dataclass(slots=True)
class Removed:
    """Result of deleting folders. A problem does not end the run; it is logged.

    gone      names of the folders that were deleted
    problems  name of a folder that stays -> reason
    """

    gone: list[str] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)

    def __add__(self, other: Removed) -> Removed:
        return Removed(self.gone + other.gone, self.problems | other.problems)


M = TypeVar("M", bound=FolderManifest)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FolderFormat(Generic[M]):
    """Description of one kind of folder, and the operations on folders of that kind.

    kind       what such a folder is called in messages
    manifest   name of its manifest
    contents   type of the manifest
    number     number of the format; other numbers are refused
    pattern    pattern of the folder names; their alphabetical order is the order of the folders
    error      error that is raised for everything that is wrong
    advice     what to do about a damaged folder, for messages
    durable    False: nothing is synced, and a crash of the machine may damage the newest folders
    failpoint  name of the failpoint right before the manifest is written
    """

    kind: str
    manifest: str
    contents: type[M]
    number: int
    pattern: re.Pattern[str]
    error: type[RealsysError]
    advice: str
    durable: bool = True
    failpoint: str = ""

    # ---- write

    def prepare(self, tmp: Path) -> Path:
        """Make the empty folder ``tmp``; a leftover of the same name is removed first."""
        try:
            if tmp.exists():
                shutil.rmtree(tmp)
            tmp.mkdir(parents=True)
        except OSError as error:
            raise self.error(f"{tmp} cannot be created: {error.strerror}") from error
        return tmp

    def encode(self, manifest: M) -> bytes:
        """Return the file content of ``manifest``."""
        content = msgspec.json.encode(manifest)
        return msgspec.json.encode(_Envelope(self.number, checksum_of(content), msgspec.Raw(content)))

    def commit(
        self, tmp: Path, final: Path, manifest: M, check_alive: CheckAlive = unleased, *, replace: bool = False
    ) -> Path:
        """Turn the filled folder ``tmp`` into the complete folder ``final``, and return ``final``.

        Every writer has synced its files already. ``replace``: in the place of a folder that exists; a
        reader finds the old one, for a moment none, or the new one. Raises the format's error if
        something cannot be written; ``final`` is then not there, or is as it was.
        """
        if final.exists() and not replace:
            raise self.error(f"{final} exists already: a {self.kind} is written once")
        # Ends in .tmp: if this process dies here, the leftover is removed with the unfinished folders.
        replaced = final.with_name(f"{final.name}.replaced{TEMPORARY}")
        try:
            if self.failpoint:
                failpoint(self.failpoint)
            check_alive()
            if self.durable:
                write_durably(tmp / self.manifest, self.encode(manifest))
                # Before the rename: else a crash could leave the new name with some files missing.
                fsync_directory(tmp)
            else:
                (tmp / self.manifest).write_bytes(self.encode(manifest))
            check_alive()  # a second time: the fsync took a while, and readers act on the rename
            if final.exists():  # rename() does not replace a folder that has content
                shutil.rmtree(replaced, ignore_errors=True)
                final.rename(replaced)
            tmp.rename(final)
            if self.durable:
                fsync_directory(final.parent)
        except OSError as error:
            raise self.error(f"{tmp / self.manifest} cannot be written: {error.strerror}") from error
        if replaced.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        return final

    # ---- find

    def complete(self, root: Path) -> list[Path]:
        """Return the complete folders under ``root``, in the order of their names."""
        return [folder for folder in self._folders(root) if self._is_complete(folder)]

    def unfinished(self, root: Path) -> list[Path]:
        """Return the folders that were not committed, were set aside, or are removed in part."""
        return [folder for folder in self._folders(root) if not self._is_complete(folder)]

    def _folders(self, root: Path) -> list[Path]:
        return sorted(path for path in root.iterdir() if self.pattern.match(path.name)) if root.exists() else []

    def _is_complete(self, folder: Path) -> bool:
        named = self.pattern.fullmatch(folder.name) and folder.suffix not in (TEMPORARY, DAMAGED)
        return bool(named) and (folder / self.manifest).exists()

    # ---- read

    def read(self, folder: Path) -> M:
        """Return the manifest. Raises the format's error if it is missing or damaged."""
        path = folder / self.manifest
        if folder.suffix == TEMPORARY or not path.exists():
            problem = f"it has no {self.manifest}, or its name ends in {TEMPORARY}"
            raise self.error(f"{folder} was never completed: {problem}; {self.advice}")
        envelope = self.decode(self.read_bytes(path), _Envelope, path)
        if envelope.format != self.number:
            problem = f"has format {envelope.format}" if envelope.format else "is corrupt or has an older format"
            raise self.error(f"{path} {problem}, this realsys reads format {self.number}: {self.advice}")
        if checksum_of(envelope.content) != envelope.checksum:
            raise self.error(f"{path} is corrupt: its checksum is not that of its content; {self.advice}")
        manifest = self.decode(bytes(envelope.content), self.contents, path)
        for name in manifest.files:
            self.check_name(path, name)
        return manifest

    def verify(self, folder: Path) -> M:
        """Read every byte of every file, and return the manifest.

        Raises the format's error. It names the first file with damage.
        """
        manifest = self.read(folder)
        self.check_sizes(folder, manifest)

        def check(name: str) -> None:
            self._check_sum(folder / name, self._checksum_of_file(folder / name), manifest.files[name])

        with ThreadPoolExecutor(_READERS, thread_name_prefix="verify") as pool:
            for _ in pool.map(check, sorted(manifest.files)):
                pass
        return manifest

    def check_sizes(self, folder: Path, manifest: M) -> None:
        """Check that every file is there with its size. Raises the format's error."""
        for name, info in manifest.files.items():
            self.check_size(folder / name, info)

    def check_size(self, path: Path, info: FileInfo) -> None:
        """Raise the format's error unless ``path`` has the size of ``info``."""
        try:
            size = path.stat().st_size
        except OSError as error:
            raise self._unreadable(path, error) from None
        if size != info.size:
            problem = f"has {size} bytes, its writer says {info.size}: truncated or overwritten"
            raise self.error(f"{path} {problem}; {self.advice}")

    def check_bytes(self, path: Path, data: bytes, info: FileInfo | None) -> None:
        """Raise the format's error unless ``data``, as read from ``path``, is what ``info`` says."""
        if info is None:
            raise self.error(f"{path} is corrupt: {self.manifest} does not list it; {self.advice}")
        self._check_sum(path, checksum_of(data), info)

    def read_bytes(self, path: Path) -> bytes:
        """Return the content of a file. Raises the format's error."""
        try:
            return path.read_bytes()
        except OSError as error:
            raise self._unreadable(path, error) from None

    def decode(self, data: bytes, kind: type[T], path: Path) -> T:
        """Decode JSON that was read from ``path``. Raises the format's error."""
        try:
            return msgspec.json.decode(data, type=kind)
        except MALFORMED as error:
            raise self.error(f"{path} is corrupt: {error}; {self.advice}") from None

    def check_name(self, path: Path, name: str) -> None:
        """Raise the format's error if ``name``, from the file ``path``, leads out of the folder."""
        if Path(name).name != name:
            raise self.error(f"{path} names a file outside its folder: {name!r}; {self.advice}")

    def _checksum_of_file(self, path: Path) -> str:
        digest = xxhash.xxh3_64()
        try:
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
        except OSError as error:
            raise self._unreadable(path, error) from None
        return str(digest.hexdigest())

    def _check_sum(self, path: Path, checksum: str, info: FileInfo) -> None:
        if checksum != info.checksum:
            problem = f"its checksum is {checksum}, its writer says {info.checksum}"
            raise self.error(f"{path} is corrupt: {problem}; {self.advice}")

    def _unreadable(self, path: Path, error: OSError) -> RealsysError:
        return self.error(f"{path} cannot be read: {error.strerror}; {self.advice}")

    # ---- remove

    def remove(self, folders: Iterable[Path]) -> Removed:
        """Delete folders. One that cannot be deleted is a problem of the result."""
        removed = Removed()
        for folder in folders:
            try:
                # The manifest goes first: a reader then finds an incomplete folder, not a damaged one.
                (folder / self.manifest).unlink(missing_ok=True)
                shutil.rmtree(folder)
            except OSError as error:  # for example a network file system, while a reader has a file open
                problem = f"cannot be removed now: {error.strerror}; the next start of training tries again"
                removed.problems[str(folder)] = problem
            else:
                removed.gone.append(str(folder))
        return removed

    def set_aside(self, folder: Path) -> Path:
        """Rename a damaged folder, so that no reader finds it. Returns the new path."""
        aside = folder.with_name(folder.name + DAMAGED)
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        return aside


def checksum_of(data: bytes | bytearray | memoryview | msgspec.Raw) -> str:
    """Return the xxh3-64 of ``data`` in hex."""
    return str(xxhash.xxh3_64_hexdigest(data))
