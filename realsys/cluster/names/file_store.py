"""Name store in a shared directory.

    {root}/keys/realsys/user/.../gserver_manager@value   one file per value: line 1 the lease or empty, then the value
    {root}/leases/{id}                                   JSON; renewed by atomic rename
    {root}/staging/                                      files being written
    {root}/lock                                          flock for all changes of the store

Readers take no lock: a value or a lease appears as a whole, by rename or link. Writers hold the lock for a few system
calls, because two operations read before they write: taking over a lapsed key, and renewing a lease that another
process may be about to declare dead.

Clocks: a lease that was written during this boot of this host is compared with CLOCK_MONOTONIC. All processes of the
host share this clock, steps of the wall clock do not move it, and it stops while the machine is suspended, as the
processes do. A lease of another host is observed: it is dead when its counter has not changed for a full TTL of the
reader's clock. So clocks of two hosts are never compared. The cost is that a new reader on another host needs up to
one TTL to notice a death.

An unreachable directory is an error, not an empty store. Each operation holds the directory open (``HeldDirectory``),
so a directory that goes and returns in the middle of an operation does not look empty.

Across hosts the directory must be on a file system with flock and without cached lookups (NFS: ``lookupcache=none``).
If that is in doubt, use etcd.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import re
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self
from urllib.parse import unquote

import msgspec

from realsys.cluster.names.contract import Lease, NameStore, Tree, Watch, WatchCallback, WatchThread, check_key, escape
from realsys.errors import MALFORMED, Fenced, KeyExists, NameStoreError

POLL_S = 0.05
LOCK_TIMEOUT_S = 5.0
_LEASE_ID = re.compile(rb"[0-9a-f]{32}")  # becomes a file name
VALUE = "@value"  # components escape '@', so no component ends with this
_KEYS, _LEASES, _STAGING, _LOCK = "keys", "leases", "staging", "lock"


@functools.cache
def boot_id() -> str:
    """Return the id of the current boot of this host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True, slots=True)
class _LeaseRecord:
    boot: str
    deadline: float  # CLOCK_MONOTONIC of that boot
    ttl_s: float
    count: int  # number of renewals


