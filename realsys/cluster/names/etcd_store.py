"""Calls to the members of one etcd cluster: choice of the member, time limits, TLS and user.

    call ──> present member ── reply ──────────────────────────────────────────────> caller
                  ^    └── unreachable, silent, without a leader ──> next member ──┐
                  └───────────────────── until the time is over ──────────────────┘

Any member answers for the whole cluster, so a client stays with one until that one fails. Then it moves, and its
watches move with it: a member that hangs, or is cut off from the others, does not break their streams itself.
"""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import importlib.util
import itertools
import logging
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc

from realsys.cluster.names.contract import (
    ROOT,
    Lease,
    NameStore,
    Tree,
    Watch,
    WatchCallback,
    belongs,
    check_key,
    join_watch,
)
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
#: UNKNOWN is the code of a member whose wait for a leader has timed out: "context deadline exceeded". CANCELLED is that
#: of a renewal without an answer.
_SILENT = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
_UNREACHABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN, *_SILENT)
_REFUSED = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """TLS and user of a client. ``ca``, ``cert`` and ``key`` are PEM files; without ``ca`` there is no TLS."""

    ca: str = ""
    cert: str = ""
    key: str = ""
    user: str = ""
    password: str = field(default="", repr=False)

    @classmethod
    def by_one_file(cls, certificate: Path) -> EtcdAccess:
        """Return the access to an etcd that has the same certificate as its clients, in one file with its key."""
        return cls(str(certificate), str(certificate), str(certificate))

    def channel(self, address: str) -> grpc.Channel:
        """Return a channel to one member. Raises NameStoreError if a file cannot be read."""
        if not self.ca:
            return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        try:
            ca, key, cert = (Path(path).read_bytes() if path else None for path in (self.ca, self.key, self.cert))
        except OSError as exc:
            raise NameStoreError(f"name store: cannot read {exc.filename}: {exc.strerror}") from exc
        return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert), options=CHANNEL_OPTIONS)


class Renewals:
    """Renewals of leases at one member, over one stream: a stream for each of them costs etcd three times as much."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub
        self._lock = threading.Lock()
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stream: Any = None

    def renew(self, request: Any, timeout: float, metadata: tuple[tuple[str, str], ...]) -> int:
        """Renew one lease. Returns its time to live in seconds, 0 or less if it has lapsed. Raises grpc.RpcError."""
        with self._lock:
            if self._stream is None:
                self._requests = queue.SimpleQueue()
                self._stream = self._stub.LeaseKeepAlive(iter(self._requests.get, None), metadata=metadata)
            # A stream has no time limit for one answer.
            silence = threading.Timer(timeout, self._stream.cancel)
            silence.start()
            try:
                self._requests.put(request)
                for reply in self._stream:
                    return int(reply.TTL)
                raise NameStoreError("name store: etcd ended its renewals of leases")
            except BaseException:
                self._end()  # the next renewal opens another stream
                raise
            finally:
                silence.cancel()

    def close(self) -> None:
        """End the stream."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._stream is not None:
            self._requests.put(None)  # ends grpc's thread that reads the requests
            self._stream.cancel()
            self._stream = None


class Member:
    """Channel and stubs of one member."""

    def __init__(self, address: str, access: EtcdAccess) -> None:
        rpc = import_etcd3().etcdrpc
        self.address = address
        self.channel = access.channel(address)
        self.kv = rpc.KVStub(self.channel)
        self.lease = rpc.LeaseStub(self.channel)
        self.renewals = Renewals(self.lease)
        self.watch = rpc.WatchStub(self.channel)
        self.auth = rpc.AuthStub(self.channel)


