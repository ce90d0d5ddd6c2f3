"""Replies of the gateway's dialects without a gateway, and real SDKs that read them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai

from realsys.generation.completion import Completion
from realsys.rollout.gateway.chat import ChatDialect
from realsys.rollout.gateway.completions import CompletionsDialect
from realsys.rollout.gateway.dialect import BadRequest, Choice, Dialect, GatewayCall, GatewayReply, Sent
from realsys.rollout.gateway.generate import GenerateDialect
from realsys.rollout.gateway.messages import MessagesDialect
from realsys.rollout.gateway.responses import ResponsesDialect

DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": ChatDialect(),
    "/v1/completions": CompletionsDialect(),
    "/v1/responses": ResponsesDialect(),
    "/v1/messages": MessagesDialect(),
    "/v1/messages/count_tokens": MessagesDialect(),
    "/inference/v1/generate": GenerateDialect(),
}
GOLDEN = Path(__file__).parents[2] / "unit" / "rollout" / "gateway" / "golden"
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


class AsciiVocabulary:
    """Token k is the character k."""

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])


def generated(text: str = "ok", finish_reason: str = "stop", version: int = 3) -> Completion:
    """Return a completion of ASCII characters, each with the log-prob -0.5."""
    tokens = np.array([ord(character) for character in text], np.int32)
    versions = np.full(len(tokens), version, np.int32)
    return Completion(tokens, np.full(len(tokens), -0.5, np.float32), versions, finish_reason)  # type: ignore[arg-type]


def tool_call(number: str = "abcdefg00", **arguments: Any) -> dict[str, Any]:
    """Return a call of the tool ``add``."""
    return {"id": number, "type": "function", "function": {"name": "add", "arguments": json.dumps(arguments)}}


def reply_of(*choices: Choice) -> GatewayReply:
    """Return a reply with a prompt of three tokens."""
    return GatewayReply("reply-1", 1_750_000_000, "policy", [1, 2, 3], list(choices), AsciiVocabulary())


def choice(text: str = "ok", reasoning: str | None = None, *calls: dict[str, Any], stop: str | None = None) -> Choice:
    """Return a choice with these parts."""
    end = "tool_calls" if calls else "stop"
    return Choice(generated(), text, reasoning, list(calls), end, stop)  # type: ignore[arg-type]


def parse(route: str, body: Mapping[str, Any]) -> GatewayCall:
    """Read a request of ``route``."""
    return DIALECTS[route].parse(json.dumps(body).encode(), {})


def streamed(dialect: Dialect, call: GatewayCall, reply: GatewayReply, early: int = 0) -> Iterator[bytes]:
    """Yield the events of a stream after its opening."""
    sent = [Sent() for _ in reply.choices]
    for index, each in enumerate(reply.choices):
        shown = (each.reasoning or "")[:early]
        # All of the reasoning comes before the text.
        text = each.text[:early] if shown == (each.reasoning or "") else ""
        for character in shown:
            yield dialect.part(call, reply, index, sent[index], character, "")
        for character in text:
            yield dialect.part(call, reply, index, sent[index], "", character)
    yield from dialect.events(call, reply, sent)


class Endpoint:
    """An endpoint inside of the test, for SDKs: every request is answered with ``choices``.

    ``requests`` are the bodies, ``calls`` what the dialect made of them. A stream has the first ``early`` characters
    of reasoning and text in parts of one character each.
    """

    def __init__(self, *choices: Choice, early: int = 0) -> None:
        self.choices = list(choices)
        self.early = early
        self.requests: list[Any] = []
        self.calls: list[GatewayCall] = []
        self.failure: tuple[int, str] | None = None  # an error after the opening of a stream

    def client(self, make: Callable[..., Any] = openai.OpenAI, url: str = "http://gateway/v1") -> Any:
        """Return an SDK's client that talks to this endpoint."""
        transport = httpx2.MockTransport(self._answer)
        return make(base_url=url, api_key="key", http_client=httpx2.Client(transport=transport), max_retries=0)

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        body = request.read()
        dialect = DIALECTS[request.url.path]
        self.requests.append(json.loads(body))
        try:
            call = dialect.parse(body, dict(request.headers))
        except BadRequest as error:
            text = dialect.error(error.status, error.message, error.field, error.code)
            return httpx2.Response(error.status, content=text, headers={"content-type": "application/json"})
        self.calls.append(call)
        reply = reply_of(*self.choices)
        if not call.stream:
            return httpx2.Response(
                200, content=dialect.reply(call, reply), headers={"content-type": "application/json"}
            )
        events = [dialect.opening(call, reply), b": keep-alive\n\n", *streamed(dialect, call, reply, self.early)]
        if self.failure is not None:
            events = [events[0], dialect.error_event(*self.failure)]
        return httpx2.Response(200, content=b"".join(events), headers={"content-type": "text/event-stream"})


def golden_calls() -> list[tuple[str, dict[str, Any]]]:
    """Return (client and number, request with its expected call and reply) of all golden files."""
    return [
        (f"{file.stem}-{number}", call)
        for file in sorted(GOLDEN.glob("*.json"))
        for number, call in enumerate(json.loads(file.read_text("utf-8"))["calls"])
    ]
