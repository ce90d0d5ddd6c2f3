"""The worker's end of the request-reply stream. It also serves the puller of a DP head.

    master ──Request──>  I/O thread  ──> next_request()  ──> a handler, in the worker's main thread
                             │       ──> next_background() ──> a handler, in a thread of the worker
           <──Reply────      ^       <── reply(), reply_error(), notify() from any thread
    pushers ──groups──>      │
                          GroupIntake.store() stores them; the Struct it returns becomes a notice

One thread owns every socket (``WorkerIO``). Other threads only touch a queue and the outbox.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import zmq

from realsys.cluster.failpoint import failpoint
from realsys.cluster.lease import CheckAlive, unleased
from realsys.cluster.stream import codec as protocol
from realsys.cluster.stream import sockets
from realsys.cluster.stream.codec import (
    Ack,
    Buffer,
    FailureReply,
    Hello,
    NoticeHeader,
    Refused,
    ReplyHeader,
    RequestHeader,
    Welcome,
    decode_message,
    decode_with,
    encode_message,
)
from realsys.cluster.stream.push_pull import Puller, PullerStats
from realsys.cluster.stream.security import CurveKeys
from realsys.errors import DecodeError, Fenced, StreamError, WaitTimeout
from realsys.types import Group

log = logging.getLogger(__name__)

#: bound on the wait for the I/O thread to end: it stores at most one group and closes its sockets
IO_THREAD_S = 10.0


class WorkerEndpoint:
    """The connection of worker ``index`` to the master. Creating it starts its I/O thread.

    ``incarnation`` distinguishes a restarted worker from its predecessor. ``groups`` hands over a
    puller, which the I/O thread then owns. ``check_alive`` runs before anything is received or sent.
    An exception in the I/O thread ends it through ``threading.excepthook``; later calls of
    ``next_request``, ``reply`` and ``notify`` raise StreamError.
    """

    kind = "model_worker"  # kind of this process in messages

    def __init__(
        self,
        index: int,
        master_address: str,
        groups: GroupIntake | None = None,
        *,
        incarnation: str | None = None,
        keys: CurveKeys | None = None,
        check_alive: CheckAlive = unleased,
    ) -> None:
        # The master compares incarnations as strings and refuses the older, so they begin with the time.
        self.incarnation = incarnation or f"{time.time_ns()}-{secrets.token_hex(4)}"
        self._me = WorkerIdentity(index, self.incarnation, master_address, check_alive, self.kind)
        self.index = index
        self.name = self._me.name
        self._puller = groups.puller if groups is not None else None
        self._requests: queue.SimpleQueue[WorkerRequest | None] = queue.SimpleQueue()
        self._background: queue.SimpleQueue[WorkerRequest | None] = queue.SimpleQueue()
        self._io = WorkerIO(self._me, keys, groups, self._requests, self._background)
        # A daemon, so that a thread that blocks in ``store`` cannot keep the process alive.
        self._thread = threading.Thread(target=self._io.run, name=f"{self.name}-io", daemon=True)
        self._thread.start()

    def counters(self) -> dict[str, int]:
        """Return how many messages, groups and peers were refused since the start, by reason."""
        stats = PullerStats() if self._puller is None else self._puller.stats
        return {
            "malformed": stats.malformed,
            "refused_groups": stats.refused,
            "rejected_peers": stats.rejected,
            "bad_messages": self._io.bad_messages,
        }

    def answer_urgent(self, handler: str, kind: type[msgspec.Struct], answer: Callable[[Any], msgspec.Struct]) -> None:
        """Answer requests ``handler`` in the I/O thread, also while the main thread serves another request.

        ``answer`` must be short. An exception in it ends the I/O thread.
        """
        self._io.urgent[handler] = (kind, answer)

    def wait_connected(self, timeout_s: float) -> None:
        """Wait until the master has welcomed this worker; WaitTimeout names the master's address."""
        if not self._io.connected.wait(timeout_s):
            master = f"the master at {self._me.master_address}"
            raise WaitTimeout(f"{self.name}: no welcome from {master} in {timeout_s:g} s ({self._io.problem})")

    def next_request(self, timeout_s: float) -> WorkerRequest | None:
        """Return the next call, in the order the master made them; None after ``timeout_s``.

        Raises StreamError if the endpoint has ended.
        """
        return self._next(self._requests, timeout_s)

    def serve_in_background(self, *handlers: str) -> None:
        """From now on hand out the requests of ``handlers`` through ``next_background`` only.

        They do not wait for the main thread, and keep their order among themselves.
        """
        self._io.in_background |= set(handlers)

    def next_background(self, timeout_s: float) -> WorkerRequest | None:
        """Return the next call that ``serve_in_background`` names; otherwise as ``next_request``."""
        return self._next(self._background, timeout_s)

    def _next(self, requests: queue.SimpleQueue[WorkerRequest | None], timeout_s: float) -> WorkerRequest | None:
        try:
            request = requests.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if request is None:
            requests.put(None)  # the mark of the end stays, for the next caller
            raise self._ended_error("no more requests")
        return request

    def reply(self, request: WorkerRequest, payload: msgspec.Struct) -> None:
        """Send ``payload`` as the result of ``request``."""
        self._post(Outgoing(encode_message(payload), request=request.number))

    def reply_error(self, request: WorkerRequest, exc: BaseException) -> None:
        """Report that handling ``request`` raised ``exc``; the master's call raises RemoteError."""
        text = "".join(traceback.format_exception(exc))
        failure = FailureReply(type(exc).__name__, str(exc), text)
        self._post(Outgoing(b"", request=request.number, failure=failure))

    def notify(self, handler: str, payload: msgspec.Struct) -> None:
        """Send a message that is no reply. The master receives it once, in order with the replies."""
        self._post(Outgoing(encode_message(payload), handler=handler))

    def close(self, timeout_s: float = 2.0) -> None:
        """Stop, after waiting up to ``timeout_s`` for a connected master to acknowledge everything.

        An I/O thread that does not end (``store`` blocks, for example on a dead disk) is logged and
        left, with its sockets, to the end of the process. It must not hide the error for which the
        caller closes.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError(f"{self.name}: close() was called in the I/O thread: call it in another thread")
        if self._thread.is_alive() and not self._io.outbox.idle.wait(timeout_s):
            log.warning("%s: closing with replies or notices the master has not acknowledged", self.name)
        self._io.outbox.stop()
        self._thread.join(IO_THREAD_S)
        if self._thread.is_alive():
            # term() would wait for the sockets of the blocked thread without end.
            log.error("%s: its I/O thread did not end within %g s; it is left behind", self.name, IO_THREAD_S)
            return
        self._io.close()

    def _post(self, outgoing: Outgoing) -> None:
        if not self._io.outbox.post(outgoing):
            raise self._ended_error("cannot send")

    def _ended_error(self, what: str) -> StreamError:
        failure = self._io.failure
        cause = f"its I/O thread died: {failure!r}" if failure else "the endpoint was closed"
        error = StreamError(f"{self.name}: {what}: {cause}")
        error.__cause__ = failure
        return error


# ---- the I/O thread of a WorkerEndpoint, and the outbox through which other threads reach it
#
#     any thread ──Outgoing──> Outbox ──> [I/O thread] numbers it, keeps it, sends it ──> master
#                                           ^      │
#     master ──Request, Ack, Welcome────────┘      └──Request──> one of two queues
#     pushers ──groups──> puller ──> store() ──its notice──> Outbox
#
# Invariants
#     one-owner        Only the I/O thread uses a ZMQ socket, because these are not thread-safe.
#     keep-until-ack   A Reply or Notice keeps its number and its frames until the master has acknowledged it.
#                      A connection that is cut can therefore lose nothing.
#     rising-requests  A Request is handed over only if its number is higher than all before it. A resent Request
#                      is therefore handled once.

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """One call of the master. ``payload`` is its Struct, still encoded."""

    number: int
    handler: str
    payload: Buffer

    def decode(self, kind: type[T]) -> T:
        """Decode the payload as ``kind``; raise DecodeError if it is something else."""
        try:
            return decode_message(self.payload, kind)
        except DecodeError as err:
            raise DecodeError(f"request {self.number} for handler {self.handler}: {err}") from err


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """The name under which a worker speaks to the master, and its right to speak."""

    index: int
    incarnation: str
    master_address: str
    check_alive: CheckAlive
    kind: str = "model_worker"

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.index}"


@dataclass(frozen=True, slots=True)
class GroupIntake:
    """Groups that a worker receives.

    ``store`` runs in the I/O thread and must be short, because requests wait for it. The Struct
    that it returns, if any, goes to the master as notice ``notice``. It may raise StreamError to
    refuse a group; any other exception ends the I/O thread.
    """

    puller: Puller
    store: Callable[[Group], msgspec.Struct | None]
    notice: str = "samples_arrived"


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A reply (``request`` > 0) or a notice, before it has a number."""

    payload: bytes
    request: int = 0
    failure: FailureReply | None = None
    handler: str = ""

    def frames(self, number: int) -> list[bytes]:
        """Encode header and payload, with ``number`` as the message's number."""
        if self.handler:
            return [encode_message(NoticeHeader(number, self.handler)), self.payload]
        return [encode_message(ReplyHeader(number, self.request, self.failure)), self.payload]