class EtcdMembers:
    """All members at ``address``: host:port, separated by commas. ``moved`` is called after a change of the member.

    call_timeout_s   limit of one try at all members, and of a call before any member has answered, unless ``known``
    retry_timeout_s  limit of a call while no member is reachable; at least ``call_timeout_s``
    """

    def __init__(
        self,
        address: str,
        access: EtcdAccess,
        moved: Callable[[], None],
        call_timeout_s: float,
        retry_timeout_s: float,
        *,
        known: bool = False,
    ) -> None:
        """``known``: another process has reached etcd at this address."""
        self.address = address
        self._access = access
        self._moved = moved
        self._timeout_s = call_timeout_s
        self._retry_timeout_s = max(retry_timeout_s, call_timeout_s)
        self._rpc = import_etcd3().etcdrpc
        self._members = [Member(each, access) for each in address.split(",")]
        self._at = os.getpid() % len(self._members)  # processes spread over the members
        self._try_s = call_timeout_s / len(self._members)
        self._reached = known  # an etcd that never answered means a wrong address, which is reported early
        self._token = ""
        self._lock = threading.Lock()
        self._closing = threading.Event()

    @property
    def present(self) -> Member:
        """Member of the next call."""
        return self._members[self._at]

    def call(self, method: Callable[..., Any], action: str, *, repeatable: bool = True, limit_s: float = 0.0) -> Any:
        """Return ``method(member, timeout=..., metadata=...)`` of the first member that answers.

        ``limit_s``: time for all tries; 0: by the settings. Raises NameStoreError and Fenced.
        """
        limit_s = limit_s or (self._retry_timeout_s if repeatable and self._reached else self._timeout_s)
        deadline = time.monotonic() + limit_s
        for tries in itertools.count():
            member = self.present
            left_s = max(0.001, min(deadline - time.monotonic(), self._try_s))
            try:
                reply = method(member, timeout=left_s, metadata=self.metadata(member, left_s))
                self._reached = True
                return reply
            except grpc.RpcError as exc:
                over = not repeatable or self._closing.is_set() or time.monotonic() + RETRY_S >= deadline
                if not self._may_try_again(exc, member) or over:
                    raise self._translated(exc, action, limit_s) from exc
            except ValueError as exc:  # grpc raises this if another thread has closed the channel
                raise NameStoreError(f"name store: cannot {action}: used after close()") from exc
            if tries == 0:
                log.info("cannot %s: etcd at %s does not answer; trying for %g s", action, member.address, limit_s)
            self._closing.wait(RETRY_S)
        raise AssertionError("count() ended")

    def metadata(self, member: Member, timeout_s: float) -> tuple[tuple[str, str], ...]:
        """Return what names the user in a call. Raises grpc.RpcError if the member does not accept the user."""
        if not self._access.user:
            return ()
        token = self._token
        if not token:  # without the lock: threads that ask at the same time get a valid token each
            request = self._rpc.AuthenticateRequest(name=self._access.user, password=self._access.password)
            token = self._token = member.auth.Authenticate(request, timeout=timeout_s).token
        return (("token", token),)

    def interrupt(self) -> None:
        """Let every call end with its present try."""
        self._closing.set()

    def close(self) -> None:
        self.interrupt()
        for member in self._members:
            member.renewals.close()
            member.channel.close()

    def _may_try_again(self, exc: Any, member: Member) -> bool:
        """Return True if another try may succeed: at the next member, or with a new token."""
        if exc.code() in _UNREACHABLE:
            self._leave(member)
            return True
        # A token ends when it is not used for minutes, when its member restarts, or when users are changed.
        ended = exc.code() is grpc.StatusCode.UNAUTHENTICATED or "revision of auth store" in (exc.details() or "")
        if ended and self._token:
            self._token = ""
            return True
        return False

    def _leave(self, member: Member) -> None:
        """Ask the next member from now on, unless another thread has already moved."""
        with self._lock:
            if member is not self.present or len(self._members) == 1:
                return
            self._at = (self._at + 1) % len(self._members)
        self._moved()

    def _translated(self, exc: Any, action: str, limit_s: float) -> Exception:
        code, details = exc.code(), exc.details() or ""
        where = f"etcd at {self.address}"
        if code is grpc.StatusCode.NOT_FOUND and "lease" in details:
            return Fenced(f"name store: cannot {action}: its lease in {where} lapsed; its owner must stop")
        if code in _UNREACHABLE:
            cause = "" if code in _SILENT else f" ({' '.join(details.split())})"
            return NameStoreError(
                f"name store: cannot {action}: {where} did not answer within {limit_s:g} s{cause}; "
                "check that it runs and that cluster.name_store.address is right"
            )
        refused = code in _REFUSED or "auth" in details or "user" in details
        advice = "check cluster.name_store.user and its password" if refused else "see etcd's log"
        return NameStoreError(f"name store: cannot {action}: {where} answered {code.name}: {details}; {advice}")


# ---- makes ``etcd3`` 0.12 importable next to protobuf >= 4, without touching the installed package
#
# The generated ``*_pb2.py`` files of etcd3 build their descriptors by hand, which protobuf refuses since version 4.
# Each file also contains its serialized FileDescriptorProto. This module reads that literal from the source text and
# adds it to a private descriptor pool, because other etcd clients register the same file names in the default pool. It
# publishes the resulting classes as ``etcd3.etcdrpc.{kv,auth,rpc}_pb2`` before ``etcd3`` imports them.


