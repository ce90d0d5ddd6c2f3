"""Reader of the tensors of a weight version: each byte is read once, and verified. No torch, except for adapters.

    held tensor, if any ──> missing pieces ──> read and hash ──> apply ──> hash of the result

Threads take one tensor after the other: one core hashes and copies a few GB/s, and a disk often gives more.
A chunk is hashed right after it is read, while it is in the cache, in its final memory: the verified
bytes are the loaded bytes. A held tensor is identified by its checksum, not by a version number, so a
reader may have skipped versions, and the run may have been resumed from an older one.
"""

from __future__ import annotations

import http.client
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from threading import Thread
from types import TracebackType

import numpy as np
import xxhash

from realsys.errors import WeightsError
from realsys.weights.byte_ranges import RangeClient
from realsys.weights.disk import delta
from realsys.weights.disk.delta import Bytes
from realsys.weights.disk.manifest import (
    ITEM_BYTES,
    StoredPiece,
    TensorInfo,
    VersionManifest,
    load_manifest,
    tensor_bytes,
)

log = logging.getLogger(__name__)

#: bytes read and hashed at a time: large enough to keep the number of calls low, small enough to stay in the cache
_CHUNK = 1 << 20
#: files that a thread has open; a chain of deltas by many ranks has more of them than a process may open
_OPEN_FILES = 64
MOST_THREADS = 8  # threads that read one version: enough for the fastest disks and for memory
_CORES_PER_THREAD = 2
_THREAD_BYTES = 32 << 20  # bytes of a version that make one more thread worth starting


@dataclass(slots=True)
class HeldTensor:
    """The bytes of a tensor and their checksum (xxh3-64, hex)."""

    checksum: str
    data: Bytes


