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
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import zmq

from realsys.cluster.fence import CheckAlive, unleased
from realsys.errors import DecodeError, RemoteError, StreamError, WaitTimeout, WorkerLost
from realsys.stream import sockets
from realsys.stream import wire as protocol
from realsys.stream.codec import decode_message, decode_with, encode_message
from realsys.stream.master.barriers import Barriers
from realsys.stream.master.notices import Notice, Notices
from realsys.stream.security import CurveKeys
from realsys.stream.wire import Ack, Failure, Hello, Refused, ReplyHeader, RequestHeader, Welcome

log = logging.getLogger(__name__)

#: one Ack covers all replies and notices of this time; the worker only keeps them a little longer
ACK_DELAY_S = 0.02
#: workers that may ever say hello; bounded, because the master remembers each of them
MAX_PEERS = 1 << 16
Reply = TypeVar("Reply", bound=msgspec.Struct)


@dataclass(slots=True)
class _Call:
    """A request that has no reply yet."""

    handler: str
    frames: list[bytes]
    reply_type: type[msgspec.Struct]
    reply: asyncio.Future[Any]
    timer: asyncio.TimerHandle


@dataclass(slots=True)
class _Peer:
    """One incarnation of one worker. A reconnection changes only ``route``; numbers and calls stay."""

    name: str
    incarnation: str
    route: bytes
    next_request: int = 1
    last_message: int = 0  # high-water mark of replies and notices
    calls: dict[int, _Call] = field(default_factory=dict)  # request number -> call, ascending
    ack: asyncio.TimerHandle | None = None  # timer of the next Ack; None: nothing new to acknowledge


