"""HTTP surface of the gateway, as plain ASGI: a framework would cost as much as all the rest of a call.

    /e/KEY/v1/chat/completions ──key──> Guard (size of the body, lease) ──> Handler ──> Capture ──> JSON or SSE

The key may also be a Bearer token or x-api-key; then the path begins with /v1. SDKs append different paths to a
base_url, so /v1 may be missing, or occur twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import msgspec
from starlette.types import Receive, Scope, Send

from realsys.cluster.http_server import Admission, Guard
from realsys.cluster.lease import CheckAlive, unleased
from realsys.rollout.gateway.capture import Capture, Exchange
from realsys.rollout.gateway.chat import ChatDialect
from realsys.rollout.gateway.completions import CompletionsDialect
from realsys.rollout.gateway.dialect import BadRequest, Dialect, ReplyHead, Sent
from realsys.rollout.gateway.generate import GenerateDialect
from realsys.rollout.gateway.messages import MessagesDialect
from realsys.rollout.gateway.replies import HttpProblem, over, problem_of
from realsys.rollout.gateway.responses import ResponsesDialect
from realsys.rollout.gateway.tokenize import TokenizeDialect, model, models

MAX_BODY = 32 << 20
REFUSED_S = 0.02  # a refused request is answered after this time, one after the other in an episode
_CREATED = 0  # creation time of the model in OpenAI's list of models

Find = Callable[[str], Capture | str | None]
Errors = Callable[[int, str, str, str], bytes]
_CHAT, _TOKENIZE, _MESSAGES = ChatDialect(), TokenizeDialect(), MessagesDialect()


class Handler(Protocol):
    """One route. ``error`` writes its errors in the form that its clients read."""

    method: str
    error: Errors

    async def answer(self, capture: Capture, body: bytes, connection: Connection) -> None:
        """Answer one request. An error that it raises before it has sent anything becomes the reply."""
        ...


class _Completions:
    """A route that samples completions."""

    method = "POST"

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self.error: Errors = dialect.error

    async def answer(self, capture: Capture, body: bytes, connection: Connection) -> None:
        exchange = capture.begin(self._dialect, body, connection.headers)
        await deliver(capture, self._dialect, exchange, connection)


class _Tokens:
    """A route that only tokenises."""

    method = "POST"

    def __init__(self, parse: Callable[[bytes, Mapping[str, str]], Any], errors: Errors, reply: Any) -> None:
        self._parse = parse
        self._reply = reply
        self.error = errors

    async def answer(self, capture: Capture, body: bytes, connection: Connection) -> None:
        call = self._parse(body, connection.headers)
        connection.ignored = call.ignored
        tokens = await capture.tokens_of(call)
        await send_body(connection.send, 200, self._reply(tokens, capture.context_length), [*connection.facts(), *JSON])


class _Models:
    """The list of models, or one of them: every name is the policy."""

    method = "GET"
    error: Errors = _CHAT.error

    async def answer(self, capture: Capture, body: bytes, connection: Connection) -> None:
        name = connection.route.partition("/")[2]
        length = capture.context_length
        text = model(name, _CREATED, length) if name else models(capture.models(), _CREATED, length)
        await send_body(connection.send, 200, text, JSON)


ROUTES: dict[str, Handler] = {
    "chat/completions": _Completions(_CHAT),
    "completions": _Completions(CompletionsDialect()),
    "responses": _Completions(ResponsesDialect()),
    "messages": _Completions(_MESSAGES),
    "messages/count_tokens": _Tokens(_MESSAGES.parse, _MESSAGES.error, lambda tokens, _: _MESSAGES.count(len(tokens))),
    "inference/v1/generate": _Completions(GenerateDialect()),
    "tokenize": _Tokens(_TOKENIZE.parse, _TOKENIZE.error, _TOKENIZE.reply),
    "models": _Models(),
}


class Routes:
    """The ASGI application. The key is checked before a byte of the body is read."""

    def __init__(self, find: Find, max_body: int = MAX_BODY, check_alive: CheckAlive = unleased) -> None:
        self._find = find
        self._guards = {
            route: Guard(
                self._answer,
                Admission(None, check_alive=check_alive),
                max_body=max_body,
                error=partial(_too_large, handler.error),
            )
            for route, handler in ROUTES.items()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        key, route = _place(scope["path"])
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        name = "models" if route.startswith("models/") else route
        handler = ROUTES.get(name)
        connection = Connection(scope, receive, send, headers, route)
        capture = self._find(key or _key_of(headers))
        problem = _problem(capture, handler, scope["method"], route, headers)
        if problem is not None:
            await connection.refuse(handler.error if handler is not None else _CHAT.error, problem)
            return
        # The guard and its log see the route only: the path has the key of the episode.
        inner = {**scope, "path": f"/{route}", "realsys.call": (capture, handler, connection)}
        await self._guards[name](inner, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that the guard has admitted."""
        capture, handler, connection = scope["realsys.call"]
        connection.receive, connection.send = receive, send
        body = (await receive()).get("body", b"")
        async with capture.turn:
            await asyncio.sleep(0)  # others come first; without it a burst would be read in one go
        try:
            capture.check_body(body)
            await handler.answer(capture, body, connection)
        except Exception as error:  # the request boundary
            if isinstance(error, BadRequest):
                # An agent that repeats it at once, on many connections, would take the time of others.
                async with capture.turn:
                    await asyncio.sleep(REFUSED_S)
            await connection.refuse(handler.error, problem_of(error))


