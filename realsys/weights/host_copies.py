"""Copies of versions on this host, shared by the servers of a trial. No torch.

    stage ──> turn ──> a copy is there? ──yes──────────────────────────────────────────> lease
                          └──no──> remove copies without a lease, reuse the newest ──> read, verify ──> COPY.json

Rules, on which every reader relies:

- ``fenced-weights``: a copy has its COPY.json once every tensor has been verified against the manifest of the version,
  in the memory from which servers load it. It loses COPY.json before a byte of it changes.
- A copy with a lease is neither changed nor removed. The kernel ends the leases of a dead server.
- Servers stage one after the other. If the one whose turn it is shows no sign of life for ``SILENT_S``, the next
  server stages at the same time (``no-wait-for-the-dead``).
- A host keeps the newest copy, from which the next version is made in place: it costs the memory of one model. While
  a server still loads the one before, it costs that of two.
- A host also keeps the weights under adapters, which a version refers to: they cost the memory of another model, and
  only the adapters are read for a version. Without room for them they are read again for each version.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from realsys.cluster.files import FileLock, TensorEntry, safetensors_header
from realsys.cluster.names.file_store import boot_id
from realsys.errors import MALFORMED, WeightsError
from realsys.weights.byte_ranges import RangeClient
from realsys.weights.disk import manifest as manifests
from realsys.weights.disk.delta import Bytes
from realsys.weights.disk.manifest import ITEM_BYTES, TensorInfo, VersionManifest, auxiliary_files, tensor_bytes
from realsys.weights.disk.reader import HeldTensor, ReadReport, VersionReader, leads_to
from realsys.weights.host_places import POLL_S, Membership, choose, folder_name, places, sweep

log = logging.getLogger(__name__)
COPY, WEIGHTS, READERS = "COPY.json", "model.safetensors", "readers"
_FROZEN = "frozen-"  # beginning of the name of a copy of weights under adapters
SILENT_S = 10.0  # time without a sign of life after which a server does not wait for the one that stages


class CopySource(Protocol):
    """Copy on another host."""

    def fetch(self, start: int, into: Bytes, on_chunk: Callable[[], None]) -> bool:
        """Fill ``into`` with the bytes of the copy from ``start`` on. False if that is not possible."""

    def close(self) -> None: ...


#: (folder of a version, version, incarnation) -> source
Peers = Callable[[Path, int, str], CopySource]


class SharedCopies:
    """This server's access to the copies of its trial. ``model_dir``: HF folder with config and tokenizer."""

    def __init__(
        self,
        trial: Path,
        model_dir: Path,
        where: Sequence[Path] = (),
        silent_s: float = SILENT_S,
        token: str | None = None,
    ) -> None:
        self.client = RangeClient(token)  # fetches from other hosts
        self._name = folder_name(trial)
        self._model_dir = model_dir
        self._places = list(where) or places()
        self._silent_s = silent_s
        self._members: dict[Path, Membership] = {}  # place -> membership

    def stage(self, directory: Path, version: int, peers: Peers | None = None, *, older: bool = False) -> LeasedCopy:
        """Return a verified copy of the version in ``directory``; read it if no server of this host has.

        ``peers``: makes the source of its whole tensors on other hosts. Raises WeightsError if the version is
        damaged, older than a copy of this host (unless ``older``), or does not fit.
        """
        home = self._enter(self._places[0])
        turn = self._turn(home)
        try:
            manifest = manifests.load_manifest(directory, version)
            return self._find(manifest, directory, older) or self._make(directory, manifest, turn, peers)
        finally:
            turn.release()

    def find(self, version: int, incarnation: str) -> LeasedCopy | None:
        """Return the copy of a version; None if there is no complete one."""
        # Looked up by name: a lease on another copy, however short, would keep it from being changed in place.
        name = manifests.directory_name(version, incarnation)
        named = [folder for folder in self._folders() if folder.stem == name]
        return next(filter(None, map(LeasedCopy.of, named)), None)

    def close(self) -> None:
        """End the membership; the last server of the host removes the copies."""
        while self._members:
            self._members.popitem()[1].leave()

    def _enter(self, place: Path) -> Path:
        if place not in self._members:
            sweep(self._places)
            self._members[place] = Membership.enter(place / self._name)
        return self._members[place].folder

    def _turn(self, home: Path) -> FileLock:
        """Wait for the turn to stage. A holder without a sign of life for ``silent_s`` is passed."""
        for number in itertools.count():
            path, begin = home / f"staging-{number}", time.monotonic()
            while (lock := FileLock.take(path)) is None:
                if time.monotonic() - begin > self._silent_s < time.time() - path.stat().st_mtime:
                    log.warning("the server that stages has done nothing for %g s: not waiting for it", self._silent_s)
                    break
                time.sleep(POLL_S)
            else:
                return lock
        raise AssertionError("count() ended")

    def _folders(self, names: str = "v*") -> list[Path]:
        return [path for place in self._places for path in sorted((place / self._name).glob(names))]

    def _find(self, manifest: VersionManifest, directory: Path, older: bool) -> LeasedCopy | None:
        """Return a copy of this version. Raises WeightsError if there is a copy of a newer one (``monotonic``)."""
        wanted = (manifest.incarnation, manifest.version)
        for folder in self._folders():
            copy = LeasedCopy.of(folder)
            if copy is None:
                continue
            if copy.info.holds(manifest):
                size = sum(one.size for one in copy.info.tensors.values())
                copy.report = ReadReport(bytes=size, kept=len(copy.info.tensors))
                return copy
            copy.close()
            if copy.info.age > wanted and not older:
                incarnation, version = copy.info.age
                newer = f"version {version} of trainer {incarnation}, which this host has"
                raise WeightsError(f"{directory} is older than {newer}: not staged")
        return None

    def _make(self, directory: Path, manifest: VersionManifest, turn: FileLock, peers: Peers | None) -> LeasedCopy:
        with contextlib.ExitStack() as stack:
            frozen = self._frozen(directory, manifest, turn)
            draft = self._draft(manifest, CopyLayout.of(manifest), stack)
            if frozen is not None:
                stack.callback(frozen.close)
                draft.sources.append(frozen)
            report = self._complete(draft, directory, manifest, turn, peers)
            if frozen is not None:
                report.bytes_read += frozen.report.bytes_read
                report.bytes_fetched += frozen.report.bytes_fetched
        return self._leased(draft.folder, report)

    def _frozen(self, directory: Path, manifest: VersionManifest, turn: FileLock) -> LeasedCopy | None:
        """Return this host's copy of the weights under adapters; None without any, or without room for them.

        It may be from another version, and of another trainer. Raises WeightsError.
        """
        under = {
            name: msgspec.structs.replace(info, checksum=info.pieces[0].checksum, pieces=info.pieces[:1])
            for name, info in manifest.tensors.items()
            if info.pieces[-1].rank
        }
        if not under:
            return None
        wanted = {(name, info.checksum) for name, info in under.items()}
        for folder in self._folders(f"{_FROZEN}*"):
            if (copy := LeasedCopy.of(folder)) is not None:
                if wanted <= {(name, one.checksum) for name, one in copy.info.tensors.items()}:
                    return copy
                copy.close()
            if (lock := _exclusive(folder)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                lock.release()
        frozen = msgspec.structs.replace(manifest, tensors=under)
        name = f"{_FROZEN}{manifests.directory_name(manifest.version, manifest.incarnation)}.{secrets.token_hex(4)}"
        with contextlib.ExitStack() as stack:
            try:
                draft = self._new_draft(manifest.version, name, CopyLayout.of(frozen), stack)
            except WeightsError as error:
                log.warning("the weights under adapters are read again for each version: %s", error)
                return None
            report = self._complete(draft, directory, frozen, turn, None)
        return self._leased(draft.folder, report)

    def _complete(
        self, draft: _Draft, directory: Path, manifest: VersionManifest, turn: FileLock, peers: Peers | None
    ) -> ReadReport:
        """Fill a draft with the tensors of ``manifest``, or remove it. Raises WeightsError."""
        info = CopyInfo(boot_id(), manifest.version, manifest.incarnation, draft.layout.tensors)
        try:
            with VersionReader(directory, manifest, on_chunk=turn.touch, shards=self.client) as reader:
                report = self._fill(draft, reader, peers)
            self._finish(draft.folder, info)
        except BaseException as error:
            shutil.rmtree(draft.folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise WeightsError(f"{draft.folder} cannot be written: {error.strerror}") from error
            raise
        return report

    def _leased(self, folder: Path, report: ReadReport) -> LeasedCopy:
        copy = LeasedCopy.of(folder)
        if copy is None:
            raise WeightsError(f"{folder} was removed as it was staged: trying again may help")
        copy.report = report
        return copy

    def _fill(self, draft: _Draft, reader: VersionReader, peers: Peers | None) -> ReadReport:
        if peers is None:
            draft.fill(reader)
            return reader.report
        tensors, one_at_a_time = draft.layout.tensors, threading.Lock()
        with contextlib.closing(
            peers(reader.directory, reader.manifest.version, reader.manifest.incarnation)
        ) as source:

            def fetch(name: str, into: Bytes) -> bool:
                with one_at_a_time:  # a source sends to one reader at a time
                    return source.fetch(tensors[name].start, into, reader.on_chunk)

            reader.elsewhere = fetch
            draft.fill(reader)
        return reader.report

    def _draft(self, manifest: VersionManifest, layout: CopyLayout, stack: contextlib.ExitStack) -> _Draft:
        """Return the memory to stage into: the newest copy if no server has a lease on it. All others without one go.

        ``stack`` releases the draft's lock.
        """
        draft: _Draft | None = None
        name = f"{manifests.directory_name(manifest.version, manifest.incarnation)}.{secrets.token_hex(4)}"
        for folder in sorted(self._folders(), key=_age, reverse=True):
            lock = _exclusive(folder)
            if lock is None:
                continue
            stack.callback(lock.release)
            info = _info(folder)
            if draft is None and info is not None and layout.fits(info.tensors):
                (folder / COPY).unlink()
                checksums = {key: one.checksum for key, one in info.tensors.items()}
                draft = _Draft(folder.rename(folder.with_name(name)), layout, checksums)
            else:
                shutil.rmtree(folder, ignore_errors=True)
        return draft or self._new_draft(manifest.version, name, layout, stack)

    def _new_draft(self, version: int, name: str, layout: CopyLayout, stack: contextlib.ExitStack) -> _Draft:
        """Allocate a file for the copy. Raises WeightsError if it does not fit."""
        place = choose(self._places, layout.size, version)
        if place != self._places[0]:
            size = f"{layout.size / 1e9:.2f} GB"
            log.warning("%s has no room for %s: version %d is staged in %s", self._places[0], size, version, place)
        folder = self._enter(place) / name
        try:
            folder.mkdir(mode=0o700)
            if lock := FileLock.take(folder / READERS):  # else a server removes it, and writing fails
                stack.callback(lock.release)
            with (folder / WEIGHTS).open("wb") as file:
                file.write(layout.header)
                file.flush()
                # Allocated now: a write to mapped memory for which there is no room kills the process.
                os.posix_fallocate(file.fileno(), 0, layout.size)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise WeightsError(f"{folder} cannot be made ({layout.size} bytes): {error.strerror}") from error
        return _Draft(folder, layout, sources=self._newest(stack))

    def _newest(self, stack: contextlib.ExitStack) -> list[LeasedCopy]:
        """Return the newest complete copy, if there is one. ``stack`` ends its lease."""
        for folder in sorted(self._folders(), key=_age, reverse=True):
            copy = LeasedCopy.of(folder)
            if copy is not None:
                stack.callback(copy.close)
                return [copy]
        return []

    def _finish(self, folder: Path, info: CopyInfo) -> None:
        """Make the folder an HF directory, and complete."""
        sizes: dict[str, int] = {}
        for one in info.tensors.values():
            sizes[one.dtype] = sizes.get(one.dtype, 0) + one.size
        for name, content in auxiliary_files(self._model_dir, max(sizes, key=lambda name: sizes[name])).items():
            (folder / name).write_bytes(content)
        unfinished = folder / f"{COPY}.tmp"
        unfinished.write_bytes(msgspec.json.encode(info))
        unfinished.rename(folder / COPY)


@dataclass(slots=True)
class LeasedCopy:
    """A copy that no server changes or removes until ``close``. ``report``: of the read that made it, or of none."""

    folder: Path
    info: CopyInfo
    lease: FileLock
    report: ReadReport = field(default_factory=ReadReport)

    @classmethod
    def of(cls, folder: Path) -> LeasedCopy | None:
        """Return the copy in ``folder`` with a lease; None if it is not complete, or being changed."""
        with contextlib.suppress(OSError):  # it was removed
            lease = FileLock.take(folder / READERS, shared=True)
            if lease is not None and (info := _info(folder)) is not None:
                return cls(folder, info, lease)
            if lease is not None:
                lease.release()
        return None

    def close(self) -> None:
        """End the lease."""
        self.lease.release()

    def tensors(self) -> dict[str, Bytes]:
        """Return the bytes of all tensors by name, from the shared memory. They are of this version until ``close``."""
        # Copy on write: torch wants writable memory, and a write must not reach the other servers.
        return _views(self.folder, self.info.tensors, mmap.ACCESS_COPY)


@dataclass(slots=True)
class _Draft:
    """A copy that is being made.

    checksums  of the tensors that are in its memory, if it is made from an older copy
    sources    other copies, from which tensors may be taken
    """

    folder: Path
    layout: CopyLayout
    checksums: dict[str, str] = field(default_factory=dict)
    sources: list[LeasedCopy] = field(default_factory=list)

    def fill(self, reader: VersionReader) -> None:
        """Read and verify all tensors. Raises WeightsError."""
        views = _views(self.folder, self.layout.tensors, mmap.ACCESS_WRITE)
        others = [(copy.info.tensors, copy.tensors()) for copy in self.sources]

        def read(own: VersionReader, name: str) -> None:
            own.read(name, self._held(name, own.manifest.tensors[name], views[name], others), views[name])

        reader.read_all(read)

    def _held(self, name: str, info: TensorInfo, view: Bytes, others: Sequence[_Contents]) -> HeldTensor | None:
        """Return what the memory of a tensor holds, if it is of use for the new version."""
        if name in self.checksums and leads_to(info, self.checksums[name]):
            return HeldTensor(self.checksums[name], view)
        for tensors, content in others:
            held = tensors.get(name)
            if held is not None and held.size == view.size and leads_to(info, held.checksum):
                view[:] = content[name]
                return HeldTensor(held.checksum, view)
        return None


#: tensors of a copy, and their bytes
_Contents = tuple[Mapping[str, "CopyTensor"], Mapping[str, Bytes]]


def _views(folder: Path, tensors: Mapping[str, CopyTensor], access: int) -> dict[str, Bytes]:
    """Map the file of a copy. Returns the bytes of the tensors; the map is closed with the last of them."""
    with (folder / WEIGHTS).open("rb+") as file:
        whole = np.frombuffer(mmap.mmap(file.fileno(), 0, access=access), np.uint8)
    return {name: whole[one.start : one.start + one.size] for name, one in tensors.items()}


def _exclusive(folder: Path) -> FileLock | None:
    """Lock a copy to change or remove it; None if a server uses it."""
    with contextlib.suppress(OSError):
        return FileLock.take(folder / READERS)
    return None


def _info(folder: Path) -> CopyInfo | None:
    """Read COPY.json; None if the copy is not complete, or not of this boot of the host."""
    try:
        info = msgspec.json.decode((folder / COPY).read_bytes(), type=CopyInfo)
    except (OSError, *MALFORMED):
        return None
    return info if info.boot == boot_id() else None


def _age(folder: Path) -> tuple[str, str]:
    """Return (incarnation, version) from the name of a copy's folder."""
    version, _, rest = folder.name.partition(".")
    return rest.rpartition(".")[0], version


# ---- format of a copy: one safetensors file


class CopyInfo(msgspec.Struct, frozen=True):
    """Contents of COPY.json. ``boot``: the copy does not outlive this boot of the host, because nothing is synced."""

    boot: str
    version: int
    incarnation: str
    tensors: dict[str, CopyTensor]

    @property
    def age(self) -> tuple[str, int]:
        return self.incarnation, self.version

    def holds(self, manifest: VersionManifest) -> bool:
        """Return True if this is a copy of the version with ``manifest``."""
        checksums = {name: tensor.checksum for name, tensor in self.tensors.items()}
        wanted = {name: info.checksum for name, info in manifest.tensors.items()}
        return self.age == (manifest.incarnation, manifest.version) and checksums == wanted


class CopyTensor(msgspec.Struct, frozen=True):
    """A tensor of a copy. ``start``: byte in the file."""

    dtype: str
    shape: list[int]
    checksum: str
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class CopyLayout:
    """Layout of the file of a copy, in bytes."""

    header: bytes
    tensors: dict[str, CopyTensor]
    size: int

    @classmethod
    def of(cls, manifest: VersionManifest) -> CopyLayout:
        """Return the layout of a copy of the version with ``manifest``."""
        infos = manifest.tensors
        # Widest elements first: every tensor then begins at a multiple of its element size.
        names = sorted(infos, key=lambda name: (-ITEM_BYTES[infos[name].dtype], name))
        entries = [TensorEntry(name, infos[name].dtype, infos[name].shape, tensor_bytes(infos[name])) for name in names]
        header = safetensors_header(entries)
        tensors, end = {}, len(header)
        for entry in entries:
            info = infos[entry.name]
            tensors[entry.name] = CopyTensor(info.dtype, info.shape, info.checksum, end, entry.size)
            end += entry.size
        return cls(header, tensors, end)

    def fits(self, tensors: dict[str, CopyTensor]) -> bool:
        """Return True if a copy with ``tensors`` has this layout, whatever its values are."""
        return _tensor_places(tensors) == _tensor_places(self.tensors)


def _tensor_places(tensors: dict[str, CopyTensor]) -> Iterable[tuple[object, ...]]:
    return {(name, one.dtype, tuple(one.shape), one.start) for name, one in tensors.items()}