class FileNameStore(NameStore):
    """Client of the directory ``root``. Any number of clients in any process may share the directory."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self._observed: dict[str, tuple[int, float]] = {}  # lease of another host -> (counter, first seen)
        self._observed_lock = threading.Lock()
        with self._reported("create"):
            for folder in (_KEYS, _LEASES, _STAGING):
                (root / folder).mkdir(parents=True, exist_ok=True)

    # ---- keys

    def add(self, key: str, value: str, *, lease: Lease | None = None, replace: bool = False) -> None:
        self._check_open()
        path = _path(key)
        lease_id = self._lease_id(lease, key)
        with (
            self._held(f"add {key}") as held,
            _staged(held, f"{lease_id}\n".encode() + value.encode("utf-8", "surrogatepass")) as staged,
            _locked(held),
        ):
            if lease_id and not self._lease_alive(held, lease_id):
                raise Fenced(f"name store: cannot add {key}: its lease lapsed; its owner must stop")
            held.make(os.path.dirname(path))
            if replace or self._lapsed(held, path):
                held.rename(staged, path)
                return
            try:
                # link, not rename: it fails if the key exists, even if the locks of the file system do not work
                held.link(staged, path)
            except FileExistsError:
                raise KeyExists(f"name store: key {key} exists already; another process owns it") from None

    def get(self, key: str) -> str:
        self._check_open()
        with self._held(f"read {key}") as held:
            value = self._read_live(held, _path(key))
        if value is None:
            raise self._missing(key)
        return value

    def get_subtree(self, root: str) -> Tree:
        self._check_open()
        return self._listing(root, _path(root))

    def delete(self, key: str) -> None:
        self._check_open()
        path = _path(key)
        with self._held(f"delete {key}") as held, _locked(held):
            lapsed = self._lapsed(held, path)
            if not held.remove(path) or lapsed:
                raise self._missing(key)

    def clear_subtree(self, root: str) -> None:
        self._check_open()
        path = _path(root)
        with self._held(f"clear {root}") as held, _locked(held):
            held.remove(path)
            held.remove_tree(path.removesuffix(VALUE))

    # ---- leases

    def lease(self, ttl_s: float) -> Lease:
        self._check_open()
        lease_id = uuid.uuid4().hex
        record = _LeaseRecord(boot_id(), time.monotonic() + ttl_s, ttl_s, 0)
        with self._held("grant a lease") as held, _locked(held):
            self._sweep(held)
            _write_lease(held, lease_id, record)
        return Lease(self, lease_id, ttl_s)

    def renew_lease(self, lease: Lease) -> None:
        self._check_open()
        lease_id = lease.lease_id
        with self._held("renew a lease") as held, _locked(held):
            record = self._read_lease(held, lease_id)
            if record is None or not self._record_alive(lease_id, record):
                raise Fenced(f"name store: lease {lease_id[:8]} in {self.root} lapsed; its owner must stop")
            deadline = time.monotonic() + record.ttl_s
            _write_lease(held, lease_id, replace(record, boot=boot_id(), deadline=deadline, count=record.count + 1))

    def revoke_lease(self, lease: Lease) -> None:
        self._check_open()
        with self._held("revoke a lease") as held, _locked(held):
            self._revoke(held, lease.lease_id)

    def end_lease_of(self, key: str) -> None:
        path = _path(key)
        with self._held(f"end the lease of {key}") as held, _locked(held):
            content = held.read(path)
            lease_id = _decode(held, path, content)[0] if content is not None else ""
            if lease_id:
                self._revoke(held, lease_id)

    def _revoke(self, held: HeldDirectory, lease_id: str) -> None:
        """Remove a lease, which hides its keys from all readers. The sweep then deletes their files."""
        held.remove(_lease_path(lease_id))
        self._sweep(held)

    def _sweep(self, held: HeldDirectory) -> None:
        """Remove lapsed leases and the files of their keys. The caller must hold the lock."""
        for lease_id in held.names(_LEASES):
            if not self._lease_alive(held, lease_id):
                held.remove(_lease_path(lease_id))
        for path in held.files(_KEYS):
            if self._lapsed(held, path):
                held.remove(path)

    def _read_lease(self, held: HeldDirectory, lease_id: str) -> _LeaseRecord | None:
        content = held.read(_lease_path(lease_id))
        if content is None:
            with self._observed_lock:
                self._observed.pop(lease_id, None)
            return None
        try:
            return msgspec.json.decode(content, type=_LeaseRecord)
        except MALFORMED:
            path = held.path / _lease_path(lease_id)
            raise NameStoreError(f"name store: {path} is not a lease file; delete it") from None

    def _lease_alive(self, held: HeldDirectory, lease_id: str) -> bool:
        record = self._read_lease(held, lease_id)
        return record is not None and self._record_alive(lease_id, record)

    def _record_alive(self, lease_id: str, record: _LeaseRecord) -> bool:
        now = time.monotonic()
        if record.boot == boot_id():
            return now < record.deadline
        with self._observed_lock:
            count, since = self._observed.get(lease_id, (-1, now))
            if count != record.count:
                self._observed[lease_id] = (record.count, now)
                return True
            return now < since + record.ttl_s

    # ---- values

    def _read_live(self, held: HeldDirectory, path: str) -> str | None:
        """Return the value, or None if the file is missing or its lease has lapsed."""
        content = held.read(path)
        while content is not None:
            lease_id, value = _decode(held, path, content)
            if not lease_id or self._lease_alive(held, lease_id):
                return value
            # A new owner may have written the key since it was read. Only an unchanged record has lapsed.
            read_again = held.read(path)
            if read_again == content:
                return None
            content = read_again
        return None

    def _lapsed(self, held: HeldDirectory, path: str) -> bool:
        """Return True if the value exists but its lease has lapsed. The result stays valid while the lock is held."""
        content = held.read(path)
        if content is None:
            return False
        lease_id, _ = _decode(held, path, content)
        return bool(lease_id) and not self._lease_alive(held, lease_id)

    def _listing(self, root: str, path: str) -> Tree:
        tree: Tree = {}
        with self._held(f"list {root}") as held:
            value = self._read_live(held, path)
            if value is not None:
                tree[root] = value
            self._collect(held, path.removesuffix(VALUE), root, tree)
        return dict(sorted(tree.items()))

    def _collect(self, held: HeldDirectory, directory: str, key: str, tree: Tree) -> None:
        # Plain strings: polling calls this, and making a Path costs more than reading the file.
        for name in held.names(directory):
            if not name.endswith(VALUE):
                self._collect(held, f"{directory}/{name}", f"{key}/{_unescape(name)}", tree)
                continue
            value = self._read_live(held, f"{directory}/{name}")
            if value is not None:
                tree[f"{key}/{_unescape(name.removesuffix(VALUE))}"] = value

    def _start_watch(self, root: str, callback: WatchCallback) -> Watch:
        listing = functools.partial(self._listing, root, _path(root))
        return WatchThread(self, root, callback, listing=listing, pause=_pause)

    @contextlib.contextmanager
    def _held(self, action: str) -> Iterator[HeldDirectory]:
        """Hold the directory for one operation, whose errors name ``action``."""
        with self._reported(action), HeldDirectory(self.root) as held:
            yield held

    @contextlib.contextmanager
    def _reported(self, action: str) -> Iterator[None]:
        """Turn errors of the file system into NameStoreError."""
        try:
            yield
        except OSError as exc:
            raise NameStoreError(
                f"name store: cannot {action} in {self.root}: {exc.strerror or exc}; "
                "check that the directory exists and is writable (cluster.name_store.root)"
            ) from exc


# ---- files


def _path(key: str) -> str:
    """Return the path of a key's value. Without its suffix it is the folder of the keys below."""
    return "/".join((_KEYS, *map(escape, check_key(key).split("/")))) + VALUE


