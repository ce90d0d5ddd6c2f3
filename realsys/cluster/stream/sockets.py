"""All sockets, with the same limits, heartbeats and security; readers and client sessions on them."""

from __future__ import annotations

import asyncio
import functools
import logging
import operator
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.auth.thread
from zmq.utils.monitor import parse_monitor_message

from realsys.cluster.network import advertised_host, bind_first, is_loopback, join_host_port, own_ports
from realsys.cluster.stream.codec import COPY_LIMIT
from realsys.cluster.stream.security import CurveKeys
from realsys.errors import RealsysError, StreamError

log = logging.getLogger(__name__)

ZContext = zmq.Context[zmq.Socket[bytes]]
ZSocket = zmq.Socket[bytes]

#: libzmq disconnects a peer that announces a larger frame before it allocates memory for it
MAX_FRAME_BYTES = 1 << 30
#: TCP does not notice a dead host or a cut cable; a peer silent for the timeout counts as disconnected
HEARTBEAT_MS = 5_000
HEARTBEAT_TIMEOUT_MS = 20_000

#: flags of a frame that others of its message follow, and of the last one
_MORE, _LAST = int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.NOBLOCK)

#: the path of a Unix socket has at most 107 bytes, and 40 are for the names of folder and socket
_LONGEST_PLACE = 60
_FILE = "ipc://"  # scheme of the address of a Unix socket

CONNECTION_EVENTS = (
    zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.DISCONNECTED
    | zmq.Event.CLOSED
    | zmq.Event.CONNECT_RETRIED
    | zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
)
#: event of a refused handshake -> the peer's fault, as far as libzmq reports it
REJECTED_EVENTS = {
    zmq.Event.HANDSHAKE_FAILED_AUTH: "its key is not the trial's",
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "it ended the handshake early",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "it has no key, has the key of another server, or speaks another protocol",
}


@dataclass(slots=True)
class ServerSocket:
    """A bound ROUTER with its own context. ``address`` may be registered: the socket is bound.

    ``monitor`` reports peers that were not let in, and ``rejected`` counts them. The owner must hand
    each message of the monitor to ``reject``: libzmq waits for unread ones when the context ends.
    """

    context: ZContext
    socket: ZSocket
    monitor: ZSocket
    address: str
    authenticator: zmq.auth.thread.ThreadAuthenticator | None
    rejected: int = 0

    def reject(self, frames: Sequence[zmq.Frame]) -> None:
        """Count and log one message of the monitor."""
        self.rejected += 1
        if worth_logging(self.rejected):  # a peer without the key tries again and again
            log.warning("%s: rejected peer %d: %s", self.address, self.rejected, REJECTED_EVENTS[monitor_event(frames)])

    def close(self) -> None:
        """Close the sockets and the context; a last acknowledgement has one second to leave."""
        if self.address.startswith(_FILE):
            Path(self.address.removeprefix(_FILE)).unlink(missing_ok=True)
        # The monitor first: it is a socket of the same context, and term() waits for every one.
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=1000)
        # After the sockets, before term(): the authenticator's thread has a socket of this context.
        if self.authenticator is not None:
            self.authenticator.stop()
        self.context.term()