_FILES = ("kv", "auth", "rpc")  # import order: each needs the ones before it
_lock = threading.Lock()


def import_etcd3() -> Any:
    """Return the ``etcd3`` module. Raises NameStoreError if it is not installed or has an unknown layout."""
    with _lock:
        if "etcd3" not in sys.modules:
            _load(_find_package().parent)
        return sys.modules["etcd3"]


def _load(package: Path) -> None:
    before = set(sys.modules)
    try:
        _publish_messages(package)
        importlib.import_module("etcd3")
    except Exception as exc:
        # A partly loaded etcd3 in sys.modules would make the next attempt fail for a misleading reason.
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "etcd3":
                del sys.modules[name]
        raise NameStoreError(
            f"name store: cannot load etcd3 from {package}: {type(exc).__name__}: {exc}; "
            "install etcd3==0.12.0, or use cluster.name_store.backend=file"
        ) from exc


def _find_package() -> Path:
    spec = importlib.util.find_spec("etcd3")  # finds a top-level package without importing it
    if spec is None or spec.origin is None:
        raise NameStoreError(
            "name store: the Python package etcd3 is not installed; install etcd3==0.12.0, "
            "or use cluster.name_store.backend=file"
        )
    return Path(spec.origin)


def _publish_messages(package: Path) -> None:
    from google.protobuf.descriptor_pool import DescriptorPool

    folder = package / "etcdrpc"
    pool = DescriptorPool()
    rpc = _new_package("etcd3.etcdrpc", folder)
    for name in _FILES:
        module = _message_module(f"etcd3.etcdrpc.{name}_pb2", _serialized(folder / f"{name}_pb2.py"), pool)
        sys.modules[module.__name__] = module
        setattr(rpc, f"{name}_pb2", module)
    _copy_public(vars(rpc.rpc_pb2), rpc)
    # ``rpc_pb2_grpc``, the only generated module that still works, with a stand-in for its parent package
    name = "etcd3.etcdrpc.rpc_pb2_grpc"
    spec = importlib.machinery.PathFinder.find_spec(name, [str(package / "etcdrpc")])
    if spec is None or spec.loader is None:
        raise ValueError(f"{package} has no {name}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    parent = _new_package("etcd3", package)
    parent.etcdrpc = rpc
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules["etcd3"]
    _copy_public(vars(module), rpc)


def _new_package(name: str, folder: Path) -> Any:
    package = ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package
    return package


def _serialized(source: Path) -> bytes:
    """Return the FileDescriptorProto of a generated module. Reads the source text and executes none of it."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.keyword) or node.arg != "serialized_pb":
            continue
        value = node.value.args[0] if isinstance(node.value, ast.Call) else node.value  # _b('...') or b'...'
        literal = ast.literal_eval(value)
        return literal.encode("latin1") if isinstance(literal, str) else bytes(literal)
    raise ValueError(f"{source} has no serialized descriptor")


def _message_module(name: str, serialized: bytes, pool: Any) -> ModuleType:
    from google.protobuf import descriptor_pb2, message_factory
    from google.protobuf.internal import enum_type_wrapper

    pool.AddSerializedFile(serialized)
    descriptor = pool.FindFileByName(descriptor_pb2.FileDescriptorProto.FromString(serialized).name)
    module = ModuleType(name)
    content: dict[str, Any] = {"DESCRIPTOR": descriptor}
    for message, message_type in descriptor.message_types_by_name.items():
        content[message] = message_factory.GetMessageClass(message_type)
    for enum, enum_type in descriptor.enum_types_by_name.items():
        content[enum] = enum_type_wrapper.EnumTypeWrapper(enum_type)
        content.update((value.name, value.number) for value in enum_type.values)
    vars(module).update(content)
    return module


def _copy_public(content: Mapping[str, Any], target: ModuleType) -> None:
    vars(target).update((name, value) for name, value in content.items() if not name.startswith("_"))


# ---- name store in etcd, through the channel and the stubs of the ``etcd3`` client
#
# The client's own methods cannot wait for a connection that is being restored, and its watcher neither ends nor
# survives a restart of the server. So this module calls the stubs directly. Every call has a
# deadline, and is repeated only if repeating it cannot change its meaning. A watch lists and watches again whenever
# its stream breaks.


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
