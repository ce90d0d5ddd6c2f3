"""The name store: how the processes of a trial find each other, and nothing else.

    NameStore ── memory_store   one process, for tests
              ├─ file_store     a shared directory; the local default
              └─ etcd_store     production

Keys are '/'-separated, built only in ``names.py``; a key may have a value and keys below it. Values are any str. A
key added with a lease is gone, for everyone, once that lease lapses or is revoked. Everything here is synchronous and
thread-safe, every call is bounded in time, and no exception of a vendor's client leaves a backend.
"""

from __future__ import annotations

import logging
import queue
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self
from urllib.parse import quote

from realsys.errors import KeyMissing, NameStoreError, WaitTimeout

if TYPE_CHECKING:
    from realsys.cluster.store.names import Names
    from realsys.config.paths import TrialPaths
    from realsys.config.schema import Config

log = logging.getLogger(__name__)

Tree = dict[str, str]
WatchCallback = Callable[[Tree], None]

# A component becomes a file name in the file backend, where 255 bytes are the limit; the same bound holds for every
# backend, so that a key that works on one works on all.
MAX_COMPONENT = 200
CLOSE_TIMEOUT_S = 5.0


def escape(component: str) -> str:
    """One component of a key as a safe ASCII file name: no '/', no NUL, never '.' or '..'; ``unquote`` reverses it."""
    escaped = quote(component, safe="", encoding="utf-8", errors="surrogatepass")
    return escaped.replace(".", "%2E") if escaped.strip(".") == "" else escaped


def check_key(key: str) -> str:
    """The key itself if it is one, else NameStoreError saying what is wrong with it."""
    parts = key.split("/")
    if not all(parts):
        raise NameStoreError(f"name store: key {key!r} has an empty component; write 'a/b/c'")
    for part in parts:
        if len(escape(part)) > MAX_COMPONENT:
            raise NameStoreError(
                f"name store: component {part[:40]!r}... of a key is longer than {MAX_COMPONENT} bytes when escaped; "
                "shorten it"
            )
    return key


def belongs(key: str, root: str) -> bool:
    """Whether ``key`` is in the subtree of ``root``: the root's own key, and everything below it."""
    return key == root or key.startswith(f"{root}/")


@dataclass(frozen=True, slots=True)
class Lease:
    """Keys added with it live only as long as it is kept alive. ``ttl_s`` is what the store granted."""

    store: NameStore
    lease_id: str
    ttl_s: float

    def keep_alive(self) -> None:
        """Another ``ttl_s`` from now. Fenced if it has lapsed: it never comes back. NameStoreError if unknown."""
        self.store.renew_lease(self)

    def revoke(self) -> None:
        """End it now, with its keys. Nothing happens if it has lapsed already."""
        self.store.revoke_lease(self)


class Watch(ABC):
    """A running watch; its thread ends with ``close``."""

    @abstractmethod
    def close(self) -> None:
        """No callback starts after this returns. May be called from the callback itself."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class NameStore(ABC):
    """See the module. ``wait`` and the bookkeeping of watches are the same for all backends and live here."""

    def __init__(self) -> None:
        self._waiting_lock = threading.Lock()
        self._waiting: set[queue.SimpleQueue[str | None]] = set()
        self._interrupted = False
        self._watches: set[Watch] = set()
        self._closed = False

    @abstractmethod
    def add(self, key: str, value: str, *, lease: Lease | None = None, replace: bool = False) -> None:
        """Create ``key``; KeyExists if it is there and ``replace`` is not set. Fenced if ``lease`` has lapsed."""

    def add_subentry(self, root: str, value: str, *, lease: Lease | None = None) -> str:
        """Add ``value`` under a fresh unique key below ``root`` and return that key."""
        key = f"{root}/{uuid.uuid4().hex}"
        self.add(key, value, lease=lease)
        return key

    @abstractmethod
    def get(self, key: str) -> str:
        """The value; KeyMissing if the key is not there."""

    @abstractmethod
    def get_subtree(self, root: str) -> Tree:
        """Key -> value of ``root`` itself and everything below it, sorted by key; empty if there is nothing."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove one key, not what is below it; KeyMissing if it is not there."""

    @abstractmethod
    def clear_subtree(self, root: str) -> None:
        """Remove ``root`` and everything below it; nothing happens if there is nothing."""

    @abstractmethod
    def lease(self, ttl_s: float) -> Lease:
        """A new lease. A backend may grant more than was asked for: see ``Lease.ttl_s``."""

    @abstractmethod
    def renew_lease(self, lease: Lease) -> None:
        """See ``Lease.keep_alive``."""

    @abstractmethod
    def revoke_lease(self, lease: Lease) -> None:
        """See ``Lease.revoke``."""

    @abstractmethod
    def _start_watch(self, root: str, callback: WatchCallback) -> Watch: ...

    def watch(self, root: str, callback: WatchCallback) -> Watch:
        """Call back with the whole subtree of ``root``: once before this returns, then after every change.

        Later calls come from the watch's own thread, one at a time. Changes in quick succession may arrive as one,
        but the last state always arrives, also after the server was away. An exception in ``callback`` ends that
        thread through ``threading.excepthook``, which in a worker ends the process: a watch never goes silent
        unnoticed.
        """
        check_key(root)
        self._check_open()
        watch = self._start_watch(root, callback)
        self._watches.add(watch)
        return watch

    def wait(self, key: str, timeout_s: float, what: str) -> str:
        """The value of ``key`` as soon as it is there. WaitTimeout naming ``what`` after ``timeout_s``."""
        arrived: queue.SimpleQueue[str | None] = queue.SimpleQueue()

        def look(tree: Tree) -> None:
            if key in tree:
                arrived.put(tree[key])

        with self._waiting_lock:
            self._waiting.add(arrived)
            if self._interrupted:
                arrived.put(None)
        try:
            with self.watch(key, look):
                value = arrived.get(timeout=timeout_s)
        except queue.Empty:
            raise WaitTimeout(
                f"waited {timeout_s:g} s for {what}: name store key {key} did not appear; see the log of its owner"
            ) from None
        finally:
            with self._waiting_lock:
                self._waiting.discard(arrived)
        if value is None:
            raise WaitTimeout(f"stopped while waiting for {what} (name store key {key})")
        return value

    def interrupt(self) -> None:
        """Make every present and later ``wait`` end with WaitTimeout: the process is asked to stop."""
        with self._waiting_lock:
            self._interrupted = True
            for waiting in self._waiting:
                waiting.put(None)

    def close(self) -> None:
        """Stop the watches and let go of connections. Keys and leases stay; to remove them, revoke. Idempotent."""
        self._closed = True
        for watch in list(self._watches):
            watch.close()

    def forget(self, watch: Watch) -> None:
        """A watch that has closed."""
        self._watches.discard(watch)

    def _check_open(self) -> None:
        if self._closed:
            raise NameStoreError("name store: used after close()")

    def _lease_id(self, lease: Lease | None, key: str) -> str:
        """Empty without a lease."""
        if lease is None:
            return ""
        if type(lease.store) is not type(self):
            raise TypeError(f"key {key}: the lease is of another backend ({type(lease.store).__name__})")
        return lease.lease_id

    def _missing(self, key: str) -> KeyMissing:
        return KeyMissing(f"name store: key {key} is not there")


