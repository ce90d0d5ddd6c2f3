"""Sending of replies, and whether they arrived.

    Exchange.task ──done──> reply, or its rest ──last byte to an open connection──> Capture.sent
         │ stream: text as it is sampled; comments while there is none                 │
         └── the client closed its connection ─────────────────────────────────────────┴──> Capture.broken

A stream begins with its first text. An error before that is a reply with a status, which SDKs understand. If there is
no text for ``KEEP_ALIVE_S``, the stream begins without, and a comment follows every ``KEEP_ALIVE_S``: clients and
proxies close a connection that is silent for too long.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from realsys.rollout.gateway.capture import Capture, Exchange
from realsys.rollout.gateway.problems import Problem, over, problem_of
from realsys.rollout.gateway.wire.base import Dialect, Head, Sent

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 3.0  # clients may give up after 5 s without a byte
COMMENT = b": the engine is at work\n\n"
_LARGE = 64 << 10  # bytes; the end of a longer reply is sent only when the client has taken most of it
_MOST_HEADER = 1000  # characters of the header that lists ignored fields

Headers = Sequence[tuple[bytes, bytes]]
JSON: Headers = ((b"content-type", b"application/json"),)
_SSE: Headers = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))


@dataclass(slots=True)
class Connection:
    """One HTTP request. The names of ``headers`` are in lower case. ``ignored``: names of fields without effect."""

    scope: Scope
    receive: Receive
    send: Send
    headers: Mapping[str, str]
    route: str
    ignored: Sequence[str] = ()

    def is_open(self) -> bool:
        """Return False if the client has closed the connection, as far as this machine knows."""
        check = self.scope.get("realsys.is_open")
        return check is None or check()

    async def refuse(self, error: Callable[[int, str, str, str], bytes], problem: Problem) -> None:
        """Send an error reply."""
        body = error(problem.status, problem.message, problem.field, problem.code)
        await send_body(self.send, problem.status, body, [*self.facts(), *JSON, *problem.headers()])

    def facts(self, head: Head | None = None) -> list[tuple[bytes, bytes]]:
        """Return the headers about the call; ``head``: of its reply."""
        headers = [] if head is None else [(b"x-request-id", head.id.encode())]
        if self.ignored:
            # The names are the client's, so only printable characters go into a header.
            names = ", ".join(self.ignored)[:_MOST_HEADER]
            text = "".join(character if " " <= character <= "~" else "?" for character in names)
            headers.append((b"x-realsys-ignored", text.encode()))
        return headers


async def deliver(capture: Capture, dialect: Dialect, exchange: Exchange, connection: Connection) -> None:
    """Wait for the completion, send the reply, and notify ``capture`` whether the client has it."""
    connection.ignored = exchange.call.ignored
    left = asyncio.ensure_future(connection.receive())
    sent = [Sent() for _ in range(exchange.call.n)]
    delivered = failed = False
    try:
        begun = await _wait(dialect, exchange, connection, left, sent)
        if not exchange.task.done():
            return
        failed = exchange.task.cancelled() or exchange.task.exception() is not None
        if failed:
            await _fail(capture, dialect, exchange, connection, begun)
        else:
            delivered = await _send_reply(dialect, exchange, connection, begun, sent)
    finally:
        left.cancel()
        if delivered:
            capture.sent(exchange)
        elif not failed:
            capture.broken(exchange)


async def _wait(
    dialect: Dialect, exchange: Exchange, connection: Connection, left: asyncio.Future[Any], sent: list[Sent]
) -> bool:
    """Send a stream's text until the call or the connection has ended. Return True if a stream has begun."""
    loop, begun = asyncio.get_running_loop(), False
    last = loop.time()  # when the last byte was sent
    while not (exchange.task.done() or left.done()):
        # Before the text is read: text that arrives while it is sent must not wait for the text after it.
        news, body = exchange.news, _parts(dialect, exchange, sent)
        if not body and exchange.call.stream and loop.time() >= last + KEEP_ALIVE_S:
            body = COMMENT
        if body:
            if not begun:
                await _send_head(connection.send, 200, [*_SSE, *connection.facts(exchange.head)])
                body = dialect.opening(exchange.call, exchange.head) + body
            await _send_part(connection.send, body)
            begun, last = True, loop.time()
        limit = max(0.0, last + KEEP_ALIVE_S - loop.time()) if exchange.call.stream else None
        await asyncio.wait((exchange.task, left, news), timeout=limit, return_when=asyncio.FIRST_COMPLETED)
    return begun


def _parts(dialect: Dialect, exchange: Exchange, sent: list[Sent]) -> bytes:
    """Return the events of the text that ``sent`` lacks."""
    parts = []
    for index, choice in enumerate(exchange.streamed):
        reasoning, text = choice.reasoning[len(sent[index].reasoning) :], choice.text[len(sent[index].text) :]
        if reasoning or text:
            parts.append(dialect.part(exchange.call, exchange.head, index, sent[index], reasoning, text))
    return b"".join(parts)


async def _send_reply(
    dialect: Dialect, exchange: Exchange, connection: Connection, begun: bool, sent: list[Sent]
) -> bool:
    """Send a reply. Return True if the connection was open when its last byte was sent."""
    call, reply = exchange.call, exchange.task.result()
    if not call.stream:
        body = dialect.reply(call, reply)
    elif all(one.begins(choice) for one, choice in zip(sent, reply.choices, strict=True)):
        body = b"".join((b"" if begun else dialect.opening(call, exchange.head), *dialect.events(call, reply, sent)))
    else:
        log.error("stream %s has sent text that is not in its completion", exchange.head.id)
        body = dialect.error_event(500, "the text that was sent is not that of the completion")
        await connection.send({"type": "http.response.body", "body": body})
        return False
    if not connection.is_open():
        return False
    if not begun:
        length = [] if call.stream else [(b"content-length", str(len(body)).encode())]
        await _send_head(
            connection.send, 200, [*(_SSE if call.stream else JSON), *connection.facts(exchange.head), *length]
        )
    if len(body) > _LARGE:
        await _send_part(connection.send, body)
        await _send_part(connection.send, b"")  # returns when most of the body has left this machine
        body = b""
    # No other coroutine runs between this check and the writing of the last byte.
    delivered = connection.is_open()
    await connection.send({"type": "http.response.body", "body": body})
    return delivered


async def _fail(capture: Capture, dialect: Dialect, exchange: Exchange, connection: Connection, begun: bool) -> None:
    error = None if exchange.task.cancelled() else exchange.task.exception()
    problem = over(capture.closed) if error is None else problem_of(error)
    if not begun:
        await connection.refuse(dialect.error, problem)
        return
    await connection.send({"type": "http.response.body", "body": dialect.error_event(problem.status, problem.message)})


async def send_body(send: Send, status: int, body: bytes, headers: Headers) -> None:
    """Send a whole reply."""
    await _send_head(send, status, [*headers, (b"content-length", str(len(body)).encode())])
    await send({"type": "http.response.body", "body": body})


async def _send_head(send: Send, status: int, headers: Headers) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
