"""Name store in etcd, through the channel and the stubs of the ``etcd3`` client.

The client's own methods cannot wait for a connection that is being restored, and its watcher neither ends nor survives
a restart of the server. So this module calls the stubs directly, through ``etcd_members``. Every call has a deadline,
and is repeated only if repeating it cannot change its meaning. A watch lists and watches again whenever its stream
breaks.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections.abc import Callable
from typing import Any

import grpc

from realsys.cluster.names.contract import Lease, NameStore, Tree, Watch, WatchCallback, belongs, check_key, join_watch
from realsys.cluster.names.etcd_members import RETRY_S, EtcdAccess, EtcdMembers, Member, import_etcd3
from realsys.cluster.names.keys import ROOT
from realsys.errors import Fenced, KeyExists, NameStoreError

log = logging.getLogger(__name__)

_OPEN = EtcdAccess()


class EtcdNameStore(NameStore):
    """Client of an etcd cluster. ``address``: host:port of its members, separated by commas.

    etcd grants leases of whole seconds, at least two, so a lease may be longer than requested.

    call_timeout_s   limit of a try at all members, and of renewing a lease
    retry_timeout_s  limit of a repeatable call while members that answered before are unreachable; at least
                     ``call_timeout_s``
    known            they answered another process before: wait for them from the first call on
    """

    def __init__(
        self,
        address: str,
        call_timeout_s: float = 5.0,
        retry_timeout_s: float = 0.0,
        access: EtcdAccess = _OPEN,
        *,
        known: bool = False,
    ) -> None:
        super().__init__()
        self.address = address
        self._timeout_s = call_timeout_s
        self._rpc = import_etcd3().etcdrpc
        self._members = EtcdMembers(address, access, self._moved, call_timeout_s, retry_timeout_s, known=known)

    # ---- keys

    def add(self, key: str, value: str, *, lease: Lease | None = None, replace: bool = False) -> None:
        check_key(key)
        lease_id = self._lease_id(lease, key)
        put = self._rpc.PutRequest(key=_bytes(key), value=_bytes(value), lease=int(lease_id, 16) if lease_id else 0)
        if replace:
            self._call(_kv("Put", put), f"add {key}")
            return
        compare = self._rpc.Compare
        absent = compare(result=compare.EQUAL, target=compare.CREATE, key=_bytes(key), create_revision=0)
        request = self._rpc.TxnRequest(compare=[absent], success=[self._rpc.RequestOp(request_put=put)])
        # Not repeatable: if the first try succeeded and its reply was lost, the second would find our own key.
        if not self._call_once(_kv("Txn", request), f"add {key}").succeeded:
            raise KeyExists(f"name store: key {key} exists already; another process owns it")

    def get(self, key: str) -> str:
        check_key(key)
        request = self._rpc.RangeRequest(key=_bytes(key))
        response = self._call(_kv("Range", request), f"read {key}")
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
        response = self._call(_kv("Range", request), f"list {root}")
        entries = ((_text(kv.key), _text(kv.value)) for kv in response.kvs)
        tree = {key: value for key, value in entries if belongs(key, root)}
        return tree, int(response.header.revision)

    def delete(self, key: str) -> None:
        check_key(key)
        request = self._rpc.DeleteRangeRequest(key=_bytes(key))
        if not self._call_once(_kv("DeleteRange", request), f"delete {key}").deleted:
            raise self._missing(key)

    def clear_subtree(self, root: str) -> None:
        check_key(root)
        own = self._rpc.DeleteRangeRequest(key=_bytes(root))
        below = self._rpc.DeleteRangeRequest(key=_bytes(f"{root}/"), range_end=_end_of_subtree(root))
        operations = [self._rpc.RequestOp(request_delete_range=request) for request in (own, below)]
        self._call(_kv("Txn", self._rpc.TxnRequest(success=operations)), f"clear {root}")

    # ---- leases

    def lease(self, ttl_s: float) -> Lease:
        request = self._rpc.LeaseGrantRequest(TTL=max(1, math.ceil(ttl_s)))
        # Repeatable: a lease whose reply was lost is never renewed, so it lapses.
        granted = self._call(lambda member, **options: member.lease.LeaseGrant(request, **options), "grant a lease")
        return Lease(self, f"{granted.ID:x}", float(granted.TTL))

    def renew_lease(self, lease: Lease) -> None:
        request = self._rpc.LeaseKeepAliveRequest(ID=int(lease.lease_id, 16))

        def renew(member: Member, **options: Any) -> int:
            return member.renewals.renew(request, **options)

        if self._call(renew, "renew a lease", limit_s=self._timeout_s) <= 0:
            raise Fenced(f"name store: lease {lease.lease_id} in etcd at {self.address} lapsed; its owner must stop")

    def revoke_lease(self, lease: Lease) -> None:
        request = self._rpc.LeaseRevokeRequest(ID=int(lease.lease_id, 16))
        try:
            self._call(lambda member, **options: member.lease.LeaseRevoke(request, **options), "revoke a lease")
        except Fenced:
            log.debug("lease %s had lapsed before it was revoked", lease.lease_id)

    def end_lease_of(self, key: str) -> None:
        check_key(key)
        for found in self._call(_kv("Range", self._rpc.RangeRequest(key=_bytes(key))), f"read {key}").kvs:
            if found.lease:
                self.revoke_lease(Lease(self, f"{found.lease:x}", 0.0))

    # ---- watches, connection

    def _start_watch(self, root: str, callback: WatchCallback) -> Watch:
        return EtcdWatch(self, root, callback)

    def watch_stream(self, root: str, revision: int, requests: queue.SimpleQueue[Any]) -> Any:
        """Open a watch that starts at ``revision``. It ends when ``requests`` receives None or it is cancelled."""
        create = self._rpc.WatchCreateRequest(
            key=_bytes(root), range_end=_end_of_subtree(root), start_revision=revision
        )
        requests.put(self._rpc.WatchRequest(create_request=create))
        member = self._members.present
        # A member without a leader ends the stream, instead of reporting no change.
        metadata = (*self._members.metadata(member, self._timeout_s), ("hasleader", "true"))
        return member.watch.Watch(iter(requests.get, None), metadata=metadata)

    def _moved(self) -> None:
        for watch in list(self._watches):
            if isinstance(watch, EtcdWatch):
                watch.restart()

    def close(self) -> None:
        self._members.interrupt()  # a watch that lists must end soon
        super().close()
        self._members.close()

    def _call(self, method: Callable[..., Any], action: str, *, repeatable: bool = True, limit_s: float = 0.0) -> Any:
        self._check_open()
        return self._members.call(method, action, repeatable=repeatable, limit_s=limit_s)

    def _call_once(self, method: Callable[..., Any], action: str) -> Any:
        """Call ``method`` once, after a read that has found a member that answers."""
        self._call(_kv("Range", self._rpc.RangeRequest(key=_bytes(f"{ROOT}/"), count_only=True)), action)
        return self._call(method, action, repeatable=False)


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
        with self._lock:  # ``restart`` ends this stream if it is called from here on
            stream = self._store.watch_stream(self._root, self._revision + 1, requests)
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

    def restart(self) -> None:
        """End the present stream, so that the watch lists and listens at another member."""
        with self._lock:
            if self._stream is not None:
                self._stream.cancel()

    def close(self) -> None:
        self._closed.set()
        self.restart()
        join_watch(self._thread, self._root)
        self._store.discard(self)


def _kv(name: str, request: Any) -> Callable[..., Any]:
    """Return a call of the key-value service, for ``EtcdMembers.call``."""
    return lambda member, **options: getattr(member.kv, name)(request, **options)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(content: bytes) -> str:
    return content.decode("utf-8", "surrogatepass")


def _end_of_subtree(root: str) -> bytes:
    """Return the first key after all keys below ``root``; '0' follows '/' in ASCII."""
    return _bytes(f"{root}0")
