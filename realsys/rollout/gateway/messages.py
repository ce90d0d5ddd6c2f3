"""POST /v1/messages and /v1/messages/count_tokens of Anthropic.

A stream is message_start, then for each block content_block_start, content_block_delta, content_block_stop,
then message_delta and message_stop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from realsys.rollout.gateway import replies, request_fields
from realsys.rollout.gateway.dialect import BadRequest, Choice, GatewayCall, GatewayReply, ReplyHead, Sent
from realsys.rollout.gateway.request_fields import check, limits, read, strings, tool_choice

#: Anthropic's names of the choices of tools -> OpenAI's
_TOOL_CHOICES = {"any": "required", "tool": "function"}


class MessagesDialect:
    """Anthropic's messages."""

    def parse(self, body: bytes, headers: Mapping[str, str]) -> GatewayCall:
        request = read(body, request_fields.MESSAGES)
        call = limits(
            GatewayCall("chat", messages=messages_of(request.get("messages"), request.get("system"))), request
        )
        call.tools = tools_of(request.get("tools", []), call)
        call.stop = strings(check(request.get("stop_sequences", []), request_fields.TEXTS, "stop_sequences"))
        kind = check(request.get("tool_choice", {}).get("type", "auto"), request_fields.TEXT, "tool_choice.type")
        tool_choice(call, _TOOL_CHOICES.get(kind, kind))
        call.options = dict(request.get("chat_template_kwargs", {}))
        return call

    def reply(self, call: GatewayCall, reply: GatewayReply) -> bytes:
        (choice,) = reply.choices
        end = _end(choice)
        return replies.encode(_body(reply) | {"content": list(_blocks(reply))} | end | {"usage": _usage(reply)})

    def count(self, tokens: int) -> bytes:
        """Return the reply of count_tokens, whose request ``parse`` reads."""
        return replies.encode({"input_tokens": tokens})

    def opening(self, call: GatewayCall, head: ReplyHead) -> bytes:
        usage = {"input_tokens": 0, "output_tokens": 0}
        return replies.event({"type": "message_start", "message": _body(head) | {"content": [], "usage": usage}})

    def part(self, call: GatewayCall, head: ReplyHead, index: int, sent: Sent, reasoning: str, text: str) -> bytes:
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

    def events(self, call: GatewayCall, reply: GatewayReply, sent: Sequence[Sent]) -> Iterator[bytes]:
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
        yield replies.event({"type": "message_delta", "delta": _end(choice), "usage": _usage(reply)})
        yield replies.event({"type": "message_stop"})

    def error(self, status: int, message: str, field: str = "", code: str = "") -> bytes:
        return replies.encode(_error(status, f"{field}: {message}" if field else message))

    def error_event(self, status: int, message: str) -> bytes:
        return replies.event(_error(status, message))


def _error(status: int, message: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": replies.error_type(status), "message": message}}


def _body(head: ReplyHead) -> dict[str, Any]:
    body = {"id": head.id, "type": "message", "role": "assistant", "model": head.model}
    return body | {"stop_reason": None, "stop_sequence": None}


def _end(choice: Choice) -> dict[str, Any]:
    reason = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}[choice.finish_reason]
    if choice.stop is not None and reason == "end_turn":
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": choice.stop}


def _usage(reply: GatewayReply) -> dict[str, Any]:
    usage = replies.usage(reply)
    cache = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": usage["prompt_tokens"], **cache, "output_tokens": usage["completion_tokens"]}


def _blocks(reply: GatewayReply) -> Iterator[dict[str, Any]]:
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


def _end_of_thinking(head: ReplyHead, sent: Sent) -> list[bytes]:
    if not sent.reasoning:
        return []
    return [_delta(0, {"type": "signature_delta", "signature": head.id}), _stop(0)]


def _start(index: int, block: dict[str, Any]) -> bytes:
    return replies.event({"type": "content_block_start", "index": index, "content_block": block})


def _delta(index: int, delta: dict[str, Any]) -> bytes:
    return replies.event({"type": "content_block_delta", "index": index, "delta": delta})


def _stop(index: int) -> bytes:
    return replies.event({"type": "content_block_stop", "index": index})


