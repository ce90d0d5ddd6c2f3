"""Messages of Anthropic as chat messages. The blocks of one assistant message are one chat message."""

from __future__ import annotations

from typing import Any

import msgspec

from realsys.rollout.gateway.wire import fields as f
from realsys.rollout.gateway.wire.base import BadRequest, Call
from realsys.rollout.gateway.wire.body import check

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


def tools_of(tools: list[dict[str, Any]], call: Call) -> list[dict[str, Any]]:
    """Return the functions in chat form. Tools whose form only Anthropic's models know have no effect here."""
    functions = []
    for i, tool in enumerate(tools):
        if "input_schema" not in tool:
            call.ignored.append(f"tools[{i}]")
            continue
        function = {"name": check(tool.get("name"), f.TEXT, f"tools[{i}].name")}
        if tool.get("description") is not None:
            function["description"] = check(tool["description"], f.TEXT, f"tools[{i}].description")
        function["parameters"] = check(tool["input_schema"], f.OBJECT, f"tools[{i}].input_schema")
        functions.append({"type": "function", "function": function})
    return functions


def _assistant(content: Any, path: str) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts, thoughts, calls = [], [], []
    for k, block in enumerate(check(content, f.OBJECTS, path)):
        place, kind = f"{path}[{k}]", block.get("type")
        if kind == "text":
            texts.append(check(block.get("text"), f.TEXT, f"{place}.text"))
        elif kind == "tool_use":
            calls.append(_tool_call(block, place))
        elif kind in _THOUGHTS:
            thoughts.append(check(block.get("thinking", ""), f.TEXT, f"{place}.thinking"))
        else:
            raise BadRequest(400, f"blocks of type {kind!r} are not supported", f"{place}.type")
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_call(block: dict[str, Any], path: str) -> dict[str, Any]:
    call_id, name = (check(block.get(key), f.TEXT, f"{path}.{key}") for key in ("id", "name"))
    arguments = msgspec.json.encode(check(block.get("input"), f.OBJECT, f"{path}.input")).decode()
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _user(content: Any, path: str) -> list[dict[str, Any]]:
    """Return the tool results as tool messages, and the rest as one user message after them."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    chat: list[dict[str, Any]] = []
    texts = []
    for k, block in enumerate(check(content, f.OBJECTS, path)):
        if block.get("type") == "tool_result":
            call_id = check(block.get("tool_use_id"), f.TEXT, f"{path}[{k}].tool_use_id")
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
    for k, block in enumerate(check(content, f.OBJECTS, path), first):
        if block.get("type") != "text":
            kind = block.get("type")
            raise BadRequest(400, f"must be text: blocks of type {kind!r} are not supported", f"{path}[{k}].type")
        texts.append(check(block.get("text"), f.TEXT, f"{path}[{k}].text"))
    return "\n".join(texts)
