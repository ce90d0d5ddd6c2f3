"""Calls of the master to one or many workers, and the workers as the master sees them.

    sent ──reply of every worker──> result: the replies, in the order of the workers
      ├──one failure──────────────> result: that error; the requests to the others are discarded
      └──limit────────────────────> result: WaitTimeout, which names the workers without a reply

A call has one future and one timer, however many workers it has. With a future and a timer for each of 512 workers,
the event loop would spend most of a call on them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from realsys.errors import DecodeError, RemoteError, WaitTimeout
from realsys.stream.codec import decode_message, encode_message
from realsys.stream.wire import Ack, Failure, ReplyHeader, RequestHeader

log = logging.getLogger(__name__)

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
    requests: dict[int, tuple[Call, list[bytes]]] = field(default_factory=dict)

    def take_reply(self, header: ReplyHeader, payload: zmq.Frame) -> None:
        """Hand a reply to its call."""
        call, _ = self.requests.get(header.request, (None, None))
        if call is None or call.result.done():
            # Acknowledged all the same, or the worker would keep it and send it again.
            log.warning("%s: late reply to request %d, which was cancelled", self.name, header.request)
        else:
            call.take_reply(self, header.failure, payload)


@dataclass(slots=True, eq=False)
class Call:
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

    def take_reply(self, peer: Peer, failure: Failure | None, payload: zmq.Frame) -> None:
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
) -> Call:
    """Return a call to ``workers`` that has no requests yet. It expires in ``limit`` seconds."""
    loop = asyncio.get_running_loop()
    call = Call(handler, reply_type, loop.create_future(), dict.fromkeys(workers), result_of)
    timer = loop.call_later(limit, call.expire, limit)
    call.result.add_done_callback(lambda _: timer.cancel())
    # However the future ends (replies, timeout, cancellation, loss), no request must be resent.
    call.result.add_done_callback(lambda _: call.discard())
    return call


def name_workers(names: Collection[str]) -> str:
    """Return the names, or the first of many and the number of the others."""
    some = ", ".join(list(names)[:_NAMED])
    return some if len(names) <= _NAMED else f"{some} and {len(names) - _NAMED} others"
