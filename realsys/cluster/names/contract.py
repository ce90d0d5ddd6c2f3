"""Contract of the name store, with which the processes of a trial find each other.

    NameStore ┬─ file_store     a shared directory; the local default
              └─ etcd_store     production

Keys are '/'-separated and built only by ``Names``. A key may have a value and keys below it. A value is any str.
A key that was added with a lease disappears for all readers when the lease lapses or is revoked. All methods are
synchronous and thread-safe, and every call has a time limit. Backends translate the exceptions of their client
libraries into NameStoreError. ``connect.py`` makes the store that the configuration names.
"""

from __future__ import annotations

import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self
from urllib.parse import quote

from realsys.errors import KeyMissing, NameStoreError, WaitTimeout

log = logging.getLogger(__name__)

Tree = dict[str, str]
WatchCallback = Callable[[Tree], None]

# The file backend turns a component into a file name, and file names have at most 255 bytes. All backends have the
# same limit, so a key that works on one backend works on all.
MAX_COMPONENT = 200
CLOSE_TIMEOUT_S = 5.0


def escape(component: str) -> str:
    """Escape a component of a key to an ASCII file name without '/' and NUL, never '.' or '..'.

    ``urllib.parse.unquote`` reverses it.
    """
    escaped = quote(component, safe="", encoding="utf-8", errors="surrogatepass")
    return escaped.replace(".", "%2E") if escaped.strip(".") == "" else escaped


def check_key(key: str) -> str:
    """Return ``key`` unchanged. Raises NameStoreError if a component is empty or too long."""
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
    """Return True if ``key`` is ``root`` or lies below it."""
    return key == root or key.startswith(f"{root}/")


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease: keys added with it exist as long as it is kept alive. ``ttl_s`` is the time that the store granted."""

    store: NameStore
    lease_id: str
    ttl_s: float

    def keep_alive(self) -> None:
        """Extend the lease to ``ttl_s`` from now.

        Raises Fenced if it has lapsed, which is final. Raises NameStoreError if the store did not say.
        """
        self.store.renew_lease(self)

    def revoke(self) -> None:
        """End the lease and remove its keys. Does nothing if it has lapsed."""
        self.store.revoke_lease(self)


class Watch(ABC):
    """A running watch. ``close`` ends its thread."""

    @abstractmethod
    def close(self) -> None:
        """Stop the watch: no callback starts after this returns. The callback itself may call it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class NameStore(ABC):
    """Base of all backends. It implements ``wait`` and the bookkeeping of watches."""

    def __init__(self) -> None:
        self._waiting_lock = threading.Lock()
        self._waiting: set[queue.SimpleQueue[str | None]] = set()
        self._interrupted = False
        self._watches: set[Watch] = set()
        self._closed = False

    @abstractmethod
    def add(self, key: str, value: str, *, lease: Lease | None = None, replace: bool = False) -> None:
        """Create ``key``.

        Raises KeyExists if the key exists and ``replace`` is False, and Fenced if ``lease`` has lapsed.
        """

    @abstractmethod
    def get(self, key: str) -> str:
        """Return the value of ``key``. Raises KeyMissing."""

    @abstractmethod
    def get_subtree(self, root: str) -> Tree:
        """Return key -> value of ``root`` and of all keys below it, sorted by key; {} if none exists."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove one key, but not the keys below it. Raises KeyMissing."""

    @abstractmethod
    def clear_subtree(self, root: str) -> None:
        """Remove ``root`` and all keys below it. Does nothing if none exists."""

    @abstractmethod
    def lease(self, ttl_s: float) -> Lease:
        """Grant a lease. A backend may grant more than ``ttl_s``: see ``Lease.ttl_s``."""

    @abstractmethod
    def end_lease_of(self, key: str) -> None:
        """Revoke the lease with which ``key`` was added: all keys of its owner go, and its next renewal is refused.

        Does nothing if there is no such key, or if it has no lease.
        """

    @abstractmethod
    def renew_lease(self, lease: Lease) -> None:
        """Implement ``Lease.keep_alive``."""

    @abstractmethod
    def revoke_lease(self, lease: Lease) -> None:
        """Implement ``Lease.revoke``."""

    @abstractmethod
    def _start_watch(self, root: str, callback: WatchCallback) -> Watch: ...

    def watch(self, root: str, callback: WatchCallback) -> Watch:
        """Call ``callback`` with the subtree of ``root``: once before this returns, then after every change.

        The watch's thread makes the later calls, one at a time. Changes in quick succession may arrive as one, but
        the last state always arrives, even if the server was unreachable for a time. An exception in ``callback``
        ends that thread through ``threading.excepthook``. In a worker this ends the process, so a watch never fails
        silently.
        """
        check_key(root)
        self._check_open()
        watch = self._start_watch(root, callback)
        self._watches.add(watch)
        return watch

    def wait(self, key: str, timeout_s: float, what: str) -> str:
        """Wait for ``key`` and return its value. Raises WaitTimeout, which names ``what``, after ``timeout_s``."""
        arrived: queue.SimpleQueue[str | None] = queue.SimpleQueue()

        def put_value(tree: Tree) -> None:
            if key in tree:
                arrived.put(tree[key])

        with self._waiting_lock:
            self._waiting.add(arrived)
            if self._interrupted:
                arrived.put(None)
        try:
            with self.watch(key, put_value):
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
        """End every current and later ``wait`` with WaitTimeout, because the process stops."""
        with self._waiting_lock:
            self._interrupted = True
            for waiting in self._waiting:
                waiting.put(None)

    def close(self) -> None:
        """Stop the watches and close the connections. Keys and leases remain until they are revoked. Idempotent."""
        self._closed = True
        for watch in list(self._watches):
            watch.close()

    def discard(self, watch: Watch) -> None:
        """Remove a closed watch from the bookkeeping."""
        self._watches.discard(watch)

    def _check_open(self) -> None:
        if self._closed:
            raise NameStoreError("name store: used after close()")

    def _lease_id(self, lease: Lease | None, key: str) -> str:
        """Return the id of ``lease``, or "" without one. Raises TypeError if another backend granted it."""
        if lease is None:
            return ""
        if type(lease.store) is not type(self):
            raise TypeError(f"key {key}: the lease belongs to another backend ({type(lease.store).__name__})")
        return lease.lease_id

    def _missing(self, key: str) -> KeyMissing:
        return KeyMissing(f"name store: key {key} not found")


