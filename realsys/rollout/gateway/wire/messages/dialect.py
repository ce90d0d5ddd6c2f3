"""POST /v1/messages and /v1/messages/count_tokens of Anthropic.

A stream is message_start, then for each block content_block_start, content_block_delta, content_block_stop,
then message_delta and message_stop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from realsys.rollout.gateway.wire import fields, frames
from realsys.rollout.gateway.wire.base import Call, Choice, Head, Reply, Sent
from realsys.rollout.gateway.wire.body import check, limits, read, strings, tool_choice
from realsys.rollout.gateway.wire.messages.blocks import messages_of, tools_of

#: Anthropic's names of the choices of tools -> OpenAI's
_TOOL_CHOICES = {"any": "required", "tool": "function"}


class MessagesDialect:
    """Anthropic's messages."""

    def parse(self, body: bytes, headers: Mapping[str, str]) -> Call:
        request = read(body, fields.MESSAGES)
        call = limits(Call("chat", messages=messages_of(request.get("messages"), request.get("system"))), request)
        call.tools = tools_of(request.get("tools", []), call)
        call.stop = strings(check(request.get("stop_sequences", []), fields.TEXTS, "stop_sequences"))
        kind = check(request.get("tool_choice", {}).get("type", "auto"), fields.TEXT, "tool_choice.type")
        tool_choice(call, _TOOL_CHOICES.get(kind, kind))
        call.options = dict(request.get("chat_template_kwargs", {}))
        return call

    def reply(self, call: Call, reply: Reply) -> bytes:
        (choice,) = reply.choices
        end = _end(choice)
        return frames.encode(_body(reply) | {"content": list(_blocks(reply))} | end | {"usage": _usage(reply)})

    def count(self, tokens: int) -> bytes:
        """Return the reply of count_tokens, whose request ``parse`` reads."""
        return frames.encode({"input_tokens": tokens})

    def opening(self, call: Call, head: Head) -> bytes:
        usage = {"input_tokens": 0, "output_tokens": 0}
        return frames.event({"type": "message_start", "message": _body(head) | {"content": [], "usage": usage}})

    def part(self, call: Call, head: Head, index: int, sent: Sent, reasoning: str, text: str) -> bytes:
        events = []
        if reasoning:
            if not sent.reasoning:
                events.append(_start(0, _thinking("", "")))
            events.append(_delta(0, {"type": "thinking_delta", "thinking": reasoning}))
            sent.reasoning += reasoning
        if text:
            block = int(bool(sent.reasoning))
            if not sent.text:
                events += _end_of_thinking(head, sent)
                events.append(_start(block, {"type": "text", "text": ""}))
            events.append(_delta(block, {"type": "text_delta", "text": text}))
            sent.text += text
        return b"".join(events)

    def events(self, call: Call, reply: Reply, sent: Sequence[Sent]) -> Iterator[bytes]:
        (choice,), (so_far,) = reply.choices, sent
        yield self.part(call, reply, 0, so_far, *so_far.rest(choice))
        blocks = bool(so_far.reasoning) + bool(so_far.text)
        if so_far.text:
            yield _stop(blocks - 1)
        else:
            yield from _end_of_thinking(reply, so_far)
        for index, block in enumerate(_tool_blocks(choice), blocks):
            arguments = msgspec.json.encode(block["input"]).decode()
            yield _start(index, block | {"input": {}})
            yield _delta(index, {"type": "input_json_delta", "partial_json": arguments})
            yield _stop(index)
        yield frames.event({"type": "message_delta", "delta": _end(choice), "usage": _usage(reply)})
        yield frames.event({"type": "message_stop"})

    def error(self, status: int, message: str, field: str = "", code: str = "") -> bytes:
        return frames.encode(_error(status, f"{field}: {message}" if field else message))

    def error_event(self, status: int, message: str) -> bytes:
        return frames.event(_error(status, message))


def _error(status: int, message: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": frames.error_type(status), "message": message}}


def _body(head: Head) -> dict[str, Any]:
    body = {"id": head.id, "type": "message", "role": "assistant", "model": head.model}
    return body | {"stop_reason": None, "stop_sequence": None}


def _end(choice: Choice) -> dict[str, Any]:
    reason = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}[choice.finish_reason]
    if choice.stop is not None and reason == "end_turn":
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": choice.stop}


def _usage(reply: Reply) -> dict[str, Any]:
    usage = frames.usage(reply)
    cache = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": usage["prompt_tokens"], **cache, "output_tokens": usage["completion_tokens"]}


def _blocks(reply: Reply) -> Iterator[dict[str, Any]]:
    (choice,) = reply.choices
    if choice.reasoning:
        yield _thinking(choice.reasoning, reply.id)
    if choice.text:
        yield {"type": "text", "text": choice.text}
    yield from _tool_blocks(choice)


def _thinking(text: str, signature: str) -> dict[str, Any]:
    # Clients drop thinking without a signature; the id of the reply serves as one.
    return {"type": "thinking", "thinking": text, "signature": signature}


def _tool_blocks(choice: Choice) -> Iterator[dict[str, Any]]:
    for call in choice.tool_calls:
        function = call["function"]
        arguments = msgspec.json.decode(function["arguments"])
        yield {"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments}


def _end_of_thinking(head: Head, sent: Sent) -> list[bytes]:
    if not sent.reasoning:
        return []
    return [_delta(0, {"type": "signature_delta", "signature": head.id}), _stop(0)]


def _start(index: int, block: dict[str, Any]) -> bytes:
    return frames.event({"type": "content_block_start", "index": index, "content_block": block})


def _delta(index: int, delta: dict[str, Any]) -> bytes:
    return frames.event({"type": "content_block_delta", "index": index, "delta": delta})


def _stop(index: int) -> bytes:
    return frames.event({"type": "content_block_stop", "index": index})