@dataclass(slots=True)
class ReadReport:
    """Seconds and amounts of a read. The seconds of all threads add up.

    ``bytes``: size of all tensors; ``bytes_read``: size of the pieces that were read for them;
    ``bytes_fetched``: size of the tensors that came from elsewhere. A tensor
    counts as ``whole`` (read in full), ``changed`` (by a delta) or ``kept`` (the held one is still right).
    """

    read_s: float = 0.0
    verify_s: float = 0.0
    apply_s: float = 0.0
    bytes: int = 0
    bytes_read: int = 0
    bytes_fetched: int = 0
    whole: int = 0
    changed: int = 0
    kept: int = 0

    def add(self, other: ReadReport) -> None:
        """Add the numbers of another thread."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def timings(self) -> dict[str, float]:
        """Return the seconds by name, for the status page."""
        return {"read_s": self.read_s, "verify_s": self.verify_s, "apply_s": self.apply_s}

    def counts(self) -> dict[str, int]:
        """Return the amounts by name, for the status page."""
        return {
            name: getattr(self, name) for name in ("bytes", "bytes_read", "bytes_fetched", "whole", "changed", "kept")
        }


def all_kept(manifest: VersionManifest) -> ReadReport:
    """Return the report of a version whose tensors the server has."""
    size = sum(tensor_bytes(info) for info in manifest.tensors.values())
    return ReadReport(bytes=size, kept=len(manifest.tensors))


@dataclass(slots=True)
class VersionReader:
    """Reads tensors of the version in ``directory``. A context manager: it keeps files open.

    ``on_chunk`` is called after each chunk, as a sign of life. ``elsewhere`` may fill the memory of a tensor that
    must be read whole, from another place than the files; the bytes are verified all the same. Both are called by
    the threads of ``read_all``. ``shards`` fetches from the ranks what they have in the memory of another host.
    """

    directory: Path
    manifest: VersionManifest
    on_chunk: Callable[[], None] = lambda: None
    elsewhere: Callable[[str, Bytes], bool] = lambda name, into: False
    shards: RangeClient | None = None
    report: ReadReport = field(default_factory=ReadReport)
    _files: dict[Path, int] = field(default_factory=dict)
    _ranks: dict[Path, dict[str, str]] = field(default_factory=dict)  # folder -> file -> URL

    def __enter__(self) -> VersionReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._files:
            os.close(self._files.popitem()[1])
        if self.shards is not None:
            self.shards.close()

    def order(self) -> list[str]:
        """Return all names in the order of their first bytes in the files, so that disks read ahead."""

        def place(name: str) -> tuple[str, str, int]:
            piece = self.manifest.tensors[name].pieces[0]
            return piece.folder, piece.file, piece.start

        return sorted(self.manifest.tensors, key=place)

    def read_all(self, read: Callable[[VersionReader, str], object]) -> None:
        """Call ``read`` with each name, in several threads, each of which has its own reader to read with.

        Raises the first error. The other threads then end after the tensor that they read.
        """
        names = iter(self.order())
        count = reading_threads(sum(map(tensor_bytes, self.manifest.tensors.values())), len(os.sched_getaffinity(0)))
        if count == 1:
            for name in names:
                read(self, name)
            return

        readers = [replace(self, report=ReadReport(), _files={}) for _ in range(count)]
        failures: list[BaseException] = []

        def run(own: VersionReader) -> None:
            try:
                with own:
                    for name in names:  # next() of a list's iterator is atomic: each name comes once
                        read(own, name)
            except BaseException as error:
                failures.append(error)
                list(names)

        # Daemons, so that a server can end while a disk does not answer.
        threads = [Thread(target=run, args=(own,), name="read-weights", daemon=True) for own in readers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        for own in readers:
            self.report.add(own.report)

    def read(self, name: str, held: HeldTensor | None = None, into: Bytes | None = None) -> HeldTensor:
        """Read and verify the tensor ``name``. ``held`` is used up: its memory is changed, or freed.

        ``into``: memory of the tensor's size for it if nothing is held; otherwise it is allocated. Raises
        WeightsError, which names the file and the damage.
        """
        info = self.manifest.tensors[name]
        report = self.report
        size = tensor_bytes(info)
        report.bytes += size
        if held is not None and held.data.size != size:
            held = None
        missing = _missing(info, held)
        if held is not None:
            data = held.data
        else:
            self._check_length(missing[0], name)
            data = np.empty(size, np.uint8) if into is None else into
        if not missing:
            report.kept += 1
        elif len(missing) == 1 and not missing[0].base:
            report.whole += 1
        else:
            report.changed += 1
        for piece in missing:
            if piece.base:
                self._change(data, name, info, piece)
            elif len(missing) > 1 or not self._found_elsewhere(piece, name, data):  # elsewhere is the result
                self._fetch(piece, name, data)
        if missing and missing[-1].base:
            start = time.perf_counter()
            checksum = xxhash.xxh3_64_hexdigest(data.data)
            report.verify_s += time.perf_counter() - start
        else:
            checksum = missing[-1].checksum if missing else info.checksum
        if checksum != info.checksum:
            raise WeightsError(
                f"{self.directory}: tensor {name} has checksum {checksum} after its pieces are applied, "
                f"the manifest says {info.checksum}: corrupt"
            )
        return HeldTensor(checksum, data)

    def factors(self, name: str) -> Bytes:
        """Read and verify the bytes of the adapter of tensor ``name``, A and B. Raises WeightsError."""
        piece = self.manifest.tensors[name].pieces[-1]
        self._check_length(piece, name)
        data = np.empty(piece.size, np.uint8)
        self._fetch(piece, name, data)
        return data

    def _found_elsewhere(self, piece: StoredPiece, name: str, data: Bytes) -> bool:
        start = time.perf_counter()
        if not self.elsewhere(name, data):
            return False
        middle = time.perf_counter()
        checksum = xxhash.xxh3_64_hexdigest(data.data)
        self.report.read_s += middle - start
        self.report.verify_s += time.perf_counter() - middle
        self.on_chunk()
        if checksum != piece.checksum:
            log.warning("tensor %s arrived with checksum %s, not %s: it is read again", name, checksum, piece.checksum)
            return False
        self.report.bytes_fetched += piece.size
        return True

    def _change(self, data: Bytes, name: str, info: TensorInfo, piece: StoredPiece) -> None:
        self._check_length(piece, name)
        blob = np.empty(piece.size, np.uint8)
        self._fetch(piece, name, blob)
        start = time.perf_counter()
        try:
            if piece.rank:
                _merge(data, blob, info, piece)
            else:
                delta.apply(data, blob, ITEM_BYTES[info.dtype])
        except WeightsError as error:
            raise WeightsError(f"{self._path(piece)}: tensor {name}: {error}") from error
        self.report.apply_s += time.perf_counter() - start

    def _check_length(self, piece: StoredPiece, name: str) -> None:
        """Raise WeightsError if the file is too short for ``piece``, before memory is allocated for it."""
        path = self._path(piece)
        if self._rank_of(piece):
            return
        try:
            size = os.fstat(self._open(path)).st_size
        except OSError as error:
            raise self._unreadable(path, piece, error) from error
        if size < piece.start + piece.size:
            raise self._truncated(path, piece, name, size)

    def _unreadable(self, path: Path, piece: StoredPiece, error: OSError) -> WeightsError:
        whose = f"{self.directory.name} needs it" if piece.folder else "it is in the manifest"
        return WeightsError(f"{path} cannot be read, but {whose}: {error.strerror}")

    @staticmethod
    def _truncated(path: Path, piece: StoredPiece, name: str, end: int) -> WeightsError:
        reaches = piece.start + piece.size
        return WeightsError(f"{path} ends at byte {end}, but tensor {name} reaches to {reaches}: truncated")

    def _fetch(self, piece: StoredPiece, name: str, into: Bytes) -> None:
        """Fill ``into`` with the bytes of the piece, and check them."""
        path = self._path(piece)
        view = into.data
        digest = xxhash.xxh3_64()
        read = verified = 0.0
        done = 0
        try:
            if url := self._rank_of(piece):
                done, read = piece.size, self._fetch_from(url, piece, into)
                digest.update(view)
            file = -1 if url else self._open(path)
            while done < piece.size:
                start = time.perf_counter()
                # preadv: a read at a position, into memory that exists. It may return fewer bytes.
                count = os.preadv(file, [view[done : done + _CHUNK]], piece.start + done)
                middle = time.perf_counter()
                digest.update(view[done : done + count])
                verified += time.perf_counter() - middle
                read += middle - start
                if not count:
                    raise self._truncated(path, piece, name, piece.start + done)
                done += count
                self.on_chunk()
        except OSError as error:
            raise self._unreadable(path, piece, error) from error
        self.report.read_s += read
        self.report.verify_s += verified
        if url:
            self.report.bytes_fetched += piece.size
        else:
            self.report.bytes_read += piece.size
        if digest.hexdigest() != piece.checksum:
            raise WeightsError(
                f"{path}: the bytes of tensor {name} have checksum {digest.hexdigest()}, "
                f"the manifest says {piece.checksum}: corrupt"
            )

    def _rank_of(self, piece: StoredPiece) -> str:
        """Return the URL of the rank that has the file of a piece in its memory; "" if this host has the file."""
        path = self._path(piece)
        if self.shards is None or path in self._files or path.exists():
            return ""
        if path.parent not in self._ranks:
            manifest = load_manifest(path.parent) if piece.folder else self.manifest
            self._ranks[path.parent] = manifest.ranks
        return self._ranks[path.parent].get(piece.file, "")

    def _fetch_from(self, url: str, piece: StoredPiece, into: Bytes) -> float:
        """Fill ``into`` from a rank's memory; return the seconds. Raises WeightsError."""
        assert self.shards is not None
        start = time.perf_counter()
        path = self._path(piece)
        wanted = {"role": path.parent.parent.name, "folder": path.parent.name, "file": path.name}
        try:
            self.shards.fetch(url, wanted, piece.start, into, self.on_chunk)
        except (OSError, http.client.HTTPException) as error:
            problem = f"{type(error).__name__}: {error}"
            raise WeightsError(f"{path} is in the memory of the rank at {url}: {problem}") from error
        return time.perf_counter() - start

    def _path(self, piece: StoredPiece) -> Path:
        folder = self.directory.parent / piece.folder if piece.folder else self.directory
        return folder / piece.file

    def _open(self, path: Path) -> int:
        file = self._files.get(path)
        if file is None:
            if len(self._files) == _OPEN_FILES:
                os.close(self._files.pop(next(iter(self._files))))
            file = self._files[path] = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return file


