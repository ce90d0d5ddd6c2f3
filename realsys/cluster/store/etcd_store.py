"""The name store in etcd, through the ``etcd3`` client's channel and stubs.

The client's own methods are not used where they fail us: they cannot wait for a connection that is being re-made, and
its watcher neither ends nor survives a restart of the server. Here every call has a deadline, waits for the channel
within it, and is repeated only if repeating it cannot change its meaning. A watch re-lists and re-watches whenever
its stream breaks.
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
    ("grpc.min_reconnect_backoff_ms", 1000),  # also the bound on one attempt to connect
    ("grpc.max_reconnect_backoff_ms", 1000),  # the default of two minutes outlives every lease
    ("grpc.keepalive_time_ms", 10_000),  # finds a server whose host vanished; etcd refuses pings below 5 s
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.enable_http_proxy", 0),  # etcd is inside the cluster, a proxy from the environment is not for it
    ("grpc.use_local_subchannel_pool", 1),  # clients in one process fail and reconnect each for itself
]


class EtcdNameStore(NameStore):
    """``address`` is host:port of one member. etcd's leases have whole seconds, two at least: a grant may be longer.

    ``retry_timeout_s``: how long a repeatable call waits for a member that answered before and is away now; at least
    ``call_timeout_s``, which bounds one try, and the renewal of a lease.
    """

    def __init__(self, address: str, call_timeout_s: float = 5.0, retry_timeout_s: float = 0.0) -> None:
        super().__init__()
        self.address = address
        self._timeout_s, self._retry_timeout_s = call_timeout_s, max(retry_timeout_s, call_timeout_s)
        self._reached = False  # one that never was there is a wrong address: better told soon
        self._rpc = import_etcd3().etcdrpc
        host, _, port = address.rpartition(":")
        self._client = import_etcd3().client(
            host=host, port=int(port), timeout=call_timeout_s, grpc_options=CHANNEL_OPTIONS
        )
        self._kv, self._lease_stub = self._client.kvstub, self._client.leasestub
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
        # Not repeatable: had the first try succeeded unseen, the second would blame another process for our own key.
        if not self._call(self._kv.Txn, request, f"add {key}", repeatable=False).succeeded:
            raise KeyExists(f"name store: key {key} is there already; another process owns it")

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
        """The subtree and the revision at which it was read."""
        # One range holds the root and all below it, and a few strangers in between ('a-b' sorts before 'a/').
        request = self._rpc.RangeRequest(key=_bytes(root), range_end=_end_of_subtree(root))
        response = self._call(self._kv.Range, request, f"list {root}", repeatable=True)
        found = ((_text(kv.key), _text(kv.value)) for kv in response.kvs)
        return {key: value for key, value in found if belongs(key, root)}, int(response.header.revision)

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
        # Repeatable: a grant whose answer was lost lapses by itself.
        granted = self._call(self._lease_stub.LeaseGrant, request, "grant a lease", repeatable=True)
        return Lease(self, f"{granted.ID:x}", float(granted.TTL))

    def renew_lease(self, lease: Lease) -> None:
        request = self._rpc.LeaseKeepAliveRequest(ID=int(lease.lease_id, 16))

        def keep_alive(_: object, **options: Any) -> int:
            return max((r.TTL for r in self._lease_stub.LeaseKeepAlive(iter([request]), **options)), default=0)

        if self._call(keep_alive, request, "renew a lease", repeatable=True, patient=False) <= 0:
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
        """An open watch from ``revision`` on; ends when None is put into ``requests``, or when it is cancelled."""
        create = self._rpc.WatchCreateRequest(
            key=_bytes(root), range_end=_end_of_subtree(root), start_revision=revision
        )
        requests.put(self._rpc.WatchRequest(create_request=create))
        return self._watch_stub.Watch(iter(requests.get, None), wait_for_ready=True)

    def close(self) -> None:
        self._closing.set()
        super().close()
        self._client.close()

    def _call(self, method: Any, request: Any, action: str, *, repeatable: bool, patient: bool = True) -> Any:
        self._check_open()
        began = time.monotonic()
        limit = self._retry_timeout_s if repeatable and patient and self._reached else self._timeout_s
        while True:
            left = began + limit - time.monotonic()
            try:
                answer = method(request, timeout=max(0.001, min(left, self._timeout_s)), wait_for_ready=True)
                self._reached = True
                return answer
            except grpc.RpcError as exc:
                away = exc.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
                if not (repeatable and away and time.monotonic() + RETRY_S < began + limit):
                    raise self._translated(exc, action, limit) from exc
            except ValueError as exc:  # grpc's answer when another thread has closed the channel
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
    """Consumes etcd's events as mere signs of change: each makes it list the subtree again, so none can be misread."""

    def __init__(self, store: EtcdNameStore, root: str, callback: WatchCallback) -> None:
        self._store, self._root, self._callback = store, root, callback
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._stream: Any = None
        self._last, self._revision = store.listing(root)
        callback(self._last)
        self._thread = threading.Thread(target=self._follow, name=f"watch {root}", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        """Waits in the stream; unblocked by an event, a lost connection, or ``close``; produces callbacks."""
        listed = True
        while not self._closed.is_set():
            # Only after a listing: a server that came back with other data may be at a lower revision than the one we
            # know, and a watch from a future revision is silent.
            if listed:
                try:
                    self._listen()
                except grpc.RpcError as exc:
                    if not self._closed.is_set():
                        where = self._store.address
                        log.info("watch on %s: etcd at %s: %s; listing again", self._root, where, exc.code())
            listed = self._closed.is_set() or self._relist()

    def _listen(self) -> None:
        """Re-list at every event; return or raise when the stream is over."""
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        stream = self._store.watch_stream(self._root, self._revision + 1, requests)
        with self._lock:
            self._stream = stream
            if self._closed.is_set():
                stream.cancel()
        try:
            for response in stream:
                # Cancelled: our revision was compacted away. Either way only a new listing helps.
                if response.canceled or (response.events and not self._relist()):
                    return
        finally:
            requests.put(None)  # releases grpc's thread that reads the requests
            stream.cancel()

    def _relist(self) -> bool:
        try:
            current, self._revision = self._store.listing(self._root)
        except NameStoreError as exc:
            if not self._closed.is_set():
                log.warning("watch on %s: cannot list: %s", self._root, exc)
                self._closed.wait(RETRY_S)
            return False
        if current != self._last and not self._closed.is_set():
            self._last = current
            self._callback(current)
        return True

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            if self._stream is not None:
                self._stream.cancel()
        join_watch(self._thread, self._root)
        self._store.forget(self)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(content: bytes) -> str:
    return content.decode("utf-8", "surrogatepass")


def _end_of_subtree(root: str) -> bytes:
    """The first key after everything below ``root``: '0' follows '/'."""
    return _bytes(f"{root}0")
