"""The master's end of the request-reply stream.

    request(worker, handler, payload) ──Request──> WorkerEndpoint
        future <──────────────────────── Reply ───
    on_notice callbacks <─────────────── Notice ──

Runs on the master's event loop; every method must be called there, and only ``barrier`` waits.

Invariants
    send-order        A request is sent when it is made. Requests therefore reach every worker in the
                      order in which they were made, and the collectives inside them match.
    keep-until-reply  A request keeps its frames until its reply, and is resent after a reconnection.
    once              A reply or notice counts only if its number is above the peer's high-water mark.
    one-incarnation   Of each worker only the newest incarnation may speak. One that was retired is
                      refused for ever.
"""

from __future__ import annotations

import asyncio
import logging
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import zmq

from realsys.cluster.lease import CheckAlive, unleased
from realsys.cluster.stream import codec as protocol
from realsys.cluster.stream import sockets
from realsys.cluster.stream.codec import (
    Ack,
    FailureReply,
    Hello,
    Refused,
    ReplyHeader,
    RequestHeader,
    Welcome,
    decode_message,
    decode_with,
    encode_message,
)
from realsys.cluster.stream.security import CurveKeys
from realsys.errors import DecodeError, RemoteError, StreamError, WaitTimeout, WorkerLost

log = logging.getLogger(__name__)

#: workers that may ever say hello; bounded, because the master remembers each of them
MAX_PEERS = 1 << 16
Reply = TypeVar("Reply", bound=msgspec.Struct)


