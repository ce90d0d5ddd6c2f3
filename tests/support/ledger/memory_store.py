"""Name store in a dictionary, for tests inside one process. It keeps the contract of the others."""

from __future__ import annotations

import threading
import time
import uuid
from dataclasses import dataclass

from realsys.cluster.names.contract import Lease, NameStore, Tree, Watch, WatchCallback, WatchThread, belongs, check_key
from realsys.errors import Fenced, KeyExists


@dataclass(frozen=True, slots=True)
class _Entry:
    value: str
    lease_id: str  # empty without a lease


class MemoryNameStore(NameStore):
    """Name store of one process. ``_changed`` guards all attributes and is notified at each mutation.

    No thread waits for leases to lapse: the next reader of a key removes it if its lease has lapsed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self._entries: dict[str, _Entry] = {}
        self._deadlines: dict[str, float] = {}  # lease -> monotonic seconds; a lapsed lease may be missing
        self._revision = 0

    def _touched(self) -> None:
        """Count a mutation and wake the watches. The caller must hold ``_changed``."""
        self._revision += 1
        self._changed.notify_all()

    def add(self, key: str, value: str, *, lease: Lease | None = None, replace: bool = False) -> None:
        check_key(key)
        self._check_open()
        lease_id = self._lease_id(lease, key)
        with self._changed:
            if not self._alive(lease_id):
                raise Fenced(f"name store: cannot add {key}: its lease lapsed; its owner must stop")
            if not replace and self._live(key) is not None:
                raise KeyExists(f"name store: key {key} exists already; another process owns it")
            self._entries[key] = _Entry(value, lease_id)
            self._touched()

    def get(self, key: str) -> str:
        check_key(key)
        self._check_open()
        with self._changed:
            entry = self._live(key)
            if entry is None:
                raise self._missing(key)
            return entry.value

    def get_subtree(self, root: str) -> Tree:
        check_key(root)
        self._check_open()
        return self._listing(root)

    def delete(self, key: str) -> None:
        check_key(key)
        self._check_open()
        with self._changed:
            if self._live(key) is None:
                raise self._missing(key)
            del self._entries[key]
            self._touched()

    def clear_subtree(self, root: str) -> None:
        check_key(root)
        self._check_open()
        with self._changed:
            for key in [k for k in self._entries if belongs(k, root)]:
                del self._entries[key]
            self._touched()

    def lease(self, ttl_s: float) -> Lease:
        self._check_open()
        lease = Lease(self, uuid.uuid4().hex, ttl_s)
        with self._changed:
            self._deadlines[lease.lease_id] = time.monotonic() + ttl_s
        return lease

    def renew_lease(self, lease: Lease) -> None:
        self._check_open()
        with self._changed:
            if not self._alive(lease.lease_id):
                raise Fenced(f"name store: a lease of {lease.ttl_s:g} s lapsed; its owner must stop")
            self._deadlines[lease.lease_id] = time.monotonic() + lease.ttl_s

    def revoke_lease(self, lease: Lease) -> None:
        self._check_open()
        with self._changed:
            self._deadlines.pop(lease.lease_id, None)
            self._touched()

    def end_lease_of(self, key: str) -> None:
        with self._changed:
            entry = self._live(check_key(key))
        if entry is not None and entry.lease_id:
            self.revoke_lease(Lease(self, entry.lease_id, 0.0))

    def _alive(self, lease_id: str) -> bool:
        """Return True if the lease has not lapsed, or if ``lease_id`` is empty."""
        return not lease_id or time.monotonic() < self._deadlines.get(lease_id, 0.0)

    def _live(self, key: str) -> _Entry | None:
        entry = self._entries.get(key)
        if entry is not None and not self._alive(entry.lease_id):
            del self._entries[key]
            return None
        return entry

    def _listing(self, root: str) -> Tree:
        with self._changed:
            entries = ((key, self._live(key)) for key in sorted(self._entries) if belongs(key, root))
            return {key: entry.value for key, entry in entries if entry is not None}

    def _start_watch(self, root: str, callback: WatchCallback) -> Watch:
        seen = -1

        def pause(closed: threading.Event) -> None:
            nonlocal seen
            with self._changed:
                self._changed.wait_for(lambda: self._revision != seen or closed.is_set(), self._until_next_lapse())
                seen = self._revision

        def wake() -> None:
            with self._changed:
                self._changed.notify_all()

        return WatchThread(self, root, callback, listing=lambda: self._listing(root), pause=pause, wake=wake)

    def _until_next_lapse(self) -> float | None:
        leases = {entry.lease_id for entry in self._entries.values() if entry.lease_id}
        deadlines = [self._deadlines[lease_id] for lease_id in leases if self._alive(lease_id)]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
