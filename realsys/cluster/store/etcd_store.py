"""Name store in etcd, through the channel and the stubs of the ``etcd3`` client.

The client's own methods cannot wait for a connection that is being restored, and its watcher neither ends nor survives
a restart of the server. So this module calls the stubs directly. Every call has a deadline, waits for the channel until
then, and is repeated only if repeating it cannot change its meaning. A watch lists and watches again whenever its
stream breaks.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from typing import Any

import grpc

from realsys.cluster.store.base import (
    Lease,
    NameStore,
    Tree,
    Watch,
    WatchCallback,
    belongs,
    check_key,
    join_watch,
)
from realsys.cluster.store.etcd3_compat import import_etcd3
from realsys.errors import Fenced, KeyExists, NameStoreError

log = logging.getLogger(__name__)

RETRY_S = 0.1
CHANNEL_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),  # also limits one attempt to connect
    ("grpc.max_reconnect_backoff_ms", 1000),  # the default is two minutes, longer than any lease
    ("grpc.keepalive_time_ms", 10_000),  # detects a host that disappeared; etcd refuses pings below 5 s
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.enable_http_proxy", 0),  # etcd is inside the cluster, so ignore proxies of the environment
    ("grpc.use_local_subchannel_pool", 1),  # each client of a process fails and reconnects independently
]


class EtcdNameStore(NameStore):
    """Client of one etcd member at ``address`` (host:port).

    etcd grants leases of whole seconds, at least two, so a lease may be longer than requested.

    call_timeout_s   limit of one try, and of renewing a lease
    retry_timeout_s  limit of a repeatable call while a member that answered before is unreachable; at least
                     ``call_timeout_s``
    """

    def __init__(self, address: str, call_timeout_s: float = 5.0, retry_timeout_s: float = 0.0) -> None:
        super().__init__()
        self.address = address
        self._timeout_s = call_timeout_s
        self._retry_timeout_s = max(retry_timeout_s, call_timeout_s)
        self._reached = False  # an etcd that never answered means a wrong address, which is reported early
        self._rpc = import_etcd3().etcdrpc
        host, _, port = address.rpartition(":")
        self._client = import_etcd3().client(
            host=host, port=int(port), timeout=call_timeout_s, grpc_options=CHANNEL_OPTIONS
        )
        self._kv = self._client.kvstub
        self._lease_stub = self._client.leasestub
        self._watch_stub = self._rpc.WatchStub(self._client.channel)
        self._closing = threading.Event()

    # ---- keys

    def add(self, key: str, value: str, *, lease: Lease | None = None, replace: bool = False) -> None:
        check_key(key)
        lease_id = self._lease_id(lease, key)
        put = self._rpc.PutRequest(key=_bytes(key), value=_bytes(value), lease=int(lease_id, 16) if lease_id else 0)
        if replace:
            self._call(self._kv.Put, put, f"add {key}", repeatable=True)
            return
        compare = self._rpc.Compare
        absent = compare(result=compare.EQUAL, target=compare.CREATE, key=_bytes(key), create_revision=0)
        request = self._rpc.TxnRequest(compare=[absent], success=[self._rpc.RequestOp(request_put=put)])
        # Not repeatable: if the first try succeeded and its reply was lost, the second would find our own key.
        if not self._call(self._kv.Txn, request, f"add {key}", repeatable=False).succeeded:
            raise KeyExists(f"name store: key {key} exists already; another process owns it")

    def get(self, key: str) -> str:
        check_key(key)
        request = self._rpc.RangeRequest(key=_bytes(key))
        response = self._call(self._kv.Range, request, f"read {key}", repeatable=True)
        if not response.kvs:
            raise self._missing(key)
        return _text(response.kvs[0].value)

    def get_subtree(self, root: str) -> Tree:
        check_key(root)
        return self.listing(root)[0]

    def listing(self, root: str) -> tuple[Tree, int]:
        """Return the subtree of ``root`` and the revision at which it was read."""
        # One range contains the root, all keys below it, and a few unrelated keys ('a-b' sorts before 'a/').
        request = self._rpc.RangeRequest(key=_bytes(root), range_end=_end_of_subtree(root))
        response = self._call(self._kv.Range, request, f"list {root}", repeatable=True)
        entries = ((_text(kv.key), _text(kv.value)) for kv in response.kvs)
        tree = {key: value for key, value in entries if belongs(key, root)}
        return tree, int(response.header.revision)

    def delete(self, key: str) -> None:
        check_key(key)
        request = self._rpc.DeleteRangeRequest(key=_bytes(key))
        if not self._call(self._kv.DeleteRange, request, f"delete {key}", repeatable=False).deleted:
            raise self._missing(key)

    def clear_subtree(self, root: str) -> None:
        check_key(root)
        own = self._rpc.DeleteRangeRequest(key=_bytes(root))
        below = self._rpc.DeleteRangeRequest(key=_bytes(f"{root}/"), range_end=_end_of_subtree(root))
        operations = [self._rpc.RequestOp(request_delete_range=request) for request in (own, below)]
        self._call(self._kv.Txn, self._rpc.TxnRequest(success=operations), f"clear {root}", repeatable=True)

    # ---- leases

    def lease(self, ttl_s: float) -> Lease:
        request = self._rpc.LeaseGrantRequest(TTL=max(1, math.ceil(ttl_s)))
        # Repeatable: a lease whose reply was lost is never renewed, so it lapses.
        granted = self._call(self._lease_stub.LeaseGrant, request, "grant a lease", repeatable=True)
        return Lease(self, f"{granted.ID:x}", float(granted.TTL))

    def renew_lease(self, lease: Lease) -> None:
        request = self._rpc.LeaseKeepAliveRequest(ID=int(lease.lease_id, 16))

        def keep_alive(_: object, **options: Any) -> int:
            return max((r.TTL for r in self._lease_stub.LeaseKeepAlive(iter([request]), **options)), default=0)

        if self._call(keep_alive, request, "renew a lease", repeatable=True, limit_s=self._timeout_s) <= 0:
            raise Fenced(f"name store: lease {lease.lease_id} in etcd at {self.address} lapsed; its owner must stop")

    def revoke_lease(self, lease: Lease) -> None:
        request = self._rpc.LeaseRevokeRequest(ID=int(lease.lease_id, 16))
        try:
            self._call(self._lease_stub.LeaseRevoke, request, "revoke a lease", repeatable=True)
        except Fenced:
            log.debug("lease %s had lapsed before it was revoked", lease.lease_id)

    # ---- watches, connection

    def _start_watch(self, root: str, callback: WatchCallback) -> Watch:
        return EtcdWatch(self, root, callback)

    def watch_stream(self, root: str, revision: int, requests: queue.SimpleQueue[Any]) -> Any:
        """Open a watch that starts at ``revision``. It ends when ``requests`` receives None or it is cancelled."""
        create = self._rpc.WatchCreateRequest(
            key=_bytes(root), range_end=_end_of_subtree(root), start_revision=revision
        )
        requests.put(self._rpc.WatchRequest(create_request=create))
        return self._watch_stub.Watch(iter(requests.get, None), wait_for_ready=True)

    def close(self) -> None:
        self._closing.set()
        super().close()
        self._client.close()

    def _call(self, method: Any, request: Any, action: str, *, repeatable: bool, limit_s: float | None = None) -> Any:
        """Call ``method``; repeat it while etcd is unreachable, if that cannot change its meaning.

        ``limit_s``: time for all tries; None: by the settings of the store. Raises NameStoreError and Fenced.
        """
        self._check_open()
        if limit_s is None:
            limit_s = self._retry_timeout_s if repeatable and self._reached else self._timeout_s
        deadline = time.monotonic() + limit_s
        while True:
            left_s = deadline - time.monotonic()
            try:
                reply = method(request, timeout=max(0.001, min(left_s, self._timeout_s)), wait_for_ready=True)
                self._reached = True
                return reply
            except grpc.RpcError as exc:
                unreachable = exc.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
                if not (repeatable and unreachable and time.monotonic() + RETRY_S < deadline):
                    raise self._translated(exc, action, limit_s) from exc
            except ValueError as exc:  # grpc raises this if another thread has closed the channel
                raise NameStoreError(f"name store: cannot {action}: used after close()") from exc
            self._closing.wait(RETRY_S)

    def _translated(self, exc: Any, action: str, limit_s: float) -> Exception:
        code, details = exc.code(), exc.details() or ""
        where = f"etcd at {self.address}"
        if code is grpc.StatusCode.NOT_FOUND and "lease" in details:
            return Fenced(f"name store: cannot {action}: its lease in {where} lapsed; its owner must stop")
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return NameStoreError(
                f"name store: cannot {action}: {where} did not answer within {limit_s:g} s; "
                "check that it runs and that cluster.name_store.address is right"
            )
        return NameStoreError(f"name store: cannot {action}: {where} answered {code.name}: {details}; see etcd's log")


class EtcdWatch(Watch):
    """A watch that lists the subtree once per connection, and applies the events of etcd to its copy."""

    def __init__(self, store: EtcdNameStore, root: str, callback: WatchCallback) -> None:
        self._store = store
        self._root = root
        self._callback = callback
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._stream: Any = None
        self._last, self._revision = store.listing(root)
        callback(self._last)
        self._thread = threading.Thread(target=self._follow, name=f"watch {root}", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        """Follow one stream of events after the other until ``close``; list the subtree before each."""
        listed = True
        while not self._closed.is_set():
            # Listen only after a successful listing. A server that was restarted with other data may have a lower
            # revision than ours, and a watch that starts at a future revision reports nothing.
            if listed:
                self._listen_until_broken()
            listed = self._closed.is_set() or self._relist()

    def _listen_until_broken(self) -> None:
        try:
            self._listen()
        except grpc.RpcError as exc:
            if not self._closed.is_set():
                where = self._store.address
                log.info("watch on %s: etcd at %s: %s; listing again", self._root, where, exc.code())

    def _listen(self) -> None:
        """Apply every event. Returns or raises when the stream ends."""
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        stream = self._store.watch_stream(self._root, self._revision + 1, requests)
        with self._lock:
            self._stream = stream
            if self._closed.is_set():
                stream.cancel()
        try:
            for response in stream:
                if response.canceled:  # etcd has compacted our revision, so list again
                    return
                self._apply(response.events)
        finally:
            requests.put(None)  # ends grpc's thread that reads the requests
            stream.cancel()

    def _apply(self, events: Any) -> None:
        """Apply the events to the copy of the subtree, and call back if it changed."""
        current = dict(self._last)
        for event in events:
            key = _text(event.kv.key)
            if not belongs(key, self._root):
                continue
            if event.type == event.DELETE:
                current.pop(key, None)
            else:
                current[key] = _text(event.kv.value)
        self._call_back(dict(sorted(current.items())) if len(current) > len(self._last) else current)

    def _call_back(self, current: Tree) -> None:
        if current != self._last and not self._closed.is_set():
            self._last = current
            self._callback(current)

    def _relist(self) -> bool:
        """List the subtree and call back if it changed. Returns False if etcd cannot be read."""
        try:
            current, self._revision = self._store.listing(self._root)
        except NameStoreError as exc:
            if not self._closed.is_set():
                log.warning("watch on %s: cannot list: %s", self._root, exc)
                self._closed.wait(RETRY_S)
            return False
        self._call_back(current)
        return True

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            if self._stream is not None:
                self._stream.cancel()
        join_watch(self._thread, self._root)
        self._store.discard(self)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(content: bytes) -> str:
    return content.decode("utf-8", "surrogatepass")


def _end_of_subtree(root: str) -> bytes:
    """Return the first key after all keys below ``root``; '0' follows '/' in ASCII."""
    return _bytes(f"{root}0")