class MasterStream:
    """Typed calls to ModelWorkers. Create it inside the event loop; its ``address`` is bound."""

    kind = "model_worker"  # kind of the peers in messages

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        keys: CurveKeys | None = None,
        request_timeout_s: float = 1800.0,
        check_alive: CheckAlive = unleased,
    ) -> None:
        """``check_alive`` runs before anything is sent; ``request`` raises its error."""
        self._check_alive = check_alive
        self._timeout_s = request_timeout_s
        self._server = sockets.bind_server(host, keys)
        self.address = self._server.address
        self.bad_messages = 0
        self._peers: dict[int, Peer] = {}
        self._index_of: dict[bytes, int] = {}  # route -> worker; only the current route of each peer
        self._retired: dict[int, str] = {}  # worker -> its newest incarnation that may not return
        self._acks = Acknowledgements(self._send_all)
        self._barriers = Barriers(self._peers.keys())
        self._notices = Notices(self._fail, self.unreadable)
        self._failure: BaseException | None = None
        self._closed = False
        self._reader = sockets.LoopReader(self._server.socket, self._on_frames, self._fail)
        self._rejections = sockets.LoopReader(self._server.monitor, self._server.reject, self._fail)

    @property
    def rejected(self) -> int:
        """Number of peers that were not let in: a wrong key, or none."""
        return self._server.rejected

    @property
    def connected(self) -> list[int]:
        """Indices of the workers that have said hello and are not lost."""
        return sorted(self._peers)

    async def barrier(self, workers: Collection[int], timeout_s: float) -> None:
        """Wait until all ``workers`` have connected; WaitTimeout names those that have not."""
        try:
            await self._barriers.wait(workers, timeout_s)
        except TimeoutError:
            missing = ", ".join(self._name(worker) for worker in sorted(set(workers) - self._peers.keys()))
            problem = f"did not connect in {timeout_s:g} s ({len(self._peers)} connected): read their logs"
            raise WaitTimeout(f"master at {self.address}: {missing} {problem}") from None

    def request(
        self,
        worker: int,
        handler: str,
        payload: msgspec.Struct,
        reply_type: type[Reply],
        *,
        timeout_s: float | None = None,
    ) -> asyncio.Future[Reply]:
        """Send a call and return the future of its reply.

        The future fails with RemoteError (the handler raised), WorkerLost (not connected, or replaced
        by a new incarnation), WaitTimeout, DecodeError (the reply is not a ``reply_type``), or
        StreamError (closed).
        """
        payloads = {worker: encode_message(payload)}
        return self._call(payloads, handler, reply_type, timeout_s, operator.itemgetter(0))

    def scatter(
        self, payloads: Mapping[int, bytes], handler: str, reply_type: type[Reply], *, timeout_s: float | None = None
    ) -> asyncio.Future[list[Reply]]:
        """Send each worker its payload of one call, msgpack already; return the future of all replies in order.

        It fails as that of ``request`` does, with the first failure: the other ranks may wait in a collective
        for the rank that failed. If a worker is not connected, no worker gets the call.
        """
        return self._call(payloads, handler, reply_type, timeout_s, list)

    def _call(
        self,
        payloads: Mapping[int, bytes],
        handler: str,
        reply_type: type[Reply],
        timeout_s: float | None,
        result_of: Callable[[list[Any]], Any],
    ) -> asyncio.Future[Any]:
        self._check_alive()
        limit = self._timeout_s if timeout_s is None else timeout_s
        call = open_call(handler, reply_type, payloads, limit, result_of)
        away = sorted(payloads.keys() - self._peers.keys())
        if self._closed or self._failure is not None:
            call.fail(self._ended(f"{self._names(payloads)}: {handler}"))
        elif away:
            problem = f"{'is' if len(away) == 1 else 'are'} not connected: {handler} needs a barrier before it"
            call.fail(WorkerLost(f"{self._names(away)} {problem}"))
        elif not payloads:
            call.result.set_result([])
        else:
            # Numbered and sent without an await in between: invariant send-order.
            peers = {self._peers[worker]: data for worker, data in payloads.items()}
            self._send_all([call.add_request(peer, data) for peer, data in peers.items()])
            self._acks.discard(peers)
        return call.result

    def on_notice(self, handler: str, kind: type[Notice], callback: Callable[[Notice], object]) -> None:
        """Call ``callback`` with each notice ``handler``, also with those that arrived before.

        An exception in it fails the stream: pending and later requests raise it.
        """
        self._notices.register(handler, kind, callback)

    def lose(self, worker: int, reason: str) -> None:
        """Fail the calls to ``worker`` with WorkerLost, for example because its lease has expired.

        This incarnation and older ones are refused from now on.
        """
        peer = self._peers.pop(worker, None)
        if peer is not None:
            self._index_of.pop(peer.route, None)
            # A suspended process may wake up and say hello long after this: one-incarnation.
            self._retired[worker] = max(peer.incarnation, self._retired.get(worker, ""))
            for call, _ in peer.requests.values():
                call.fail(WorkerLost(f"{peer.name} lost during {call.handler}: {reason}"))

    def close(self) -> None:
        """Stop. Requests that still wait raise StreamError."""
        if self._closed:
            return
        self._closed = True
        self._end_calls()
        # The last Acks leave before the sockets close, because a worker's close() waits for them.
        self._acks.send()
        self._barriers.end(self._ended("barrier"))
        # The readers first: they watch the descriptors of the sockets.
        self._reader.close()
        self._rejections.close()
        self._server.close()

    # receiving

    def _on_frames(self, frames: list[zmq.Frame]) -> None:
        try:
            if not 2 <= len(frames) <= 3:
                raise DecodeError(f"{len(frames) - 1} frames, must be 1 or 2")
            header = decode_with(protocol.TO_MASTER, frames[1], "message of a worker")
            if isinstance(header, Hello) != (len(frames) == 2):
                raise DecodeError(f"{type(header).__name__} with {len(frames) - 2} payloads")
        except DecodeError as err:
            self.bad_messages += 1
            if sockets.worth_logging(self.bad_messages):
                sender = sockets.sender_of(frames)
                log.warning("master: dropped message %d from %s: %s", self.bad_messages, sender, err)
            return
        route = frames[0].bytes
        if isinstance(header, Hello):
            self._on_hello(route, header)
            return
        index = self._index_of.get(route)
        if index is None:
            # Sent before a reconnection, so it is resent after the Hello; or by a retired incarnation.
            return
        peer = self._peers[index]
        # A lower number was resent because its Ack was lost. It is acknowledged again, not handled.
        if header.number > peer.last_message:
            if isinstance(header, ReplyHeader):
                peer.take_reply(header, frames[2])
            else:
                self._notices.receive(index, header.handler, frames[2])
            if self._failure is not None or self._peers.get(index) is not peer:
                return  # no acknowledgement, because the message was not handled
            peer.last_message = header.number
        self._acks.add(peer)

    def _on_hello(self, route: bytes, hello: Hello) -> None:
        peer = self._peers.get(hello.index)
        # Incarnations compare as strings: they begin with the time at which the process started.
        if hello.incarnation <= self._retired.get(hello.index, "") or (peer and hello.incarnation < peer.incarnation):
            current = peer.incarnation if peer else "none"
            self._refuse(route, f"it was retired; current incarnation: {current}")
            return
        if peer is None and len(self._peers.keys() | self._retired.keys() | {hello.index}) > MAX_PEERS:
            self._refuse(route, f"{MAX_PEERS} workers have connected")
            return
        if peer is not None and peer.incarnation != hello.incarnation:
            # The new process has none of the old one's state, so the old one's calls are not resent.
            self.lose(hello.index, f"incarnation {peer.incarnation} was replaced by {hello.incarnation}")
            self._refuse(peer.route, f"replaced by {hello.incarnation}")
            peer = None
        if peer is None:
            peer = self._peers[hello.index] = Peer(hello.index, self._name(hello.index), hello.incarnation, route)
        else:
            log.warning("%s reconnected; %d calls pending", peer.name, len(peer.requests))
            # From here on, messages queued under the old route are ignored. The worker resends them
            # under the new one, in order.
            self._index_of.pop(peer.route, None)
            peer.route = route
        self._index_of[route] = hello.index
        # The Welcome before the requests: the worker ignores a request until it is welcomed.
        again = [(route, frames) for number, (_, frames) in peer.requests.items() if number > hello.last_request]
        self._send_all([(route, [encode_message(Welcome(peer.last_message))]), *again])
        self._barriers.check()

    def _name(self, worker: int) -> str:
        return f"{self.kind}/{worker}"

    def _names(self, workers: Iterable[int]) -> str:
        return name_workers([self._name(worker) for worker in workers])

    # failing

    def unreadable(self, worker: int, error: DecodeError) -> None:
        """Handle a notice that was acknowledged and cannot be decoded. The default ends the stream.

        No worker sends it again, and the master would wait for its content.
        """
        self._fail(DecodeError(f"{self._name(worker)}: {error}"))

    def _fail(self, exc: BaseException) -> None:
        log.error("master: the request-reply stream failed", exc_info=exc)
        self._failure = self._failure or exc  # the first error is the cause; later ones follow from it
        self._end_calls()

    def _ended(self, what: str) -> StreamError:
        cause = f"the stream failed: {self._failure!r}" if self._failure else "the stream was closed"
        error = StreamError(f"{what}: {cause}")
        error.__cause__ = self._failure
        return error

    def _end_calls(self) -> None:
        for peer in self._peers.values():
            for call, _ in peer.requests.values():
                call.fail(self._ended(f"{peer.name}: {call.handler}"))

    # sending

    def _refuse(self, route: bytes, reason: str) -> None:
        self._send_all([(route, [encode_message(Refused(reason))])])

    def _send_all(self, messages: Iterable[Message]) -> None:
        for route, frames in messages:
            self._check_alive()  # directly before the send: the process may have slept past its lease
            try:
                sockets.send_frames(self._server.socket, [route, *frames])
            except zmq.ZMQError as err:
                if err.errno != zmq.EHOSTUNREACH:
                    raise
                # The connection is lost. The worker says hello when it is back, and the request is resent.
        self._reader.nudge()  # a send may have swallowed the edge of a waiting message