def bind_server(host: str, keys: CurveKeys | None, *, receive_limit: int = 0) -> ServerSocket:
    """Bind a ROUTER: with keys on ``host`` at a free port, without keys as a Unix socket that only this user reaches.

    At most ``receive_limit`` messages of a peer wait in memory (0: no limit). Raises StreamError if
    the address cannot be bound, or if ``host`` is not loopback and there are no keys.
    """
    # Without keys anyone who reaches the port could push groups or pose as a worker.
    if keys is None and not is_loopback(host):
        raise StreamError(f"socket on host={host}: beyond loopback it needs keys: pass keys=ensure_keys(directory)")
    # One context per server, so that close() ends these sockets and waits for no others.
    context: ZContext = zmq.Context()
    # Before the bind: a handshake before the authenticator runs would not be checked.
    authenticator = keys.start_authenticator(context) if keys is not None else None
    router = context.socket(zmq.ROUTER)
    _limit(router)
    router.rcvhwm = receive_limit
    # Otherwise a ROUTER silently drops messages to an unknown route. Now the send raises EHOSTUNREACH.
    router.router_mandatory = True
    if keys is not None:
        keys.secure_server(router)
    rejections = REJECTED_EVENTS.keys()
    monitor = router.get_monitor_socket(int(functools.reduce(operator.or_, rejections)))
    try:
        address = _bind_port(router, host) if keys is not None else _bind_file(router)
    except RealsysError as err:
        router.disable_monitor()
        monitor.close(linger=0)
        router.close(linger=0)
        if authenticator is not None:
            authenticator.stop()
        context.term()
        raise StreamError(f"socket on host={host}: {err}") from err
    return ServerSocket(context, router, monitor, address, authenticator)


def _bind_port(router: ZSocket, host: str) -> str:
    router.ipv6 = ":" in host
    bind_first(own_ports(), lambda port: _bind(router, f"tcp://{join_host_port(host, port)}"), host)
    endpoint = bytes(router.getsockopt(zmq.LAST_ENDPOINT))  # type: ignore[arg-type]
    port = int(endpoint.rstrip(b"\0").decode().rsplit(":", 1)[1])
    return f"tcp://{join_host_port(advertised_host(host), port)}"


def _bind_file(router: ZSocket) -> str:
    # The process number is for people, who find here what a killed process leaves.
    address = f"{_FILE}{private_folder()}/{os.getpid()}-{secrets.token_hex(4)}"
    try:
        _bind(router, address)
    except OSError as err:
        raise StreamError(f"cannot bind {address}: {err.strerror}: let TMPDIR name a local disk with room") from err
    return address


def _bind(router: ZSocket, address: str) -> None:
    try:
        router.bind(address)
    except zmq.ZMQError as err:
        raise OSError(err.errno, err.strerror) from err


def private_folder() -> Path:
    """Return this user's folder for the sockets of one machine, mode 0700; make it if it is missing.

    Any local user can connect to a port on loopback, and only this one to a socket in this folder. Raises StreamError.
    """
    place = tempfile.gettempdir()
    if len(place.encode()) > _LONGEST_PLACE:
        place = "/tmp"
    folder = socket_folder(Path(place))
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()  # the link of another user would be followed by stat()
    except OSError as err:
        raise StreamError(f"{folder}: {err.strerror}: let TMPDIR name a local disk that can be written") from err
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o077:
        raise StreamError(f"{folder} must be a folder of this user with mode 0700: remove it, or set TMPDIR")
    return folder


def socket_folder(place: Path) -> Path:
    """Return the folder of this user's sockets in ``place``, a folder for temporary files."""
    return place / f"realsys-{os.getuid()}"


def connect_client(context: ZContext, address: str, keys: CurveKeys | None) -> tuple[ZSocket, ZSocket]:
    """Return a DEALER that connects to ``address`` in the background, and its connection monitor."""
    dealer = context.socket(zmq.DEALER)
    _limit(dealer)
    dealer.rcvhwm = 0  # an acknowledgement that libzmq held back would stall the sender
    dealer.reconnect_ivl = 50
    dealer.reconnect_ivl_max = 2_000
    dealer.ipv6 = "[" in address
    if keys is not None:
        keys.secure_client(dealer)
    # Before connect(), or the monitor could miss the first handshake, and no Hello would be sent.
    monitor = dealer.get_monitor_socket(int(CONNECTION_EVENTS))
    try:
        dealer.connect(address)
    except zmq.ZMQError as err:
        close_client(dealer, monitor)
        raise StreamError(f"cannot connect to address={address!r}: {err.strerror}") from err
    return dealer, monitor


