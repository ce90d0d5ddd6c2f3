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

An unreachable directory is an error, not an empty store: a file counts as missing only if its directory exists.

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
from urllib.parse import unquote

import msgspec

from realsys.cluster.store.base import (
    Lease,
    NameStore,
    Tree,
    Watch,
    WatchCallback,
    WatchThread,
    check_key,
    escape,
)
from realsys.errors import MALFORMED, Fenced, KeyExists, NameStoreError

POLL_S = 0.05
LOCK_TIMEOUT_S = 5.0
_LEASE_ID = re.compile(rb"[0-9a-f]{32}")  # becomes a file name
VALUE = "@value"  # components escape '@', so no component ends with this


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
        self._keys = root / "keys"
        self._leases = root / "leases"
        self._staging = root / "staging"
        self._observed: dict[str, tuple[int, float]] = {}  # lease of another host -> (counter, first seen)
        self._observed_lock = threading.Lock()
        with self._reported("create"):
            for directory in (self._keys, self._leases, self._staging):
                directory.mkdir(parents=True, exist_ok=True)

    # ---- keys

    def add(self, key: str, value: str, *, lease: Lease | None = None, replace: bool = False) -> None:
        self._check_open()
        path = self._path(key)
        lease_id = self._lease_id(lease, key)
        with self._reported(f"add {key}"), self._staged(_encode(lease_id, value)) as staged, self._locked():
            if lease_id and not self._lease_alive(lease_id):
                raise Fenced(f"name store: cannot add {key}: its lease lapsed; its owner must stop")
            path.parent.mkdir(parents=True, exist_ok=True)
            if replace or self._lapsed(path):
                os.replace(staged, path)
                return
            try:
                # link, not rename: it fails if the key exists, even if the locks of the file system do not work
                os.link(staged, path)
            except FileExistsError:
                raise KeyExists(f"name store: key {key} exists already; another process owns it") from None

    def get(self, key: str) -> str:
        self._check_open()
        with self._reported(f"read {key}"):
            value = self._read_live(self._path(key))
            if value is None:
                os.stat(self._keys)
        if value is None:
            raise self._missing(key)
        return value

    def get_subtree(self, root: str) -> Tree:
        self._check_open()
        check_key(root)
        return self._listing(root, self._path(root), self._directory(root))

    def delete(self, key: str) -> None:
        self._check_open()
        path = self._path(key)
        with self._reported(f"delete {key}"), self._locked():
            lapsed = self._lapsed(path)
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError):
                raise self._missing(key) from None
        if lapsed:
            raise self._missing(key)

    def clear_subtree(self, root: str) -> None:
        self._check_open()
        own = self._path(root)
        with self._reported(f"clear {root}"), self._locked():
            own.unlink(missing_ok=True)
            for directory, _, files in os.walk(self._directory(root), topdown=False):
                for name in files:
                    os.unlink(os.path.join(directory, name))
                os.rmdir(directory)

    # ---- leases

    def lease(self, ttl_s: float) -> Lease:
        self._check_open()
        lease_id = uuid.uuid4().hex
        record = _LeaseRecord(boot_id(), time.monotonic() + ttl_s, ttl_s, 0)
        with self._reported("grant a lease"), self._locked():
            self._sweep()
            self._write_lease(lease_id, record)
        return Lease(self, lease_id, ttl_s)

    def renew_lease(self, lease: Lease) -> None:
        self._check_open()
        lease_id = lease.lease_id
        with self._reported("renew a lease"), self._locked():
            record = self._read_lease(lease_id)
            if record is None or not self._record_alive(lease_id, record):
                raise Fenced(f"name store: lease {lease_id[:8]} in {self.root} lapsed; its owner must stop")
            self._write_lease(
                lease_id,
                replace(record, boot=boot_id(), deadline=time.monotonic() + record.ttl_s, count=record.count + 1),
            )

    def revoke_lease(self, lease: Lease) -> None:
        self._check_open()
        with self._reported("revoke a lease"), self._locked():
            # Removing the lease hides its keys from all readers. The sweep then deletes the files.
            (self._leases / lease.lease_id).unlink(missing_ok=True)
            self._sweep()

    def end_lease_of(self, key: str) -> None:
        with self._reported(f"read {key}"):
            content = _read(self._path(key))
        lease_id = _decode(content, self._path(key))[0] if content is not None else ""
        if lease_id:
            self.revoke_lease(Lease(self, lease_id, 0.0))

    def _sweep(self) -> None:
        """Remove lapsed leases and the files of their keys. The caller must hold the lock."""
        for path in list(self._leases.iterdir()):
            if not self._lease_alive(path.name):
                path.unlink(missing_ok=True)
        for directory, _, files in os.walk(self._keys):
            for name in files:
                path = Path(directory, name)
                if self._lapsed(path):
                    path.unlink(missing_ok=True)

    def _read_lease(self, lease_id: str) -> _LeaseRecord | None:
        path = os.path.join(self._leases, lease_id)
        try:
            return msgspec.json.decode(_content(path), type=_LeaseRecord)
        except FileNotFoundError:
            os.stat(self._leases)
            with self._observed_lock:
                self._observed.pop(lease_id, None)
            return None
        except MALFORMED:
            raise NameStoreError(f"name store: {path} is not a lease file; delete it") from None

    def _write_lease(self, lease_id: str, record: _LeaseRecord) -> None:
        with self._staged(json.dumps(asdict(record)).encode()) as staged:
            os.replace(staged, self._leases / lease_id)

    def _lease_alive(self, lease_id: str) -> bool:
        record = self._read_lease(lease_id)
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

    def _read_live(self, path: Path | str) -> str | None:
        """Return the value, or None if the file is missing or its lease has lapsed."""
        content = _read(path)
        while content is not None:
            lease_id, value = _decode(content, path)
            if not lease_id or self._lease_alive(lease_id):
                return value
            # A new owner may have written the key since it was read. Only an unchanged record has lapsed.
            read_again = _read(path)
            if read_again == content:
                return None
            content = read_again
        return None

    def _lapsed(self, path: Path) -> bool:
        """Return True if the value exists but its lease has lapsed. The result stays valid while the lock is held."""
        content = _read(path)
        if content is None:
            return False
        lease_id, _ = _decode(content, path)
        return bool(lease_id) and not self._lease_alive(lease_id)

    def _listing(self, root: str, path: Path, directory: Path) -> Tree:
        tree: Tree = {}
        with self._reported(f"list {root}"):
            value = self._read_live(path)
            if value is not None:
                tree[root] = value
            self._collect(str(directory), root, tree)
            os.stat(self._keys)
        return dict(sorted(tree.items()))

    def _collect(self, directory: str, key: str, tree: Tree) -> None:
        # Plain strings: polling calls this, and making a Path costs more than reading the file.
        try:
            names = os.listdir(directory)
        except (FileNotFoundError, NotADirectoryError):
            return
        for name in names:
            if not name.endswith(VALUE):
                self._collect(os.path.join(directory, name), f"{key}/{_unescape(name)}", tree)
                continue
            value = self._read_live(os.path.join(directory, name))
            if value is not None:
                tree[f"{key}/{_unescape(name.removesuffix(VALUE))}"] = value

    def _start_watch(self, root: str, callback: WatchCallback) -> Watch:
        path, directory = self._path(root), self._directory(root)
        listing = functools.partial(self._listing, root, path, directory)
        return WatchThread(self, root, callback, listing=listing, pause=_pause)

    # ---- files

    def _directory(self, key: str) -> Path:
        return self._keys.joinpath(*map(escape, check_key(key).split("/")))

    def _path(self, key: str) -> Path:
        directory = self._directory(key)
        return directory.with_name(directory.name + VALUE)

    @contextlib.contextmanager
    def _staged(self, content: bytes) -> Iterator[Path]:
        """Write ``content`` to a file with a private name, which the caller renames or links into place."""
        path = self._staging / uuid.uuid4().hex
        try:
            path.write_bytes(content)
            yield path
        finally:
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock, which excludes threads and processes. The kernel releases it when its holder dies."""
        # A new open file description each time: otherwise flock would not exclude threads of one process.
        descriptor = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            _acquire(descriptor, self.root / "lock")
            yield
        finally:
            os.close(descriptor)

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
                    f"name store: {path} was held for {LOCK_TIMEOUT_S:g} s by another process; "
                    "is one of the trial's processes stopped (SIGSTOP)? kill it"
                ) from None
        time.sleep(delay_s)
        delay_s = min(delay_s * 2, 0.01)


def _pause(closed: threading.Event) -> None:
    closed.wait(POLL_S)


def _content(path: Path | str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _read(path: Path | str) -> bytes | None:
    try:
        return _content(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _encode(lease_id: str, value: str) -> bytes:
    return f"{lease_id}\n".encode() + value.encode("utf-8", "surrogatepass")


def _decode(content: bytes, path: Path | str) -> tuple[str, str]:
    lease_id, newline, value = content.partition(b"\n")
    try:
        if not newline or (lease_id and not _LEASE_ID.fullmatch(lease_id)):
            raise ValueError
        return lease_id.decode("ascii"), value.decode("utf-8", "surrogatepass")
    except ValueError:
        raise NameStoreError(f"name store: {path} was not written by realsys; delete it") from None


def _unescape(name: str) -> str:
    return unquote(name, encoding="utf-8", errors="surrogatepass")