# ---- messages of Anthropic as chat messages
#
# The blocks of one assistant message are one chat message.


_THOUGHTS = ("thinking", "redacted_thinking")


def messages_of(messages: list[dict[str, Any]], system: str | list[Any] | None) -> list[dict[str, Any]]:
    """Return the chat messages of a request. Raises BadRequest."""
    if not messages:
        raise BadRequest(400, "must contain at least one message", "messages")
    chat: list[dict[str, Any]] = []
    if system:
        chat.append({"role": "system", "content": _text(system, "system")})
    for i, message in enumerate(messages):
        path = f"messages[{i}]"
        role, content = message.get("role"), message.get("content")
        if role == "assistant":
            chat.append(_assistant(content, f"{path}.content"))
        elif role == "user":
            chat += _user(content, f"{path}.content")
        elif role == "system":
            chat.append({"role": "system", "content": _text(content, f"{path}.content")})
        else:
            raise BadRequest(400, "must be one of user, assistant, system", f"{path}.role")
    if chat[-1]["role"] == "assistant":
        raise BadRequest(400, "the last message must not be the assistant's: a reply cannot be begun", "messages")
    return chat


def tools_of(tools: list[dict[str, Any]], call: GatewayCall) -> list[dict[str, Any]]:
    """Return the functions in chat form. Tools whose form only Anthropic's models know have no effect here."""
    functions = []
    for i, tool in enumerate(tools):
        if "input_schema" not in tool:
            call.ignored.append(f"tools[{i}]")
            continue
        function = {"name": check(tool.get("name"), request_fields.TEXT, f"tools[{i}].name")}
        if tool.get("description") is not None:
            function["description"] = check(tool["description"], request_fields.TEXT, f"tools[{i}].description")
        function["parameters"] = check(tool["input_schema"], request_fields.OBJECT, f"tools[{i}].input_schema")
        functions.append({"type": "function", "function": function})
    return functions


def _assistant(content: Any, path: str) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts, thoughts, calls = [], [], []
    for k, block in enumerate(check(content, request_fields.OBJECTS, path)):
        place, kind = f"{path}[{k}]", block.get("type")
        if kind == "text":
            texts.append(check(block.get("text"), request_fields.TEXT, f"{place}.text"))
        elif kind == "tool_use":
            calls.append(_tool_call(block, place))
        elif kind in _THOUGHTS:
            thoughts.append(check(block.get("thinking", ""), request_fields.TEXT, f"{place}.thinking"))
        else:
            raise BadRequest(400, f"blocks of type {kind!r} are not supported", f"{place}.type")
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_call(block: dict[str, Any], path: str) -> dict[str, Any]:
    call_id, name = (check(block.get(key), request_fields.TEXT, f"{path}.{key}") for key in ("id", "name"))
    arguments = msgspec.json.encode(check(block.get("input"), request_fields.OBJECT, f"{path}.input")).decode()
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _user(content: Any, path: str) -> list[dict[str, Any]]:
    """Return the tool results as tool messages, and the rest as one user message after them."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    chat: list[dict[str, Any]] = []
    texts = []
    for k, block in enumerate(check(content, request_fields.OBJECTS, path)):
        if block.get("type") == "tool_result":
            call_id = check(block.get("tool_use_id"), request_fields.TEXT, f"{path}[{k}].tool_use_id")
            text = _text(block.get("content") or "", f"{path}[{k}].content")
            chat.append({"role": "tool", "tool_call_id": call_id, "content": text})
        else:
            texts.append(_text([block], path, k))
    if texts or not chat:
        chat.append({"role": "user", "content": "\n".join(texts)})
    return chat


def _text(content: Any, path: str, first: int = 0) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for k, block in enumerate(check(content, request_fields.OBJECTS, path), first):
        if block.get("type") != "text":
            kind = block.get("type")
            raise BadRequest(400, f"must be text: blocks of type {kind!r} are not supported", f"{path}[{k}].type")
        texts.append(check(block.get("text"), request_fields.TEXT, f"{path}[{k}].text"))
    return "\n".join(texts)
