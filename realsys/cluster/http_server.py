"""HTTP services of a trial: uvicorn, on the caller's event loop or in its own thread, with a guard in front.

bind (``url`` is right from then on) ──> serve ──> stop: replies that are due are finished, within a bound
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import resource
import select
import socket
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import msgspec
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from realsys.cluster.http_client import signed_digest
from realsys.cluster.lease import CheckAlive, unleased
from realsys.cluster.network import advertised_host, bind_tcp, join_host_port, port_of
from realsys.errors import Fenced, WaitTimeout

log = logging.getLogger(__name__)

_FINISH_S = 3  # time for the replies that are due
_KEEP_ALIVE_S = 75  # longer than any client's, so that no request meets a connection that closes


class HttpServer:
    """One service. Either ``serve`` on a running event loop, or ``start`` and ``close`` for a thread."""

    def __init__(self, app: ASGIApp, host: str = "127.0.0.1", port: int = 0) -> None:
        """Bind ``host:port``; port 0 is any free one. Raises RealsysError if it is taken."""
        self._socket = bind_tcp(host, port)
        self.url = f"http://{join_host_port(advertised_host(host), port_of(self._socket))}"
        config = uvicorn.Config(
            app,
            loop="uvloop",
            http=BoundedRequest,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=_FINISH_S,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        self._server = _Server(config)
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def listen(self) -> None:
        """Queue connections from now on, so that a client may connect before ``serve`` has begun."""
        self._socket.listen()

    async def serve(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Serve on the running event loop until ``stop``. Calls ``on_ready`` once requests are accepted.

        Raises RuntimeError if uvicorn ends without ``stop``.
        """
        self._server.on_ready = on_ready
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self._socket.close()
        self._check_end()

    def stop(self) -> None:
        """Accept no more requests; end after the replies that are due."""
        self._server.should_exit = True

    def start(self, timeout_s: float = 30.0) -> None:
        """Serve in a thread. Returns when requests are accepted. Raises WaitTimeout if that takes too long."""
        ready = threading.Event()
        self._server.on_ready = ready.set
        self._thread.start()
        if not ready.wait(timeout_s):
            raise WaitTimeout(f"the HTTP server at {self.url} did not start within {timeout_s:g} s")

    def close(self, timeout_s: float = 8.0) -> None:
        """Stop, and wait for the thread. Raises WaitTimeout if that takes too long."""
        self.stop()
        self._thread.join(timeout_s)
        self._socket.close()
        if self._thread.is_alive():
            raise WaitTimeout(f"the HTTP server at {self.url} did not stop within {timeout_s:g} s")

    def _run(self) -> None:
        self._server.run(sockets=[self._socket])
        self._check_end()

    def _check_end(self) -> None:
        if not self._server.should_exit:
            raise RuntimeError(f"the HTTP server at {self.url} ended although it was not stopped")


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.on_ready: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no handlers: the worker has its own."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_ready()


# ---- guard: the checks in front of every HTTP service of a trial, so that no route can lack them
#
#     connection ──> head of at most MAX_HEAD bytes ──> token ──> body of at most max_body ──> lease ──> app
#                └────────── within REQUEST_S ───────────────────────────────┘
#     answer     <────────────────────────────────────────────────────────────────── lease <─────────────┘
#
# The token, or a signature made with it, is checked before a byte of the body is kept. Every request but GET changes
# state and needs one of them; a GET has no body. A signature names the digest of the body, which is checked at its
# end. A process that has lost its lease neither accepts a request nor answers one that it accepted before.


MAX_HEAD = 64 << 10  # bytes of request line and headers
REQUEST_S = 60.0  # bound on the time from the beginning of a connection or request to the end of its body
SAFE = ("GET", "HEAD", "OPTIONS")


