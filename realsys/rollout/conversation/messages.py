"""Canonical forms of messages: two messages with the same form are the same message.

An agent sends the assistant's message back through its own types. So these differences do not count:

    content      missing, null or "" in a call; a text or a list of text parts; white space at its ends in a reply
    arguments    any text of the same JSON value
    ids          of tool calls: the call that a result belongs to counts, not its name
    other keys   refusal, annotations, reasoning_content, ...
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from realsys.data.chat import text_of
from realsys.errors import MALFORMED, DataError

#: role, text, and calls or the called tool
Form = tuple[str, str, str]

KEPT_CALLS = 4096  # an agent sends the calls of all earlier turns again with each request
_ENCODE = msgspec.json.Encoder(order="sorted").encode
_DECODE = msgspec.json.Decoder().decode


def forms(messages: Iterable[Mapping[str, Any]]) -> list[Form]:
    """Return the canonical forms of a whole conversation. Raises DataError for a message without role or text."""
    calls: dict[str, int] = {}  # id -> number of the call in the conversation
    result = []
    for message in messages:
        form = form_of(message)
        if form[0] == "tool":
            name = str(message.get("tool_call_id") or "")
            form = ("tool", form[1], str(calls.get(name, name)))
        for call in message.get("tool_calls") or ():
            calls[str(call.get("id"))] = len(calls)
        result.append(form)
    return result


def form_of(message: Mapping[str, Any]) -> Form:
    """Return the canonical form of one message other than the result of a tool. Raises DataError."""
    role = message.get("role") if type(message) is dict or isinstance(message, Mapping) else None
    if not isinstance(role, str):
        raise DataError("a message must be an object with a role")
    content = message.get("content")
    text = content if type(content) is str else text_of(content) or ""
    if role != "assistant":
        return role, text, str(message.get("name") or "")
    calls = message.get("tool_calls")
    return role, text.strip(), "".join([_call(call) for call in calls]) if calls else ""


def key_of(*values: Any) -> bytes:
    """Return equal bytes for equal JSON values."""
    return _ENCODE(values)


def _call(call: Any) -> str:
    function = call.get("function") if type(call) is dict else None
    if type(function) is not dict:
        raise DataError("a tool call must be an object with a function")
    arguments = function.get("arguments") or {}
    name = function.get("name")
    if isinstance(name, str) and isinstance(arguments, str):
        return _canonical(name, arguments)
    return _ENCODE([name, arguments]).decode()


@functools.lru_cache(maxsize=KEPT_CALLS)
def _canonical(name: str, arguments: str) -> str:
    try:
        value = _DECODE(arguments)
    except (ValueError, *MALFORMED):
        value = arguments  # a text that is not JSON is compared as text
    return _ENCODE([name, value or {}]).decode()