# ---- calls of the master to one or many workers, and the workers as the master sees them
#
#     sent ──reply of every worker──> result: the replies, in the order of the workers
#       ├──one failure──────────────> result: that error; the requests to the others are discarded
#       └──limit────────────────────> result: WaitTimeout, which names the workers without a reply
#
# A call has one future and one timer, however many workers it has. With a future and a timer for each of 512 workers,
# the event loop would spend most of a call on them.


Message = tuple[bytes, list[bytes]]  # route and frames

#: An acknowledgement waits this long for a request that takes it along; until then the worker keeps its messages.
ACK_DELAY_S = 0.2
_NAMED = 8  # workers that an error names; it counts the others


@dataclass(slots=True, eq=False)
class Peer:
    """One incarnation of one worker. A reconnection changes only ``route``; numbers and requests stay."""

    index: int
    name: str
    incarnation: str
    route: bytes
    next_request: int = 1
    last_message: int = 0  # high-water mark of replies and notices
    #: request number -> its call and its frames, ascending
    requests: dict[int, tuple[OpenCall, list[bytes]]] = field(default_factory=dict)

    def take_reply(self, header: ReplyHeader, payload: zmq.Frame) -> None:
        """Hand a reply to its call."""
        call, _ = self.requests.get(header.request, (None, None))
        if call is None or call.result.done():
            # Acknowledged all the same, or the worker would keep it and send it again.
            log.warning("%s: late reply to request %d, which was cancelled", self.name, header.request)
        else:
            call.take_reply(self, header.failure, payload)