class Outbox:
    """Messages from any thread to the I/O thread, and the descriptor that wakes it.

    ``idle`` is set while nothing waits to be sent or acknowledged. ``stopping`` ends the I/O thread.
    The lock is never held across anything slow.
    """

    def __init__(self) -> None:
        self.idle = threading.Event()
        self.idle.set()
        self.stopping = False
        #: readable while the I/O thread has something to do
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._queue: deque[Outgoing] = deque()
        self._ended = False

    def post(self, outgoing: Outgoing) -> bool:
        """Queue ``outgoing`` and wake the I/O thread; return False if that thread has ended."""
        with self._lock:
            if self._ended:
                return False
            self._queue.append(outgoing)
            # Under the lock: ``settle`` must not set ``idle`` for a queue that it saw empty before.
            self.idle.clear()
            # If more is queued, the I/O thread has been woken and has not yet emptied the queue.
            if len(self._queue) == 1:
                os.eventfd_write(self.descriptor, 1)
        return True

    def take(self) -> deque[Outgoing]:
        """Empty the queue and return its messages. The descriptor is not readable afterwards."""
        with self._lock:
            queued = self._queue
            if queued:
                self._queue = deque()
                os.eventfd_read(self.descriptor)
        return queued

    def settle(self) -> None:
        """Set ``idle`` unless something was queued since; call it when nothing is unacknowledged."""
        with self._lock:
            if not self._queue:
                self.idle.set()

    def stop(self) -> None:
        """End the I/O thread soon. Further calls have no effect."""
        with self._lock:
            if not self._ended:
                self.stopping = True
                os.eventfd_write(self.descriptor, 1)

    def end(self) -> None:
        """Refuse further messages; the I/O thread calls this last."""
        with self._lock:
            self._ended = True
            self.idle.set()  # nothing will be sent any more, so close() need not wait
            os.close(self.descriptor)