def most_connections() -> int:
    """Return the bound on the open connections of a server."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2


class RefusedRequest(Exception):
    """Ends a request with this status and one line. ``retry_after_s``: whole seconds; 0: the reply does not say."""

    def __init__(self, status: int, message: str, *, retry_after_s: int = 0) -> None:
        self.status = status
        self.message = message
        self.retry_after_s = retry_after_s
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Admission:
    """Callers that a service admits, and when it answers.

    token        None admits every caller (tools and tests on loopback)
    secret       paths that need the token for a GET too
    check_alive  raises Fenced when this process has lost its lease
    """

    token: str | None
    secret: Collection[str] = ()
    check_alive: CheckAlive = unleased


class Guard:
    """ASGI middleware. ``refused`` counts by cause: token, size."""

    def __init__(
        self,
        app: ASGIApp,
        admission: Admission,
        *,
        max_body: int,
        error: Callable[[str], object],
        room: Callable[[int], AbstractContextManager[None]] = lambda size: contextlib.nullcontext(),
    ) -> None:
        """``error`` makes the body of a refusal from its message, in the form of the service. ``room`` is entered with
        the declared size of a body before it is read, and left after the answer; it may raise Refused.
        """
        self._app = app
        self._max_body = max_body
        self._error = error
        self._check_alive = admission.check_alive
        self._room = room
        self._token = admission.token
        self._secret = frozenset(admission.secret)
        self.refused: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # no lifespan and no websockets here
            return
        try:
            digest = self._admit(scope)
            with self._room(declared(scope)):
                body = await self._read(scope, receive, digest)
                if body is None:
                    return  # the caller closed the connection
                await self._alive()
                await self._app(scope, self._replay(body, receive), self._guarded(send))
        except RefusedRequest as refused:
            body = msgspec.json.encode(self._error(refused.message))
            # The connection stays open: uvicorn discards the rest of the body, and closing could cut off this answer.
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            if refused.retry_after_s:
                headers.append((b"retry-after", str(refused.retry_after_s).encode()))
            await send({"type": "http.response.start", "status": refused.status, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    def _admit(self, scope: Scope) -> bytes:
        """Refuse a caller without the token if one is needed. The comparison takes constant time.

        Returns the digest that the body must have, b"" if the caller named none.
        """
        if self._token is None or (scope["method"] in SAFE and scope["path"] not in self._secret):
            return b""
        given = _header(scope, b"authorization")
        if hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            return b""
        if digest := signed_digest(self._token, scope, _header(scope, b"host"), given):
            return digest
        raise self._unknown(scope)

    def _unknown(self, scope: Scope) -> RefusedRequest:
        return self._counted("token", 401, f"{_path(scope)}: needs the trial's token: Authorization: Bearer <token>")

    async def _read(self, scope: Scope, receive: Receive, digest: bytes) -> bytes | None:
        """Return the whole body, or None if the caller closed the connection.

        A body is refused as soon as it is known to be too large, and if it is not the one that was signed.
        """
        limit = 0 if scope["method"] in SAFE else self._max_body
        if declared(scope) > limit:
            raise self._too_large(scope, limit)
        body, seen = bytearray(), hashlib.sha256()
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            body += message.get("body", b"")
            if digest:  # piece by piece: a large body must not hold the event loop
                seen.update(message.get("body", b""))
            if len(body) > limit:
                raise self._too_large(scope, limit)
            if not message.get("more_body", False):
                if digest and digest != seen.hexdigest().encode():
                    raise self._unknown(scope)
                return bytes(body)

    def _too_large(self, scope: Scope, limit: int) -> RefusedRequest:
        return self._counted("size", 413, f"{_path(scope)}: body is over the limit of {limit} bytes")

    async def _alive(self) -> None:
        """Return only with the lease. Without it the process ends soon, so there is no answer, not even a refusal."""
        try:
            self._check_alive()
        except Fenced as error:
            log.critical("no answer: %s", error)
            await asyncio.Event().wait()

    def _counted(self, cause: str, status: int, message: str) -> RefusedRequest:
        self.refused[cause] += 1
        count = self.refused[cause]
        if count <= 10 or count & (count - 1) == 0:  # a flood of refusals must not fill the log
            log.warning("refused request %d for its %s: %s", count, cause, message)
        return RefusedRequest(status, message)

    @staticmethod
    def _replay(body: bytes, receive: Receive) -> Receive:
        """Return a ``receive`` that gives the body that was read, and later the end of the connection."""
        pending = [body]

        async def replay() -> Message:
            if pending:
                return {"type": "http.request", "body": pending.pop(), "more_body": False}
            return await receive()

        return replay

    def _guarded(self, send: Send) -> Send:
        """Return a ``send`` that sends each part of an answer only with the lease."""

        async def guarded(message: Message) -> None:
            await self._alive()
            await send(message)

        return guarded


class BoundedRequest(HttpToolsProtocol):
    """uvicorn's HTTP protocol with bounds on the size of the headers, on the wait for them, and on the connections that
    wait; uvicorn has none. Connections may have half of the descriptors of the process, so that there is always one for
    its lease: beyond that, the connection that has waited longest for its request is closed.
    """

    _head: int | None = None  # bytes of the head so far; None: in a body, or between messages
    _deadline: asyncio.TimerHandle | None = None  # deadline of the request that is being received

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_wait()
        if len(self.connections) > most_connections():
            longest = next(iter(self._waiting))
            longest._end_wait()
            longest.transport.close()
            if not self.server_state.__dict__.setdefault("was_full", False):
                self.server_state.__dict__["was_full"] = True
                log.warning("over %d connections: those that wait longest for a request are closed", most_connections())

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_wait()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        began_before = self._head is not None
        super().data_received(data)
        if self._deadline is None and (self.cycle is None or self.cycle.response_complete):
            self._begin_wait()  # the data begins no request, but it ended uvicorn's own wait for one
        if self._head is None or not began_before:  # the first data of a head may belong to the message before
            return
        self._head += len(data)
        if self._head > MAX_HEAD and not self.transport.is_closing():
            log.warning("refused a request whose head is over %d bytes", MAX_HEAD)
            self.send_400_response(f"the head of the request is over {MAX_HEAD} bytes")

    def on_message_begin(self) -> None:
        self._head = 0
        self._begin_wait()
        super().on_message_begin()
        self.scope["realsys.is_open"] = self._is_open  # type: ignore[typeddict-unknown-key]

    def on_headers_complete(self) -> None:
        self._head = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._end_wait()
        super().on_message_complete()

    def _is_open(self) -> bool:
        """Return False if the client has closed its end, also if the event loop has not noticed it yet."""
        if self.transport.is_closing():
            return False
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
        return not poll.poll(0)

    @property
    def _waiting(self) -> dict[BoundedRequest, None]:
        """The connections of this server that wait for a request, the longest first."""
        waiting: dict[BoundedRequest, None] = self.server_state.__dict__.setdefault("waiting", {})
        return waiting

    def _begin_wait(self) -> None:
        self._end_wait()
        self._deadline = self.loop.call_later(REQUEST_S, self._give_up)
        self._waiting[self] = None

    def _end_wait(self) -> None:
        self._waiting.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        """Close the connection: without this bound, callers without a token could keep connections open for ever."""
        if self.cycle is not None and not (self.cycle.response_complete or self.cycle.more_body):
            self._begin_wait()  # the request before this one is being answered, which delays this one
        elif not self.transport.is_closing():
            log.info("closed a connection of %s: no whole request within %g s", self.client, REQUEST_S)
            self.transport.close()


def _header(scope: Scope, name: bytes) -> bytes:
    headers: list[tuple[bytes, Any]] = scope["headers"]
    return next((bytes(value) for key, value in headers if key == name), b"")


def declared(scope: Scope) -> int:
    """Return the size of the body that the request declares, 0 if it does not."""
    declared = _header(scope, b"content-length")
    return int(declared[:20]) if declared.isdigit() else 0


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path[:200]
