"""Sockets made in one place, so that all have the same limits, heartbeats and security."""

from __future__ import annotations

import asyncio
import functools
import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq
import zmq.auth.thread
from zmq.utils.monitor import parse_monitor_message

from realsys.cluster.network import advertised_host, is_loopback, join_host_port
from realsys.errors import StreamError
from realsys.stream.codec import COPY_LIMIT
from realsys.stream.security import CurveKeys

log = logging.getLogger(__name__)

ZContext = zmq.Context[zmq.Socket[bytes]]
ZSocket = zmq.Socket[bytes]

#: a peer that announces a larger frame is disconnected by libzmq before memory is taken for it
MAX_FRAME_BYTES = 1 << 30
HEARTBEAT_MS = 5_000
HEARTBEAT_TIMEOUT_MS = 20_000  # a peer silent for this long (host gone, cable cut) counts as disconnected

CONNECTION_EVENTS = (
    zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.DISCONNECTED
    | zmq.Event.CLOSED
    | zmq.Event.CONNECT_RETRIED
    | zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
)
#: event of a refused handshake -> what was wrong with the peer, as far as libzmq tells
REJECTED_EVENTS = {
    zmq.Event.HANDSHAKE_FAILED_AUTH: "its key is not the trial's",
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "it broke the handshake off",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "it has no key, has that of another server, or speaks another protocol",
}


@dataclass(slots=True)
class Server:
    """A bound ROUTER with its own context. ``address`` may be registered: the socket is bound.

    ``monitor`` tells of peers that were not let in; its owner hands each message to ``reject``, or libzmq would
    wait for it in the end. ``rejected`` counts them.
    """

    context: ZContext
    socket: ZSocket
    monitor: ZSocket
    address: str
    authenticator: zmq.auth.thread.ThreadAuthenticator | None
    rejected: int = 0

    def reject(self, frames: Sequence[zmq.Frame]) -> None:
        """Count and log what the monitor said."""
        self.rejected += 1
        if worth_logging(self.rejected):
            log.warning("%s: rejected peer %d: %s", self.address, self.rejected, REJECTED_EVENTS[monitor_event(frames)])

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=1000)  # lets a last acknowledgement out; bounded, so that term() returns
        if self.authenticator is not None:
            self.authenticator.stop()
        self.context.term()


def bind_server(host: str, keys: CurveKeys | None, *, receive_limit: int = 0) -> Server:
    """A ROUTER on ``host``, port chosen by the system; at most ``receive_limit`` messages of a peer wait (0: any)."""
    if keys is None and not is_loopback(host):
        raise StreamError(f"socket on host={host}: beyond loopback it needs keys; pass keys=ensure_keys(directory)")
    context: ZContext = zmq.Context()
    authenticator = keys.start_authenticator(context) if keys is not None else None
    router = context.socket(zmq.ROUTER)
    _limit(router)
    router.rcvhwm = receive_limit
    router.router_mandatory = True  # an error instead of silence when the peer is gone
    if keys is not None:
        keys.secure_server(router)
    router.ipv6 = ":" in host
    rejections = REJECTED_EVENTS.keys()
    monitor = router.get_monitor_socket(int(functools.reduce(operator.or_, rejections)))
    try:
        router.bind(f"tcp://{join_host_port(host, 0)}")
    except zmq.ZMQError as err:
        router.disable_monitor()
        monitor.close(linger=0)
        router.close(linger=0)
        if authenticator is not None:
            authenticator.stop()
        context.term()
        raise StreamError(
            f"socket on host={host}: cannot bind: {err.strerror}; is it an address of this host?"
        ) from err
    endpoint = bytes(router.getsockopt(zmq.LAST_ENDPOINT))  # type: ignore[arg-type]
    port = int(endpoint.rstrip(b"\0").decode().rsplit(":", 1)[1])
    return Server(context, router, monitor, f"tcp://{join_host_port(advertised_host(host), port)}", authenticator)