class WorkerIO:
    """The work of the I/O thread: ``run`` is its body. Creates the sockets and closes them.

    ``requests`` receives each Request of the master once and in order, then None when the thread
    ends; those in ``in_background`` go to ``background`` instead. ``failure`` is the exception that
    ended it, ``problem`` the state of the connection.
    """

    def __init__(
        self,
        me: WorkerIdentity,
        keys: CurveKeys | None,
        groups: GroupIntake | None,
        requests: queue.SimpleQueue[WorkerRequest | None],
        background: queue.SimpleQueue[WorkerRequest | None],
    ) -> None:
        self.connected = threading.Event()
        self.problem = "no connection yet"
        self.failure: BaseException | None = None
        self.bad_messages = 0
        #: handler -> payload type and function; the I/O thread answers these requests itself
        self.urgent: dict[str, tuple[type[msgspec.Struct], Callable[[Any], msgspec.Struct]]] = {}
        #: handlers whose requests go to the queue ``background``
        self.in_background: frozenset[str] = frozenset()
        self._me = me
        self._groups = groups
        self._requests = requests
        self._background = background
        self._last_request = 0  # high-water mark of rising-requests; survives a reconnection
        self._welcomed = False
        self._unacked: dict[int, list[bytes]] = {}  # message number -> frames, ascending
        self._next_number = 1
        self._context: sockets.ZContext = zmq.Context()
        try:
            self._dealer, self._monitor = sockets.connect_client(self._context, me.master_address, keys)
        except StreamError:
            self._context.term()
            raise
        self.outbox = Outbox()

    def run(self) -> None:
        """Serve the sockets until ``outbox.stop`` or an error; then close them."""
        try:
            self._loop()
        except BaseException as exc:
            self.failure = exc
            raise
        finally:
            # First refuse new messages, then wake the readers of the queues: a caller that is woken
            # and tries to send gets the error of this thread, not silence.
            self.outbox.end()
            for queued in (self._requests, self._background):
                queued.put(None)
            sockets.close_client(self._dealer, self._monitor)
            if self._groups is not None:
                self._groups.puller.close()

    def close(self) -> None:
        """Free the context; call it after the thread has ended, because term() waits for all sockets."""
        self._context.term()

    def _loop(self) -> None:
        puller = self._groups.puller if self._groups is not None else None
        poller = zmq.Poller()
        for source in (self.outbox.descriptor, self._monitor, self._dealer):
            poller.register(source, zmq.POLLIN)
        if puller is not None:
            poller.register(puller.socket, zmq.POLLIN)
            poller.register(puller.monitor, zmq.POLLIN)
        while not self.outbox.stopping:
            ready = dict(poller.poll())
            # A process that slept past its lease wakes up here: it must not take in the waiting messages.
            self._me.check_alive()
            # Events first: they decide whether the messages below belong to the current connection.
            if self._monitor in ready:
                for frames in _receive(self._monitor):
                    self._on_event(sockets.monitor_event(frames))
            if self._dealer in ready:
                for frames in _receive(self._dealer):
                    self._on_message(frames)
            if puller is not None and puller.socket in ready:
                puller.drain(self._store)
            if puller is not None and puller.monitor in ready:
                puller.count_rejected()
            # Last and on every turn: the notices of the groups stored above leave without another turn.
            self._send_outbox()

    def _store(self, group: Group) -> None:
        assert self._groups is not None
        announcement = self._groups.store(group)
        if announcement is not None:
            notice = Outgoing(encode_message(announcement), handler=self._groups.notice)
            self.outbox.post(notice)

    def _on_event(self, event: zmq.Event) -> None:
        if event == zmq.Event.HANDSHAKE_SUCCEEDED:
            # Every connection opens with a Hello, also one that libzmq made again without us: Hello
            # and Welcome carry the high-water marks from which both sides resend.
            hello = Hello(self._me.index, self._me.incarnation, self._last_request)
            self._send([encode_message(hello)])
            return
        was_up = self._welcomed
        self._welcomed = False
        problem = sockets.describe_loss(event, was_up=was_up)
        # libzmq reports each attempt to reconnect; only a change is worth a line in the log.
        if was_up or problem != self.problem:
            log.warning("%s: master at %s: %s", self._me.name, self._me.master_address, problem)
        self.problem = problem
        if not was_up:
            self.outbox.idle.set()  # no master can acknowledge now, so close() need not wait

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        try:
            header = decode_with(protocol.TO_WORKER, frames[0], "message of the master")
            if isinstance(header, RequestHeader) and len(frames) != 2:
                call = f"request {header.number} for handler {header.handler}"
                raise DecodeError(f"{call} has {len(frames)} frames, must have 2")
        except DecodeError as err:
            self.bad_messages += 1
            if sockets.worth_logging(self.bad_messages):
                source = f"dropped message {self.bad_messages} of the master at {self._me.master_address}"
                log.warning("%s: %s: %s", self._me.name, source, err)
            return
        match header:
            case RequestHeader():
                self._on_request(header, frames[1])
            case Ack(number):
                self._discard_up_to(number)
            case Welcome(last_message):
                self._welcomed = True
                self.connected.set()
                # The master may have taken messages whose Ack was lost with the connection.
                self._discard_up_to(last_message)
                if self._unacked:
                    self.outbox.idle.clear()
                for unacked in self._unacked.values():  # ascending: the master drops a number below its mark
                    self._send(unacked)
            case Refused(reason):
                # A newer incarnation has this worker's place: two workers would serve one index.
                refused = f"the master refused incarnation {self._me.incarnation}: {reason}"
                raise Fenced(f"{self._me.name}: {refused}")

    def _on_request(self, header: RequestHeader, payload: Buffer) -> None:
        if not self._welcomed:
            # A request of a connection that is lost. The master sends it again after the welcome. If it
            # were taken now, an older one that is resent would look like a duplicate.
            return
        fault = failpoint("request.receive")
        if fault == "drop":
            self._reconnect()
            return
        if fault == "garbage":
            payload = b"\xc1"
        self._discard_up_to(header.acknowledged)
        number, handler = header.number, header.handler
        for _ in range(1 + (fault == "duplicate")):
            if number > self._last_request:  # otherwise it was resent, and is here already
                self._last_request = number
                request = WorkerRequest(number, handler, payload)
                if handler in self.urgent:
                    kind, answer = self.urgent[handler]
                    self.outbox.post(Outgoing(encode_message(answer(request.decode(kind))), request=number))
                else:
                    (self._background if handler in self.in_background else self._requests).put(request)

    def _send_outbox(self) -> None:
        for outgoing in self.outbox.take():
            # Numbered here, not in ``post``: one thread gives the numbers, so they leave in order.
            frames = outgoing.frames(self._next_number)
            self._unacked[self._next_number] = frames
            self._next_number += 1
            if not self._welcomed:
                continue  # the welcome sends all that is unacknowledged
            match failpoint("notice.send") if outgoing.handler else failpoint("reply.send"):
                case "drop":
                    self._reconnect()
                    continue
                case "duplicate":
                    self._send(frames)
                case "garbage":
                    frames = [frames[0], b"\xc1"]
            self._send(frames)

    def _send(self, frames: list[bytes]) -> None:
        # Asked again right before each send: the process may have slept since the check in the loop.
        self._me.check_alive()
        sockets.send_frames(self._dealer, frames)

    def _reconnect(self) -> None:
        """Lose everything in transit, as a cut connection does (failpoint ``drop``)."""
        self._welcomed = False
        self._dealer.disconnect(self._me.master_address)
        self._dealer.connect(self._me.master_address)

    def _discard_up_to(self, number: int) -> None:
        # The numbers ascend, so the loop stops at the first one that is not acknowledged yet.
        while self._unacked and (first := next(iter(self._unacked))) <= number:
            del self._unacked[first]
        if not self._unacked:
            self.outbox.settle()


def _receive(sock: sockets.ZSocket, budget: int = 64) -> list[list[zmq.Frame]]:
    """Take the messages that wait on ``sock``, at most ``budget``, so that no socket starves the others."""
    messages: list[list[zmq.Frame]] = []
    while len(messages) < budget:
        try:
            messages.append(sockets.receive_frames(sock))
        except zmq.Again:
            break
    return messages
