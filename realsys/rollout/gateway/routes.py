"""HTTP surface of the gateway, as plain ASGI: a framework would cost as much as all the rest of a call.

    /e/KEY/v1/chat/completions ──key──> Guard (size of the body, lease) ──> Handler ──> Capture ──> JSON or SSE

The key may also be a Bearer token or x-api-key; then the path begins with /v1. SDKs append different paths to a
base_url, so /v1 may be missing, or occur twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import msgspec
from starlette.types import Receive, Scope, Send

from realsys.cluster.http_server import Admission, Guard
from realsys.cluster.lease import CheckAlive, unleased
from realsys.rollout.gateway.capture import Capture
from realsys.rollout.gateway.delivery import JSON, Connection, deliver, send_body
from realsys.rollout.gateway.problems import Problem, over, problem_of
from realsys.rollout.gateway.wire.base import Dialect
from realsys.rollout.gateway.wire.chat import ChatDialect
from realsys.rollout.gateway.wire.completions import CompletionsDialect
from realsys.rollout.gateway.wire.generate import GenerateDialect
from realsys.rollout.gateway.wire.messages.dialect import MessagesDialect
from realsys.rollout.gateway.wire.responses.dialect import ResponsesDialect
from realsys.rollout.gateway.wire.tokenize import TokenizeDialect, model, models

MAX_BODY = 32 << 20
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
        try:
            await handler.answer(capture, body, connection)
        except Exception as error:  # the request boundary
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
) -> Problem | None:
    """Return why a request is refused before its body is read; None if it is not."""
    if capture is None:
        return Problem(401, "wrong key: use the base_url and the api_key of the episode", code="invalid_api_key")
    if isinstance(capture, str):
        return over(capture)
    if handler is None:
        return Problem(404, f"no route {route!r}: use one of {', '.join(ROUTES)}", code="not_found")
    if handler.method != method:
        return Problem(405, f"{route} takes {handler.method}, not {method}", code="method_not_allowed")
    if (encoding := headers.get("content-encoding", "identity")) != "identity":
        return Problem(415, f"the body is encoded as {encoding}: send it as plain JSON", code="unsupported_encoding")
    return None