@dataclass(slots=True, eq=False)
class OpenCall:
    """A call that has no result yet. Make it with ``open_call``.

    replies    worker -> its reply; None until it arrives
    result_of  makes the result from the replies of all workers
    waiting    worker -> peer and number of its request, until its reply
    """

    handler: str
    reply_type: type[msgspec.Struct]
    result: asyncio.Future[Any]
    replies: dict[int, Any]
    result_of: Callable[[list[Any]], Any] = list
    waiting: dict[int, tuple[Peer, int]] = field(default_factory=dict)

    def add_request(self, peer: Peer, payload: bytes) -> Message:
        """Return the next request of ``peer``. It is kept until its reply, to be sent again after a reconnection."""
        number = peer.next_request
        peer.next_request += 1
        frames = [encode_message(RequestHeader(number, self.handler, peer.last_message)), payload]
        peer.requests[number] = (self, frames)
        self.waiting[peer.index] = (peer, number)
        return peer.route, frames

    def take_reply(self, peer: Peer, failure: FailureReply | None, payload: zmq.Frame) -> None:
        """Record the reply of ``peer``; the last one completes the call."""
        if failure is not None:
            problem = f"{peer.name}: {self.handler}: {failure.type}: {failure.message}"
            self.fail(RemoteError(problem, failure.traceback))
            return
        try:
            self.replies[peer.index] = decode_message(payload, self.reply_type)
        except DecodeError as err:
            self.fail(DecodeError(f"{peer.name}: reply to {self.handler}: {err}"))
            return
        _, number = self.waiting.pop(peer.index)
        del peer.requests[number]
        if not self.waiting:
            self.result.set_result(self.result_of(list(self.replies.values())))

    def fail(self, error: Exception) -> None:
        """End the call with ``error``, unless it has ended."""
        if not self.result.done():
            self.result.set_exception(error)

    def expire(self, limit: float) -> None:
        """End the call because its time is over."""
        names = name_workers([peer.name for peer, _ in self.waiting.values()])
        self.fail(WaitTimeout(f"{names}: no reply to {self.handler} in {limit:g} s"))

    def discard(self) -> None:
        """Discard the requests without a reply, so that they are not sent again."""
        for peer, number in self.waiting.values():
            peer.requests.pop(number, None)


