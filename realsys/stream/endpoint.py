"""The worker's end of the request-reply stream, and the home of the puller.

    master ──Request──>  I/O thread  ──> next_request()  ──> a handler, in the worker's main thread
           <──Reply────      ^       <── reply(), reply_error(), notify() from any thread
    pushers ──groups──>      │
                          on_group() stores; what it returns becomes a notice

One thread owns every socket. Other threads only touch a queue and the waking end of an inproc pair, under one lock.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import zmq

from realsys.cluster.failpoint import failpoint
from realsys.cluster.fence import CheckAlive, unleased
from realsys.errors import DecodeError, Fenced, StreamError, WaitTimeout
from realsys.stream import sockets
from realsys.stream import wire as protocol
from realsys.stream.codec import Buffer, decode_message, decode_with, encode_message
from realsys.stream.puller import Puller, PullerStats
from realsys.stream.security import CurveKeys
from realsys.stream.wire import Ack, Failure, Hello, NoticeHeader, Refused, ReplyHeader, RequestHeader, Welcome
from realsys.types import Group

log = logging.getLogger(__name__)
T = TypeVar("T")

IO_THREAD_S = 10.0  # bound on the wait for the I/O thread to end; it stores a group, closes sockets, and no more


@dataclass(frozen=True, slots=True)
class Request:
    """One call of the master. ``payload`` is its Struct, still encoded."""

    number: int
    handler: str
    payload: Buffer

    def decode(self, kind: type[T]) -> T:
        """The payload as ``kind``; DecodeError if it is something else."""
        try:
            return decode_message(self.payload, kind)
        except DecodeError as err:
            raise DecodeError(f"request {self.number} for handler {self.handler}: {err}") from err


@dataclass(frozen=True, slots=True)
class _Outgoing:
    """A reply (``request`` > 0) or a notice, before it has a number."""

    payload: bytes
    request: int = 0
    failure: Failure | None = None
    handler: str = ""

    def frames(self, number: int) -> list[bytes]:
        header = NoticeHeader(number, self.handler) if self.handler else ReplyHeader(number, self.request, self.failure)
        return [encode_message(header), self.payload]


class WorkerEndpoint:
    """Connects worker ``index`` to the master; starts its I/O thread at once and takes over ``puller``.

    ``incarnation`` tells a restarted worker from its predecessor. ``on_group`` runs in the I/O thread and must be
    short; the Struct it returns, if any, goes to the master as notice ``group_notice``. It may raise StreamError to
    refuse a group. ``check_alive`` is asked before anything is taken in or sent. Any other exception in the I/O thread
    ends it through ``threading.excepthook``; whoever calls ``next_request``, ``reply`` or ``notify`` afterwards gets a
    StreamError.
    """

    def __init__(
        self,
        index: int,
        master_address: str,
        puller: Puller | None = None,
        on_group: Callable[[Group], msgspec.Struct | None] | None = None,
        *,
        incarnation: str | None = None,
        keys: CurveKeys | None = None,
        group_notice: str = "samples_arrived",
        check_alive: CheckAlive = unleased,
    ) -> None:
        if (puller is None) != (on_group is None):
            raise ValueError(f"model_worker/{index}: puller and on_group belong together")
        self.index = index
        self.name = f"model_worker/{index}"
        self.incarnation = incarnation or f"{time.time_ns()}-{secrets.token_hex(4)}"
        self.master_address = master_address
        self._puller, self._on_group, self._group_notice = puller, on_group, group_notice
        self._check_alive = check_alive
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()  # None: the I/O thread has ended
        self._failure: BaseException | None = None
        self._connected = threading.Event()
        self._problem = "no connection yet"
        self._last_request = 0
        self._welcomed = False
        self._unacked: dict[int, list[bytes]] = {}
        self._next_number = 1
        self._stopping = False
        self.bad_messages = 0

        self._lock = threading.Lock()  # over the outbox and the waking end; never held across anything slow
        self._outbox: deque[_Outgoing] = deque()
        self._idle = threading.Event()  # nothing waits to be sent or acknowledged
        self._idle.set()
        self._ended = False
        self._context: sockets.ZContext = zmq.Context()
        try:
            self._dealer, self._monitor = sockets.connect_client(self._context, master_address, keys)
        except StreamError:
            self._context.term()
            raise
        self._waking, self._woken = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._woken.bind("inproc://wake")
        self._waking.connect("inproc://wake")
        self._thread = threading.Thread(target=self._run, name=f"{self.name}-io", daemon=True)
        self._thread.start()

    # any thread

    def counters(self) -> dict[str, int]:
        """What was refused since the start, by what was wrong with it."""
        stats = PullerStats() if self._puller is None else self._puller.stats
        refused = {"malformed": stats.malformed, "refused_groups": stats.refused, "rejected_peers": stats.rejected}
        return {**refused, "bad_messages": self.bad_messages}

    def wait_connected(self, timeout_s: float) -> None:
        """Return when the master has welcomed this worker; WaitTimeout naming its address."""
        if not self._connected.wait(timeout_s):
            raise WaitTimeout(
                f"{self.name}: no welcome from the master at {self.master_address} in {timeout_s:g} s ({self._problem})"
            )

    def next_request(self, timeout_s: float) -> Request | None:
        """The next call, in the order the master made them; None after ``timeout_s``.

        StreamError if the endpoint has ended.
        """
        try:
            request = self._requests.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if request is None:
            self._requests.put(None)
            raise self._ended_error("no more requests")
        return request

    def reply(self, request: Request, payload: msgspec.Struct) -> None:
        """Answer ``request``."""
        self._post(_Outgoing(encode_message(payload), request=request.number))

    def reply_error(self, request: Request, exc: BaseException) -> None:
        """Tell the master that handling ``request`` raised ``exc``; its call raises RemoteError."""
        text = "".join(traceback.format_exception(exc))
        self._post(_Outgoing(b"", request=request.number, failure=Failure(type(exc).__name__, str(exc), text)))

    def notify(self, handler: str, payload: msgspec.Struct) -> None:
        """Tell the master something it did not ask for; delivered once, in order with the replies."""
        self._post(_Outgoing(encode_message(payload), handler=handler))

    def close(self, timeout_s: float = 2.0) -> None:
        """Stop, after waiting up to ``timeout_s`` for the master, while it is there, to acknowledge what was sent.

        An I/O thread that does not end (``on_group`` blocks, on a dead disk say) is logged and left to the end of the
        process, with its sockets: whoever closes may be on the way out for another reason, which must be seen.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError(f"{self.name}: close() called from its I/O thread")
        if self._thread.is_alive() and not self._idle.wait(timeout_s):
            log.warning("%s: closing with replies or notices the master has not acknowledged", self.name)
        with self._lock:
            if not self._ended and not self._stopping:
                self._stopping = True
                self._waking.send(b"", zmq.NOBLOCK)
        self._thread.join(IO_THREAD_S)
        if self._thread.is_alive():
            log.error("%s: its I/O thread did not end within %g s; it is left behind", self.name, IO_THREAD_S)
            return
        self._waking.close(linger=0)
        self._context.term()

    def _post(self, outgoing: _Outgoing) -> None:
        with self._lock:
            if self._ended:
                raise self._ended_error("cannot send")
            self._outbox.append(outgoing)
            self._idle.clear()
            if len(self._outbox) == 1:  # with more in it, the I/O thread has been woken and not yet looked
                self._waking.send(b"", zmq.NOBLOCK)

    def _ended_error(self, what: str) -> StreamError:
        cause = f"its I/O thread died: {self._failure!r}" if self._failure else "the endpoint was closed"
        error = StreamError(f"{self.name}: {what}: {cause}")
        error.__cause__ = self._failure
        return error

    # I/O thread

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as exc:
            self._failure = exc
            raise
        finally:
            with self._lock:
                self._ended = True
                self._idle.set()  # nothing will be sent any more: close() need not wait
            self._requests.put(None)
            self._woken.close(linger=0)
            sockets.close_client(self._dealer, self._monitor)
            if self._puller is not None:
                self._puller.close()

    def _loop(self) -> None:
        poller = zmq.Poller()
        for sock in (self._woken, self._monitor, self._dealer):
            poller.register(sock, zmq.POLLIN)
        if self._puller is not None:
            poller.register(self._puller.socket, zmq.POLLIN)
            poller.register(self._puller.monitor, zmq.POLLIN)
        while not self._stopping:
            ready = dict(poller.poll())
            self._check_alive()
            if self._woken in ready:
                for _ in self._receive(self._woken):
                    pass
            if self._monitor in ready:
                for frames in self._receive(self._monitor):
                    self._on_event(sockets.monitor_event(frames))
            if self._dealer in ready:
                for frames in self._receive(self._dealer):
                    self._on_message(frames)
            if self._puller is not None and self._puller.socket in ready:
                self._puller.drain(self._store)
            if self._puller is not None and self._puller.monitor in ready:
                self._puller.count_rejected()
            self._send_outbox()

    @staticmethod
    def _receive(sock: sockets.ZSocket, budget: int = 64) -> list[list[zmq.Frame]]:
        """What waits on ``sock``, but at most ``budget`` messages."""
        messages: list[list[zmq.Frame]] = []
        while len(messages) < budget:
            try:
                messages.append(sock.recv_multipart(zmq.NOBLOCK, copy=False))
            except zmq.Again:
                break
        return messages

    def _store(self, group: Group) -> None:
        assert self._on_group is not None
        announcement = self._on_group(group)
        if announcement is not None:
            self.notify(self._group_notice, announcement)

    def _on_event(self, event: zmq.Event) -> None:
        if event == zmq.Event.HANDSHAKE_SUCCEEDED:
            hello = Hello(self.index, self.incarnation, self._last_request)
            self._send([encode_message(hello)])
            return
        was_up = self._welcomed
        self._welcomed = False
        problem = sockets.describe_loss(event, was_up=was_up)
        if was_up or problem != self._problem:
            log.warning("%s: master at %s: %s", self.name, self.master_address, problem)
        self._problem = problem
        if not was_up:
            self._idle.set()  # nobody is there who could acknowledge: close() need not wait

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        try:
            header = decode_with(protocol.TO_WORKER, frames[0], "message of the master")
            if isinstance(header, RequestHeader) and len(frames) != 2:
                raise DecodeError(f"request {header.number} for handler {header.handler} has {len(frames)} frames")
        except DecodeError as err:
            self.bad_messages += 1
            if sockets.worth_logging(self.bad_messages):
                master = f"the master at {self.master_address}"
                log.warning("%s: dropped message %d of %s: %s", self.name, self.bad_messages, master, err)
            return
        match header:
            case RequestHeader(number, handler):
                if not self._welcomed:
                    return  # of a connection that is gone: it comes again after the welcome, in its order
                fault = failpoint("request.receive")
                if fault == "drop":
                    self._reconnect()
                    return
                payload: Buffer = b"\xc1" if fault == "garbage" else frames[1]
                for _ in range(1 + (fault == "duplicate")):
                    if number > self._last_request:  # else resent, and here already
                        self._last_request = number
                        self._requests.put(Request(number, handler, payload))
            case Ack(number):
                self._forget_up_to(number)
            case Welcome(last_message):
                self._welcomed = True
                self._connected.set()
                self._forget_up_to(last_message)
                if self._unacked:
                    self._idle.clear()
                for unacked in self._unacked.values():
                    self._send(unacked)
            case Refused(reason):
                raise Fenced(f"{self.name}: the master refused incarnation {self.incarnation}: {reason}")

    def _send_outbox(self) -> None:
        with self._lock:
            outbox, self._outbox = self._outbox, deque()
        for outgoing in outbox:
            frames = outgoing.frames(self._next_number)
            self._unacked[self._next_number] = frames
            self._next_number += 1
            if self._welcomed:  # else it goes out with the welcome
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
        self._check_alive()
        self._dealer.send_multipart(frames, zmq.NOBLOCK)

    def _reconnect(self) -> None:
        """As if the connection had been cut: what is on its way is lost with it."""
        self._welcomed = False
        self._dealer.disconnect(self.master_address)
        self._dealer.connect(self.master_address)

    def _forget_up_to(self, number: int) -> None:
        while self._unacked and (first := next(iter(self._unacked))) <= number:
            del self._unacked[first]
        with self._lock:
            if not self._unacked and not self._outbox:
                self._idle.set()