def _too_large(error: Errors, message: str) -> object:
    """Return the body of the guard's refusal in the form of the route."""
    return msgspec.Raw(error(413, message, "", ""))


def _place(path: str) -> tuple[str, str]:
    """Return the key in the path ("" if it has none) and the route, without its leading v1."""
    key, rest = "", path.strip("/")
    if rest.startswith("e/"):
        _, key, rest = (*rest.split("/", 2), "", "")[:3]
    for _ in range(2):
        rest = rest.removeprefix("v1/")
    return key, rest


def _key_of(headers: Mapping[str, str]) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _problem(
    capture: Capture | str | None, handler: Handler | None, method: str, route: str, headers: Mapping[str, str]
) -> HttpProblem | None:
    """Return why a request is refused before its body is read; None if it is not."""
    if capture is None:
        return HttpProblem(401, "wrong key: use the base_url and the api_key of the episode", code="invalid_api_key")
    if isinstance(capture, str):
        return over(capture)
    if handler is None:
        return HttpProblem(404, f"no route {route!r}: use one of {', '.join(ROUTES)}", code="not_found")
    if handler.method != ("GET" if method == "HEAD" else method):
        return HttpProblem(405, f"{route} takes {handler.method}, not {method}", code="method_not_allowed")
    if (encoding := headers.get("content-encoding", "identity")) != "identity":
        return HttpProblem(
            415, f"the body is encoded as {encoding}: send it as plain JSON", code="unsupported_encoding"
        )
    return None


# ---- sending of replies, and whether they arrived
#
#     Exchange.task ──done──> reply, or its rest ──last byte to an open connection──> Capture.sent
#          │ stream: text as it is sampled; comments while there is none                 │
#          └── the client closed its connection ─────────────────────────────────────────┴──> Capture.broken
#
# A stream begins with its first text. An error before that is a reply with a status, which SDKs understand. If there
# is no text for ``KEEP_ALIVE_S``, the stream begins without, and a comment follows every ``KEEP_ALIVE_S``: clients and
# proxies close a connection that is silent for too long.


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

    async def refuse(self, error: Callable[[int, str, str, str], bytes], problem: HttpProblem) -> None:
        """Send an error reply."""
        body = error(problem.status, problem.message, problem.field, problem.code)
        await send_body(self.send, problem.status, body, [*self.facts(), *JSON, *problem.headers()])

    def facts(self, head: ReplyHead | None = None) -> list[tuple[bytes, bytes]]:
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