class Acknowledgements:
    """The peers that have sent something since the last request or Ack to them. One timer serves all of them.

    ``send`` sends messages. An Ack covers all replies and notices of ``ACK_DELAY_S``. Most replies need none, because
    the next request acknowledges them: an Ack would cost its worker a third of an empty call.
    """

    def __init__(self, send: Callable[[Iterable[Message]], None]) -> None:
        self._send = send
        self._due: dict[int, Peer] = {}
        self._waiting = False  # True while the timer runs

    def add(self, peer: Peer) -> None:
        """Acknowledge the newest message of ``peer`` soon."""
        if not self._waiting:
            self._waiting = True
            asyncio.get_running_loop().call_later(ACK_DELAY_S, self.send)
        self._due[peer.index] = peer

    def discard(self, peers: Iterable[Peer]) -> None:
        """Send no Ack: a request to each of ``peers`` acknowledges its newest message."""
        for peer in peers:
            self._due.pop(peer.index, None)

    def send(self) -> None:
        """Acknowledge now."""
        self._waiting = False
        peers, self._due = self._due, {}
        self._send([(peer.route, [encode_message(Ack(peer.last_message))]) for peer in peers.values()])


def open_call(
    handler: str,
    reply_type: type[msgspec.Struct],
    workers: Iterable[int],
    limit: float,
    result_of: Callable[[list[Any]], Any] = list,
) -> OpenCall:
    """Return a call to ``workers`` that has no requests yet. It expires in ``limit`` seconds."""
    loop = asyncio.get_running_loop()
    call = OpenCall(handler, reply_type, loop.create_future(), dict.fromkeys(workers), result_of)
    timer = loop.call_later(limit, call.expire, limit)
    call.result.add_done_callback(lambda _: timer.cancel())
    # However the future ends (replies, timeout, cancellation, loss), no request must be resent.
    call.result.add_done_callback(lambda _: call.discard())
    return call


def name_workers(names: Collection[str]) -> str:
    """Return the names, or the first of many and the number of the others."""
    some = ", ".join(list(names)[:_NAMED])
    return some if len(names) <= _NAMED else f"{some} and {len(names) - _NAMED} others"


# ---- notices: which callback gets them, and what waits for one


#: notices that wait for their callback; bounded, because a misspelt handler would collect them for ever
MAX_UNCLAIMED = 4096
Notice = TypeVar("Notice", bound=msgspec.Struct)


class Notices:
    """Callbacks of the notices, and the notices that arrived before their callback."""

    def __init__(self, fail: Callable[[BaseException], None], unreadable: Callable[[int, DecodeError], None]) -> None:
        self.unclaimed: dict[str, list[tuple[int, bytes]]] = {}  # handler -> (sender, payload)
        self._callbacks: dict[str, tuple[type[msgspec.Struct], Callable[[Any], object]]] = {}
        self._fail = fail
        self._unreadable = unreadable

    def register(self, handler: str, kind: type[Notice], callback: Callable[[Notice], object]) -> None:
        """Call ``callback`` with each notice ``handler``, also with those that arrived before."""
        self._callbacks[handler] = (kind, callback)
        for sender, payload in self.unclaimed.pop(handler, []):
            self._call(sender, handler, payload)

    def receive(self, sender: int, handler: str, payload: zmq.Frame) -> None:
        """Hand the notice to its callback, or keep it until one is registered."""
        if handler in self._callbacks:
            self._call(sender, handler, payload.bytes)
        elif sum(map(len, self.unclaimed.values())) < MAX_UNCLAIMED:
            self.unclaimed.setdefault(handler, []).append((sender, payload.bytes))
        else:
            waiting = f"{MAX_UNCLAIMED} notices wait, and {handler} has no callback"
            self._fail(StreamError(f"worker {sender}: {waiting}: register one with on_notice"))

    def _call(self, sender: int, handler: str, payload: bytes) -> None:
        kind, callback = self._callbacks[handler]
        try:
            notice = decode_message(payload, kind)
        except DecodeError as err:
            self._unreadable(sender, DecodeError(f"notice {handler}: {err}"))
            return
        try:
            callback(notice)
        except Exception as exc:  # a boundary: the event loop would only log it, request() must raise it
            exc.add_note(f"while handling notice {handler} of worker {sender}")
            self._fail(exc)