def answers(address: str, keys: CurveKeys | None, timeout_s: float) -> bool:
    """Return True if a server with these keys completes a handshake at ``address`` within ``timeout_s``."""
    context: ZContext = zmq.Context()
    dealer, monitor = connect_client(context, address, keys)
    try:
        if not monitor.poll(int(timeout_s * 1000)):
            return False
        return monitor_event(monitor.recv_multipart(copy=False)) == zmq.Event.HANDSHAKE_SUCCEEDED
    finally:
        close_client(dealer, monitor)
        context.term()


def close_client(dealer: ZSocket, monitor: ZSocket) -> None:
    """Close both sockets. Queued messages are lost; callers keep them until they are acknowledged."""
    dealer.disable_monitor()
    monitor.close(linger=0)
    dealer.close(linger=0)


def monitor_event(frames: Sequence[zmq.Frame]) -> zmq.Event:
    """Return the event of one message of a monitor socket."""
    return zmq.Event(parse_monitor_message([f.bytes for f in frames])["event"])


def send_frames(sock: ZSocket, frames: Sequence[bytes | memoryview]) -> None:
    """Queue one message; never blocks, because no socket has a high-water mark for sending.

    Raises zmq.ZMQError. A third of the time of ``send_multipart``, which checks all frames and combines flags
    as enums: the master sends a message to each of 512 workers.
    """
    for frame in frames[:-1]:
        sock.send(frame, _MORE, copy=False)
    sock.send(frames[-1], _LAST, copy=False)


def receive_frames(sock: ZSocket) -> list[zmq.Frame]:
    """Return the next message. Raises zmq.Again if none waits. Half of the time of ``recv_multipart``."""
    frames = [sock.recv(_LAST, copy=False)]
    while frames[-1].more:
        frames.append(sock.recv(_LAST, copy=False))
    return frames


def sender_of(frames: Sequence[zmq.Frame]) -> str:
    """Describe the sender of these frames for a log line: network address and routing id."""
    route = frames[0]
    try:
        peer = route.get("Peer-Address")
    except zmq.ZMQError:
        peer = "unknown address"
    return f"{peer} (route {route.bytes.hex()})"


def describe_loss(event: zmq.Event, *, was_up: bool) -> str:
    """Describe for a log line why a client has no connection, from its monitor's ``event``."""
    if event in REJECTED_EVENTS:
        return "the peer rejected the handshake; do both sides use the same keys?"
    if was_up:
        return "connection lost"
    # A server that rejects a key only closes the connection, so this is how wrong keys usually look.
    if event == zmq.Event.DISCONNECTED:
        return "closed during the handshake; do both sides use the same keys?"
    return "connection refused"


def worth_logging(count: int) -> bool:
    """Return True if the ``count``-th event of a kind gets a line: the first ten, then powers of two."""
    return count <= 10 or count & (count - 1) == 0


def _limit(sock: ZSocket) -> None:
    sock.linger = 0  # everything unacknowledged is kept above the socket, so nothing needs to linger
    # No limit: a full socket would block or drop. The protocols above bound the messages in flight.
    sock.sndhwm = 0
    sock.copy_threshold = COPY_LIMIT
    sock.maxmsgsize = MAX_FRAME_BYTES
    sock.heartbeat_ivl = HEARTBEAT_MS
    sock.heartbeat_timeout = HEARTBEAT_TIMEOUT_MS