def connect_client(context: ZContext, address: str, keys: CurveKeys | None) -> tuple[ZSocket, ZSocket]:
    """A DEALER that connects to ``address`` in the background, and the monitor that tells of its connection."""
    dealer = context.socket(zmq.DEALER)
    _limit(dealer)
    dealer.rcvhwm = 0
    dealer.reconnect_ivl = 50
    dealer.reconnect_ivl_max = 2_000
    dealer.ipv6 = "[" in address
    if keys is not None:
        keys.secure_client(dealer)
    monitor = dealer.get_monitor_socket(int(CONNECTION_EVENTS))
    try:
        dealer.connect(address)
    except zmq.ZMQError as err:
        close_client(dealer, monitor)
        raise StreamError(f"cannot connect to address={address!r}: {err.strerror}") from err
    return dealer, monitor


def close_client(dealer: ZSocket, monitor: ZSocket) -> None:
    """Close both; what is still queued is thrown away (callers keep what was not acknowledged)."""
    dealer.disable_monitor()
    monitor.close(linger=0)
    dealer.close(linger=0)


def monitor_event(frames: Sequence[zmq.Frame]) -> zmq.Event:
    """The event of one message of a monitor socket."""
    return zmq.Event(parse_monitor_message([f.bytes for f in frames])["event"])


def sender_of(frames: Sequence[zmq.Frame]) -> str:
    """Who sent these frames, for a log line: network address and the socket's routing id."""
    route = frames[0]
    try:
        peer = route.get("Peer-Address")
    except zmq.ZMQError:
        peer = "unknown address"
    return f"{peer} (route {route.bytes.hex()})"


def describe_loss(event: zmq.Event, *, was_up: bool) -> str:
    """What ``event`` of a client's monitor says about its connection."""
    if event in REJECTED_EVENTS:
        return "the peer rejected the handshake; do both sides use the same keys?"
    if was_up:
        return "connection lost"
    if event == zmq.Event.DISCONNECTED:
        return "closed during the handshake; do both sides use the same keys?"
    return "connection refused"


def worth_logging(count: int) -> bool:
    """Whether the ``count``-th event of a kind gets a line: the first ten, then each power of two."""
    return count <= 10 or count & (count - 1) == 0


def _limit(sock: ZSocket) -> None:
    sock.linger = 0
    sock.sndhwm = 0  # what may be in flight is bounded by the protocols above, not by the socket
    sock.copy_threshold = COPY_LIMIT
    sock.maxmsgsize = MAX_FRAME_BYTES
    sock.heartbeat_ivl = HEARTBEAT_MS
    sock.heartbeat_timeout = HEARTBEAT_TIMEOUT_MS


class LoopReader:
    """Hands each message of a plain ZMQ socket to a callback on the event loop.

    A thin stand-in for ``zmq.asyncio``, which makes a future and a timer per message. ZMQ's descriptor is
    edge-triggered and sending may swallow the edge, so whoever sends on the socket calls ``nudge`` afterwards. An
    exception of ``on_message`` ends the reading and goes to ``on_error``.
    """

    BUDGET = 64  # messages per turn of the loop, so that other tasks get theirs

    def __init__(
        self,
        sock: ZSocket,
        on_message: Callable[[list[zmq.Frame]], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._socket, self._on_message, self._on_error = sock, on_message, on_error
        self._loop = asyncio.get_running_loop()
        self._descriptor: int = sock.getsockopt(zmq.FD)  # type: ignore[assignment]
        self._scheduled = False
        self._closed = False
        self._loop.add_reader(self._descriptor, self._drain)
        self._schedule()

    def nudge(self) -> None:
        """Look again: to be called after each send on the socket."""
        if not self._scheduled and not self._closed and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._schedule()

    def close(self) -> None:
        """Stop reading; before the socket is closed."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._descriptor)

    def _schedule(self) -> None:
        self._scheduled = True
        self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._scheduled = False
        for _ in range(self.BUDGET):
            if self._closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                self._on_message(frames)
            except Exception as exc:  # a boundary: the loop would log it and leave everyone waiting
                self.close()
                self._on_error(exc)
        if not self._closed:
            self._schedule()