class MasterStream:
    """Typed calls to ModelWorkers. Create it inside the event loop; its ``address`` is bound."""

    kind = "model_worker"  # of the peers, for messages

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
        self._loop = asyncio.get_running_loop()
        self._timeout_s = request_timeout_s
        self._server = sockets.bind_server(host, keys)
        self.address = self._server.address
        self.bad_messages = 0
        self._peers: dict[int, _Peer] = {}
        self._index_of: dict[bytes, int] = {}  # route -> worker; only the current route of each peer
        self._retired: dict[int, str] = {}  # worker -> its newest incarnation that may not return
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
        return self.request_encoded(worker, handler, encode_message(payload), reply_type, timeout_s=timeout_s)

    def request_encoded(
        self, worker: int, handler: str, payload: bytes, reply_type: type[Reply], *, timeout_s: float | None = None
    ) -> asyncio.Future[Reply]:
        """Send a call whose payload is msgpack already, so that a broadcast encodes it once."""
        self._check_alive()
        reply: asyncio.Future[Reply] = self._loop.create_future()
        peer = self._peers.get(worker)
        if self._closed or self._failure is not None:
            reply.set_exception(self._ended(f"{self._name(worker)}: {handler}"))
        elif peer is None:
            name = self._name(worker)
            reply.set_exception(WorkerLost(f"{name} is not connected: {handler} needs a barrier before it"))
        else:
            # Numbered and sent without an await in between: invariant send-order.
            number = peer.next_request
            peer.next_request += 1
            limit = self._timeout_s if timeout_s is None else timeout_s
            timer = self._loop.call_later(limit, _expire, peer, number, limit)
            frames = [encode_message(RequestHeader(number, handler)), payload]
            peer.calls[number] = _Call(handler, frames, reply_type, reply, timer)
            # However the future ends (reply, timeout, cancellation, loss), the call must not be resent.
            reply.add_done_callback(lambda _: _discard_call(peer, number))
            self._send(peer.route, frames)
        return reply

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
            for call in peer.calls.values():
                if not call.reply.done():
                    call.reply.set_exception(WorkerLost(f"{peer.name} lost during {call.handler}: {reason}"))

    def close(self) -> None:
        """Stop. Requests that still wait raise StreamError."""
        if self._closed:
            return
        self._closed = True
        self._end_calls()
        # The last Acks leave before the sockets close, because a worker's close() waits for them.
        for peer in self._peers.values():
            if peer.ack is not None:
                peer.ack.cancel()
                self._acknowledge(peer)
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
            self._drop(frames, err)
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
                _on_reply(peer, header, frames[2])
            else:
                self._notices.receive(index, header.handler, frames[2])
            if self._failure is not None or self._peers.get(index) is not peer:
                return  # no acknowledgement, because the message was not handled
            peer.last_message = header.number
        if peer.ack is None:
            peer.ack = self._loop.call_later(ACK_DELAY_S, self._acknowledge, peer)

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
            peer = self._peers[hello.index] = _Peer(self._name(hello.index), hello.incarnation, route)
        else:
            log.warning("%s reconnected; %d calls pending", peer.name, len(peer.calls))
            # From here on, messages queued under the old route are ignored. The worker resends them
            # under the new one, in order.
            self._index_of.pop(peer.route, None)
            peer.route = route
        self._index_of[route] = hello.index
        # The Welcome before the requests: the worker ignores a request until it is welcomed.
        self._send(route, [encode_message(Welcome(peer.last_message))])
        for number, call in peer.calls.items():
            if number > hello.last_request:
                self._send(route, call.frames)
        self._barriers.check()

    def _name(self, worker: int) -> str:
        return f"{self.kind}/{worker}"

    # failing

    def unreadable(self, worker: int, error: DecodeError) -> None:
        """Handle a notice that was acknowledged and cannot be decoded. The default ends the stream.

        No worker sends it again, and the master would wait for its content.
        """
        self._fail(DecodeError(f"{self._name(worker)}: {error}"))

    def _drop(self, frames: list[zmq.Frame], err: DecodeError) -> None:
        self.bad_messages += 1
        if sockets.worth_logging(self.bad_messages):
            sender = sockets.sender_of(frames)
            log.warning("master: dropped message %d from %s: %s", self.bad_messages, sender, err)

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
            for call in peer.calls.values():
                if not call.reply.done():
                    call.reply.set_exception(self._ended(f"{peer.name}: {call.handler}"))

    # sending

    def _refuse(self, route: bytes, reason: str) -> None:
        self._send(route, [encode_message(Refused(reason))])

    def _send(self, route: bytes, frames: list[bytes]) -> None:
        self._check_alive()  # directly before the send: the process may have slept past its lease
        try:
            self._server.socket.send_multipart([route, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as err:
            if err.errno != zmq.EHOSTUNREACH:
                raise
            # The connection is lost. The worker says hello when it is back, and the request is resent.
        self._reader.nudge()  # the send may have swallowed the edge of a waiting message

    def _acknowledge(self, peer: _Peer) -> None:
        peer.ack = None
        if not self._server.socket.closed:
            self._send(peer.route, [encode_message(Ack(peer.last_message))])


def _on_reply(peer: _Peer, header: ReplyHeader, payload: zmq.Frame) -> None:
    call = peer.calls.get(header.request)
    if call is None or call.reply.done():
        # Acknowledged all the same, or the worker would keep it and send it again.
        log.warning("%s: late reply to request %d, which was cancelled", peer.name, header.request)
    elif header.failure is not None:
        call.reply.set_exception(_remote(peer, call, header.failure))
    else:
        try:
            call.reply.set_result(decode_message(payload, call.reply_type))
        except DecodeError as err:
            call.reply.set_exception(DecodeError(f"{peer.name}: reply to {call.handler}: {err}"))


def _expire(peer: _Peer, number: int, limit: float) -> None:
    call = peer.calls.get(number)
    if call is not None and not call.reply.done():
        call.reply.set_exception(WaitTimeout(f"{peer.name}: no reply to {call.handler} in {limit:g} s"))


def _discard_call(peer: _Peer, number: int) -> None:
    call = peer.calls.pop(number, None)
    if call is not None:
        call.timer.cancel()


def _remote(peer: _Peer, call: _Call, failure: Failure) -> RemoteError:
    return RemoteError(f"{peer.name}: {call.handler}: {failure.type}: {failure.message}", failure.traceback)