class WatchThread(Watch):
    """A watch that lists, waits for a sign of change, and lists again. Backends supply ``listing`` and ``pause``.

    ``pause(closed)`` returns when something may have changed, or soon after ``closed`` is set and ``wake`` was called.
    """

    def __init__(
        self,
        store: NameStore,
        root: str,
        callback: WatchCallback,
        *,
        listing: Callable[[], Tree],
        pause: Callable[[threading.Event], None],
        wake: Callable[[], None] | None = None,
    ) -> None:
        self._store, self._root, self._callback = store, root, callback
        self._listing, self._pause, self._wake = listing, pause, wake
        self._closed = threading.Event()
        self._last = listing()
        callback(self._last)
        self._thread = threading.Thread(target=self._follow, name=f"watch {root}", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        """Consumes signs of change; waits in ``pause``; ended by ``close``; produces callbacks."""
        while not self._closed.is_set():
            self._pause(self._closed)
            if self._closed.is_set():
                return
            try:
                current = self._listing()
            except NameStoreError as exc:
                # The next pause tries again. A store that stays away ends the process through its own lease.
                log.warning("watch on %s: cannot list: %s", self._root, exc)
                continue
            if current != self._last:
                self._last = current
                self._callback(current)

    def close(self) -> None:
        self._closed.set()
        if self._wake is not None:
            self._wake()
        join_watch(self._thread, self._root)
        self._store.forget(self)


def join_watch(thread: threading.Thread, root: str) -> None:
    """Wait for the thread of a closed watch, unless it is the caller's own."""
    if threading.current_thread() is thread:
        return
    thread.join(CLOSE_TIMEOUT_S)
    if thread.is_alive():
        raise NameStoreError(
            f"name store: the watch on {root} did not end within {CLOSE_TIMEOUT_S:g} s; its callback blocks"
        )


def make_name_store(config: Config, paths: TrialPaths) -> NameStore:
    """The backend that ``config.cluster.name_store`` asks for. etcd's client is imported only for etcd."""
    settings = config.cluster.name_store
    if settings.backend == "file":
        from pathlib import Path

        from realsys.cluster.store.file_store import FileNameStore

        return FileNameStore(Path(settings.root).resolve() if settings.root else paths.name_store)
    from realsys.cluster.store.etcd_store import EtcdNameStore

    # A call that hangs must end well before the lease it may be renewing; others may wait for as long as that lasts.
    lease_s = config.cluster.lease_s
    return EtcdNameStore(settings.address, call_timeout_s=min(5.0, lease_s / 3), retry_timeout_s=lease_s)


def trial_names(config: Config) -> Names:
    """The keys of this trial, for the user that runs it (by uid: the environment differs between launchers)."""
    import os
    import pwd

    from realsys.cluster.store.names import Names

    uid = os.getuid()
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:  # containers run under a uid without a passwd entry
        user = f"uid{uid}"
    return Names(user, config.experiment, config.trial)