class LoopReader:
    """Reader that hands each message of a plain ZMQ socket to a callback on the event loop.

    It replaces ``zmq.asyncio``, which makes a future and a timer per message. ZMQ's descriptor is
    edge-triggered and sending may swallow the edge, so the owner must call ``nudge`` after each send.
    An exception of ``on_message`` ends the reading and goes to ``on_error``.
    """

    BUDGET = 64  # messages per turn of the event loop, so that other tasks can run

    def __init__(
        self,
        sock: ZSocket,
        on_message: Callable[[list[zmq.Frame]], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._socket = sock
        self._on_message = on_message
        self._on_error = on_error
        self._loop = asyncio.get_running_loop()
        self._descriptor: int = sock.getsockopt(zmq.FD)  # type: ignore[assignment]
        self._scheduled = False
        self._closed = False
        self._loop.add_reader(self._descriptor, self._drain)
        self._schedule()  # messages that arrived before add_reader have used up their edge

    def nudge(self) -> None:
        """Read again if messages wait; call it after each send on the socket."""
        if not self._scheduled and not self._closed and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._schedule()

    def close(self) -> None:
        """Stop reading; call it before the socket is closed."""
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
                frames = receive_frames(self._socket)
            except zmq.Again:
                return
            try:
                self._on_message(frames)
            except Exception as exc:  # a boundary: the event loop would only log it, and callers wait on
                self.close()
                self._on_error(exc)
        # The budget is used up and the edge is gone: without a new turn the rest would wait for ever.
        if not self._closed:
            self._schedule()


class ClientSession:
    """One connection to one address, from connecting to its loss. It never reconnects."""

    def __init__(
        self,
        context: ZContext,
        address: str,
        keys: CurveKeys | None,
        on_up: Callable[[ClientSession], None],
        on_message: Callable[[list[zmq.Frame]], None],
    ) -> None:
        self.up = False
        self.problem = "connecting"
        self._on_up = on_up
        loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[bool] = loop.create_future()
        self._lost: asyncio.Future[None] = loop.create_future()  # an exception in it is a defect here
        self._dealer, self._monitor = connect_client(context, address, keys)
        self._reader = LoopReader(self._dealer, on_message, self._on_error)
        self._events = LoopReader(self._monitor, self._on_event, self._on_error)

    async def outlive(self, connect_timeout_s: float) -> bool:
        """Wait for the loss of the connection.

        Returns True when it is lost, False if it did not open within ``connect_timeout_s``.
        """
        try:
            # Not wait_for: in Python 3.11 it loses a cancellation that arrives as the connection
            # opens, and a pusher that is closed right after its first push would wait for ever.
            async with asyncio.timeout(connect_timeout_s):
                opened = await self._opened
        except TimeoutError:
            self.problem = f"no connection within {connect_timeout_s:g} s"
            return False
        await self._lost  # done already if the connection did not open
        return opened

    def send(self, frames: list[bytes | memoryview]) -> None:
        """Queue one message; never blocks."""
        send_frames(self._dealer, frames)
        self._reader.nudge()  # sending may swallow the edge that announces an acknowledgement

    def lose(self) -> None:
        """End the session as if the connection had been cut."""
        self.up = False
        self.problem = "connection lost"
        if not self._lost.done():
            self._lost.set_result(None)

    def close(self) -> None:
        """Close the  The readers go first: a closed socket has no descriptor to watch."""
        self.up = False
        self._reader.close()
        self._events.close()
        close_client(self._dealer, self._monitor)

    def _on_error(self, exc: BaseException) -> None:
        # Both futures, so that ``outlive`` raises the error in whichever of its two waits it is.
        if not self._opened.done():
            self._opened.set_result(False)
        if not self._lost.done():
            self._lost.set_exception(exc)

    def _on_event(self, frames: list[zmq.Frame]) -> None:
        event = monitor_event(frames)
        if self._lost.done():
            # libzmq reconnects on its own until this session is closed. To use that connection would
            # send to an address that may belong to another process by now.
            return
        if event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self.up = True
            self.problem = ""
            if not self._opened.done():
                self._opened.set_result(True)
            self._on_up(self)
            return
        # The first event names the cause; those that follow it only repeat that there is no connection.
        if not self.problem or self.problem == "connecting":
            self.problem = describe_loss(event, was_up=self.up)
        self.up = False
        if not self._opened.done():
            self._opened.set_result(False)
        if not self._lost.done():
            self._lost.set_result(None)
