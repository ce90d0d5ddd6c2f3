"""What stands in front of every HTTP service of a trial, so that no route can be forgotten.

    connection ──> head of at most MAX_HEAD bytes ──> token ──> body of at most max_body ──> lease ──> app
    answer     <────────────────────────────────────────────────────────────────── lease <─────────────┘

The token is asked for before a byte of the body is kept. Whatever is not a GET changes state and needs it. A process
that has lost its lease neither accepts a request nor gives the answer to one that it accepted before.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from realsys.cluster.fence import CheckAlive, unleased
from realsys.errors import Fenced

log = logging.getLogger(__name__)

MAX_HEAD = 64 << 10  # bytes of request line and headers
SAFE = ("GET", "HEAD", "OPTIONS")


class Refused(Exception):
    """Ends a request with this status and one line."""

    def __init__(self, status: int, message: str) -> None:
        self.status, self.message = status, message
        super().__init__(message)


class Guard:
    """ASGI middleware. ``refused`` counts by cause: token, size."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str | None,
        max_body: int,
        error: Callable[[str], object],
        secret: Collection[str] = (),
        check_alive: CheckAlive = unleased,
    ) -> None:
        """``token``: None lets everybody in (tools and tests on loopback). ``error``: the body that says what is wrong,
        as the service words it. ``secret``: paths that need the token for a GET too.
        """
        self._app, self._max_body, self._error, self._check_alive = app, max_body, error, check_alive
        self._authorization = None if token is None else f"Bearer {token}".encode()
        self._secret = frozenset(secret)
        self.refused: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # no lifespan and no websockets here
            return
        try:
            self._admit(scope)
            body = await self._read(scope, receive)
            if body is None:
                return  # the caller has gone
            await self._alive()
            await self._app(scope, self._replay(body, receive), self._guarded(send))
        except Refused as refused:
            await self._refuse(refused, send)

    def _admit(self, scope: Scope) -> None:
        """The caller has the token, where one is needed. Compared in constant time."""
        if self._authorization is None or (scope["method"] in SAFE and scope["path"] not in self._secret):
            return
        if not hmac.compare_digest(_header(scope, b"authorization"), self._authorization):
            raise self._counted("token", 401, f"{_path(scope)}: needs the trial's token: Authorization: Bearer <token>")

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body; refused as soon as it is known to be too large. None: the caller went away."""
        declared = _header(scope, b"content-length")
        if declared.isdigit() and int(declared[:20]) > self._max_body:
            raise self._too_large(scope)
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            body += message.get("body", b"")
            if len(body) > self._max_body:
                raise self._too_large(scope)
            if not message.get("more_body", False):
                return bytes(body)

    def _too_large(self, scope: Scope) -> Refused:
        return self._counted("size", 413, f"{_path(scope)}: body is over the limit of {self._max_body} bytes")

    async def _alive(self) -> None:
        """Return only with the lease. Without it the process is about to end, and its connections with it: no answer at
        all, not even a refusal.
        """
        try:
            self._check_alive()
        except Fenced as error:
            log.critical("no answer: %s", error)
            await asyncio.Event().wait()

    def _counted(self, cause: str, status: int, message: str) -> Refused:
        self.refused[cause] += 1
        count = self.refused[cause]
        if count <= 10 or count & (count - 1) == 0:  # a flood of them must not fill the log
            log.warning("refused request %d for its %s: %s", count, cause, message)
        return Refused(status, message)

    @staticmethod
    def _replay(body: bytes, receive: Receive) -> Receive:
        """What was read, and then whatever else comes: the end of the connection."""
        pending = [body]

        async def replay() -> Message:
            if pending:
                return {"type": "http.request", "body": pending.pop(), "more_body": False}
            return await receive()

        return replay

    def _guarded(self, send: Send) -> Send:
        """Lets an answer out only while the lease holds."""

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                await self._alive()
            await send(message)

        return guarded

    async def _refuse(self, refused: Refused, send: Send) -> None:
        body = msgspec.json.encode(self._error(refused.message))
        # The connection stays: uvicorn discards what is left of the body, and closing it could cut off this answer.
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": refused.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class BoundedHead(HttpToolsProtocol):
    """uvicorn's HTTP protocol, which takes headers without end, with an end: for ``uvicorn.Config(http=...)``."""

    _head: int | None = None  # bytes since what came with its begin; None: in a body, or between messages

    def data_received(self, data: bytes) -> None:
        began_before = self._head is not None
        super().data_received(data)
        if self._head is None or not began_before:  # what came with the begin may belong to the message before
            return
        self._head += len(data)
        if self._head > MAX_HEAD and not self.transport.is_closing():
            log.warning("refused a request whose head is over %d bytes", MAX_HEAD)
            self.send_400_response(f"the head of the request is over {MAX_HEAD} bytes")

    def on_message_begin(self) -> None:
        self._head = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head = None
        super().on_headers_complete()


def _header(scope: Scope, name: bytes) -> bytes:
    headers: list[tuple[bytes, Any]] = scope["headers"]
    return next((bytes(value) for key, value in headers if key == name), b"")


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path[:200]
