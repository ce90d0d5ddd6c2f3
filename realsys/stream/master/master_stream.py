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
from typing import Any, TypeVar

import msgspec
import zmq

from realsys.cluster.fence import CheckAlive, unleased
from realsys.errors import DecodeError, StreamError, WaitTimeout, WorkerLost
from realsys.stream import sockets
from realsys.stream import wire as protocol
from realsys.stream.codec import decode_with, encode_message
from realsys.stream.master.barriers import Barriers
from realsys.stream.master.calls import Acknowledgements, Message, Peer, name_workers, open_call
from realsys.stream.master.notices import Notice, Notices
from realsys.stream.security import CurveKeys
from realsys.stream.wire import Hello, Refused, ReplyHeader, Welcome

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