class WatchThread(Watch):
    """A watch that lists the subtree, waits for a possible change, and lists it again.

    ``listing()`` returns the subtree. ``pause(closed)`` returns when a key may have changed, or soon after ``closed``
    was set and ``wake`` was called.
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
        self._store = store
        self._root = root
        self._callback = callback
        self._listing = listing
        self._pause = pause
        self._wake = wake
        self._closed = threading.Event()
        self._last = listing()
        callback(self._last)
        self._thread = threading.Thread(target=self._follow, name=f"watch {root}", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        """Wait in ``pause`` for a possible change, then list and call back, until ``close``."""
        while not self._closed.is_set():
            self._pause(self._closed)
            if self._closed.is_set():
                return
            try:
                current = self._listing()
            except NameStoreError as exc:
                # The next pause tries again. If the store stays unreachable, the process ends because its lease lapses.
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
        self._store.discard(self)


def join_watch(thread: threading.Thread, root: str) -> None:
    """Wait for the thread of a closed watch, unless the caller runs in it."""
    if threading.current_thread() is thread:
        return
    thread.join(CLOSE_TIMEOUT_S)
    if thread.is_alive():
        raise NameStoreError(
            f"name store: the watch on {root} did not end within {CLOSE_TIMEOUT_S:g} s; its callback blocks"
        )


# ---- all keys of the name store: ``realsys/{user}/{experiment}/{trial}/...``
#
# No other module builds keys.


ROOT = "realsys"


@dataclass(frozen=True, slots=True)
class Names:
    """The keys of one trial."""

    user: str
    experiment: str
    trial: str

    @property
    def root(self) -> str:
        return f"{ROOT}/{self.user}/{self.experiment}/{self.trial}"

    @property
    def folder(self) -> str:
        """Key of the trial's folder, in a name store that outlives trials. Value: JSON TrialFolder."""
        return f"{self.root}/folder"

    def heartbeat(self, worker: str) -> str:
        """Key of a worker's heartbeat, leased. Value: JSON {kind, index, host, pid, incarnation, state}."""
        return f"{self.root}/heartbeat/{worker}"

    @property
    def heartbeats(self) -> str:
        return f"{self.root}/heartbeat"

    @property
    def trainer(self) -> str:
        """Root of the keys of a start of the trainer, which hold its incarnation. All are leased."""
        return f"{self.root}/trainer"

    @property
    def request_reply(self) -> str:
        """Key of the tcp address of the MasterWorker's request-reply socket. Value: JSON TrainerAddress."""
        return f"{self.trainer}/request_reply"

    @property
    def torch_store(self) -> str:
        """Key of host:port of torch's TCPStore for the process groups. Value: JSON TrainerAddress."""
        return f"{self.trainer}/torch_store"

    def pull(self, dp: int) -> str:
        """Key of the tcp address of the push-pull socket of DP head ``dp``."""
        return f"{self.root}/pull/{dp}"

    def generation_server(self, index: int) -> str:
        """Key of a server, leased. Value: JSON ServerAddress."""
        return f"{self.root}/generation_server/{index}"

    @property
    def generation_servers(self) -> str:
        return f"{self.root}/generation_server"

    def reward_service(self, index: int) -> str:
        """Key of a reward service, leased. Value: JSON ServerAddress."""
        return f"{self.reward_services}/{index}"

    @property
    def reward_services(self) -> str:
        return f"{self.root}/reward_service"

    @property
    def gserver_manager(self) -> str:
        """Key of the HTTP address of the manager."""
        return f"{self.root}/gserver_manager"

    def model_version(self, role: str = "actor") -> str:
        """Key of the newest complete weights. Value: JSON PublishedVersion."""
        return f"{self.root}/model_version/{role}"

    @property
    def status(self) -> str:
        """Key of the run's phase, which the MasterWorker sets. Value: JSON."""
        return f"{self.root}/status"