def _missing(info: TensorInfo, held: HeldTensor | None) -> list[StoredPiece]:
    """Return the last pieces, which lead from the held tensor to the new one; all pieces if none is based on it."""
    if held is not None:
        if held.checksum == info.checksum:
            return []
        for at in range(len(info.pieces) - 1, 0, -1):
            if info.pieces[at].base == held.checksum:
                return info.pieces[at:]
    return info.pieces


def _merge(data: Bytes, factors: Bytes, info: TensorInfo, piece: StoredPiece) -> None:
    """Merge an adapter into the tensor ``data``, in place."""
    from realsys.weights import low_rank
    from realsys.weights.disk.dtypes import as_tensor

    weight = as_tensor(data, info.dtype, info.shape)
    a, b = low_rank.split_factors(as_tensor(factors, info.dtype, [-1]), piece.rank, info.shape[1])
    low_rank.merge(weight, a, b, piece.scale, weight)


def reading_threads(size: int, cores: int) -> int:
    """Return how many threads read a version of ``size`` bytes: generation goes on meanwhile and keeps most cores.

    Threads that compete for a core are slower than one, because they also compete for the interpreter.
    """
    return max(1, min(MOST_THREADS, cores // _CORES_PER_THREAD, size // _THREAD_BYTES))


def leads_to(info: TensorInfo, checksum: str) -> bool:
    """Return True if less than all pieces must be read by a server that holds the tensor with ``checksum``."""
    return checksum == info.checksum or any(piece.base == checksum for piece in info.pieces[1:])