def _lease_path(lease_id: str) -> str:
    return f"{_LEASES}/{lease_id}"


def _write_lease(held: HeldDirectory, lease_id: str, record: _LeaseRecord) -> None:
    with _staged(held, json.dumps(asdict(record)).encode()) as staged:
        held.rename(staged, _lease_path(lease_id))


@contextlib.contextmanager
def _staged(held: HeldDirectory, content: bytes) -> Iterator[str]:
    """Write ``content`` to a file with a private name, which the caller renames or links into place."""
    path = f"{_STAGING}/{uuid.uuid4().hex}"
    try:
        held.write(path, content)
        yield path
    finally:
        held.remove(path)


@contextlib.contextmanager
def _locked(held: HeldDirectory) -> Iterator[None]:
    """Hold the lock, which excludes threads and processes. The kernel releases it when its holder dies."""
    # A new open file description each time: otherwise flock would not exclude threads of one process.
    descriptor = held.open(_LOCK, os.O_RDWR | os.O_CREAT)
    try:
        _acquire(descriptor, held.path / _LOCK)
        yield
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, path: Path) -> None:
    """Lock the open file ``path``. flock has no timeout, so this polls. Raises NameStoreError after LOCK_TIMEOUT_S."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    delay_s = 0.0005
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise NameStoreError(
                    f"name store: {path} was held for {LOCK_TIMEOUT_S:g} s by {_holder(descriptor)}; "
                    "is it stopped (SIGSTOP), or busy in a library that lets no other thread run? kill it"
                ) from None
        time.sleep(delay_s)
        delay_s = min(delay_s * 2, 0.01)


def _holder(descriptor: int) -> str:
    """Return who holds the lock of a file, as far as this host knows."""
    inode = str(os.fstat(descriptor).st_ino)
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()  # number, FLOCK, ADVISORY, WRITE, pid, device:device:inode, ...
        if len(words) > 5 and words[1] == "FLOCK" and words[5].rpartition(":")[2] == inode:
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{words[4]}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                return f"process {words[4]} ({command.strip()[:200]})"
    return "a process of another host"


def _pause(closed: threading.Event) -> None:
    closed.wait(POLL_S)


def _decode(held: HeldDirectory, path: str, content: bytes) -> tuple[str, str]:
    lease_id, newline, value = content.partition(b"\n")
    try:
        if not newline or (lease_id and not _LEASE_ID.fullmatch(lease_id)):
            raise ValueError
        return lease_id.decode("ascii"), value.decode("utf-8", "surrogatepass")
    except ValueError:
        raise NameStoreError(f"name store: {held.path / path} was not written by realsys; delete it") from None


def _unescape(name: str) -> str:
    return unquote(name, encoding="utf-8", errors="surrogatepass")


# ---- held directory
#
# All paths are relative to one descriptor, and a file counts as missing only if the top folder of its path is in that
# directory. So a directory that is renamed or mounted again in the middle of an operation never makes a file look
# missing: the operation ends in the directory in which it began, or fails with OSError.


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
