"""The name store in a dictionary, for tests inside one process."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from realsys.cluster.name_store import Lease, NameStore, Tree, Watch, WatchCallback, WatchThread, belongs, check_key
from realsys.errors import Fenced, KeyExists


@dataclass(slots=True)
class _Entry:
    value: str
    lease: MemoryLease | None


class MemoryLease(Lease):
    def __init__(self, store: MemoryNameStore, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self._store = store
        self.deadline = time.monotonic() + ttl_s

    @property
    def alive(self) -> bool:
        return time.monotonic() < self.deadline

    def keep_alive(self) -> None:
        with self._store.changed:
            if not self.alive:
                raise Fenced(f"name store: a lease of {self.ttl_s:g} s lapsed; its owner must stop")
            self.deadline = time.monotonic() + self.ttl_s

    def revoke(self) -> None:
        with self._store.changed:
            self.deadline = 0.0
            self._store.touched()


class MemoryNameStore(NameStore):
    """``changed`` guards everything and is notified at each mutation; lapses are found by whoever looks next."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = threading.Condition()
        self._entries: dict[str, _Entry] = {}
        self._revision = 0

    def touched(self) -> None:
        """To be called with ``changed`` held."""
        self._revision += 1
        self.changed.notify_all()

    def add(self, key: str, value: str, *, lease: Lease | None = None, replace: bool = False) -> None:
        check_key(key)
        self._check_open()
        if lease is not None and not isinstance(lease, MemoryLease):
            raise TypeError(f"key {key}: the lease is of another backend ({type(lease).__name__})")
        with self.changed:
            if lease is not None and not lease.alive:
                raise Fenced(f"name store: cannot add {key}: its lease lapsed; its owner must stop")
            if not replace and self._live(key) is not None:
                raise KeyExists(f"name store: key {key} is there already; another process owns it")
            self._entries[key] = _Entry(value, lease)
            self.touched()

    def get(self, key: str) -> str:
        check_key(key)
        self._check_open()
        with self.changed:
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
        with self.changed:
            if self._live(key) is None:
                raise self._missing(key)
            del self._entries[key]
            self.touched()

    def clear_subtree(self, root: str) -> None:
        check_key(root)
        self._check_open()
        with self.changed:
            for key in [k for k in self._entries if belongs(k, root)]:
                del self._entries[key]
            self.touched()

    def lease(self, ttl_s: float) -> Lease:
        self._check_open()
        return MemoryLease(self, ttl_s)

    def _live(self, key: str) -> _Entry | None:
        entry = self._entries.get(key)
        if entry is not None and entry.lease is not None and not entry.lease.alive:
            del self._entries[key]
            return None
        return entry

    def _listing(self, root: str) -> Tree:
        with self.changed:
            found = ((key, self._live(key)) for key in sorted(self._entries) if belongs(key, root))
            return {key: entry.value for key, entry in found if entry is not None}

    def _start_watch(self, root: str, callback: WatchCallback) -> Watch:
        seen = -1

        def pause(closed: threading.Event) -> None:
            nonlocal seen
            with self.changed:
                self.changed.wait_for(lambda: self._revision != seen or closed.is_set(), self._until_next_lapse())
                seen = self._revision

        def wake() -> None:
            with self.changed:
                self.changed.notify_all()

        return WatchThread(self, root, callback, listing=lambda: self._listing(root), pause=pause, wake=wake)

    def _until_next_lapse(self) -> float | None:
        deadlines = [e.lease.deadline for e in self._entries.values() if e.lease is not None and e.lease.alive]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