# ---- waits for workers to connect


class Barriers:
    """The open waits. ``here``: a live view of the workers that have connected."""

    def __init__(self, here: AbstractSet[int]) -> None:
        self._here = here
        self._open: dict[asyncio.Future[None], frozenset[int]] = {}

    async def wait(self, workers: Collection[int], timeout_s: float) -> None:
        """Return when all ``workers`` have connected. Raises TimeoutError."""
        complete = asyncio.get_running_loop().create_future()
        self._open[complete] = frozenset(workers)
        self.check()
        try:
            async with asyncio.timeout(timeout_s):
                await complete
        finally:
            del self._open[complete]

    def check(self) -> None:
        """Complete the waits whose workers have all connected."""
        for complete, workers in self._open.items():
            if not complete.done() and workers <= self._here:
                complete.set_result(None)

    def end(self, error: Exception) -> None:
        """Raise ``error`` in all waits."""
        for complete in self._open:
            if not complete.done():
                complete.set_exception(error)


# ---- calls by handle: shards, DP heads and plain indices, in the names of the topology's routing table

Handle = str | int


class RoutedStream:
    """A MasterStream with a routing table (``cluster.topology.routing_table``): handle -> worker index."""

    def __init__(self, stream: MasterStream, table: Mapping[str, int]) -> None:
        self._stream, self._table = stream, dict(table)

    def worker(self, handle: Handle) -> int:
        """Return the worker behind ``handle`` (``__data0__``, ``actor@d0t0p0``, ``"3"``, 3)."""
        try:
            return self._table[str(handle)]
        except KeyError:
            handles = ", ".join(sorted(self._table))
            raise StreamError(f"no worker for handle={handle!r}: use one of the routing table: {handles}") from None

    def request(
        self,
        handle: Handle,
        handler: str,
        payload: msgspec.Struct,
        reply_type: type[Reply],
        *,
        timeout_s: float | None = None,
    ) -> asyncio.Future[Reply]:
        """Send a call to the worker behind ``handle``, as ``MasterStream.request`` does."""
        return self._stream.request(self.worker(handle), handler, payload, reply_type, timeout_s=timeout_s)

    def broadcast(
        self,
        handles: Iterable[Handle],
        handler: str,
        payload: msgspec.Struct,
        reply_type: type[Reply],
        *,
        timeout_s: float | None = None,
    ) -> asyncio.Future[list[Reply]]:
        """Send one call to every worker behind ``handles`` and return the future of all replies, in order.

        A worker behind several handles gets the call once. All calls are sent before this returns, so
        broadcasts reach every worker in the order in which they were made. The future fails with the
        first failure, because the other ranks may wait in a collective for the rank that failed.
        """
        workers = [self.worker(handle) for handle in handles]
        return self.scatter(dict.fromkeys(workers, encode_message(payload)), handler, reply_type, timeout_s=timeout_s)

    def scatter(
        self, payloads: Mapping[int, bytes], handler: str, reply_type: type[Reply], *, timeout_s: float | None = None
    ) -> asyncio.Future[list[Reply]]:
        """Send each worker its own encoded payload of one call; otherwise as ``broadcast``."""
        return self._stream.scatter(payloads, handler, reply_type, timeout_s=timeout_s)
