"""Input items of OpenAI's responses as chat messages.

A reply of the gateway has the items reasoning, message, function calls, in this order. A client sends them back in
its next request, maybe without the reasoning, maybe with the outputs of the tools between the function calls. All
items of one reply become one assistant message again: the one that the reply was made of.
"""

from __future__ import annotations

from typing import Any

from realsys.rollout.gateway.wire import fields as f
from realsys.rollout.gateway.wire.base import BadRequest, Call
from realsys.rollout.gateway.wire.body import check
from realsys.rollout.gateway.wire.call_ids import same_completion

_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_CHAT_ROLES = {"user": "user", "system": "system", "developer": "system", "assistant": "assistant"}


class _Folder:
    """Chat messages from items, one after another."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # assistant message that further items may join
        self._latest: dict[str, Any] | None = None  # last assistant message

    def add(self, item: dict[str, Any], path: str) -> None:
        """Append one item. Raises BadRequest."""
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "message":
            self._message(item, path)
        elif kind == "reasoning":
            self._reasoning(item, path)
        elif kind == "function_call":
            self._function_call(item, path)
        elif kind == "function_call_output":
            self._output(item, path)
        elif kind == "item_reference":
            raise BadRequest(400, "responses are not stored: send the item itself", path)
        else:
            raise BadRequest(400, f"items of type {kind!r} are not supported", f"{path}.type")

    def _message(self, item: dict[str, Any], path: str) -> None:
        role = _CHAT_ROLES.get(check(item.get("role"), f.TEXT, f"{path}.role"))
        if role is None:
            raise BadRequest(400, f"must be one of {', '.join(_CHAT_ROLES)}", f"{path}.role")
        text = _text(item.get("content"), f"{path}.content")
        if role != "assistant":
            self._append({"role": role, "content": text})
            return
        if self._open is None or self._open["content"] is not None or "tool_calls" in self._open:
            self._assistant()
        assert self._open is not None
        self._open["content"] = text

    def _reasoning(self, item: dict[str, Any], path: str) -> None:
        self._assistant()
        assert self._open is not None
        parts = item.get("content") or item.get("summary") or []
        self._open["reasoning_content"] = _text(parts, f"{path}.content")

    def _function_call(self, item: dict[str, Any], path: str) -> None:
        call_id, name, arguments = (
            check(item.get(key), f.TEXT, f"{path}.{key}") for key in ("call_id", "name", "arguments")
        )
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        if self._open is None and self._latest is not None:
            earlier = self._latest.get("tool_calls", ())
            if earlier and same_completion(earlier[0]["id"], call_id):
                earlier.append(call)
                return
        if self._open is None:
            self._assistant()
        assert self._open is not None
        self._open.setdefault("tool_calls", []).append(call)

    def _output(self, item: dict[str, Any], path: str) -> None:
        call_id = check(item.get("call_id"), f.TEXT, f"{path}.call_id")
        text = _text(item.get("output"), f"{path}.output")
        self._append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _assistant(self) -> None:
        self._append({"role": "assistant", "content": None})
        self._open = self._latest = self.messages[-1]

    def _append(self, message: dict[str, Any]) -> None:
        self._open = None
        self.messages.append(message)


def messages_of(items: str | list[Any], instructions: str | None) -> list[dict[str, Any]]:
    """Return the chat messages of a request. Raises BadRequest."""
    folder = _Folder()
    if instructions:
        folder.messages.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not items:
        raise BadRequest(400, "must not be empty", "input")
    for i, item in enumerate(items):
        folder.add(check(item, f.OBJECT, f"input[{i}]"), f"input[{i}]")
    return folder.messages


def tools_of(tools: list[dict[str, Any]], call: Call) -> list[dict[str, Any]]:
    """Return the functions in chat form. Tools that OpenAI runs itself have no effect here."""
    functions = []
    for i, tool in enumerate(tools):
        if tool.get("type") != "function":
            call.ignored.append(f"tools[{i}]")
            continue
        name = check(tool.get("name"), f.TEXT, f"tools[{i}].name")
        function = {"name": name, "description": tool.get("description"), "parameters": tool.get("parameters")}
        given = {key: value for key, value in function.items() if value is not None}
        functions.append({"type": "function", "function": given})
    return functions


def _text(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for k, part in enumerate(check(content, f.OBJECTS, path)):
        if part.get("type") == "refusal":
            texts.append(check(part.get("refusal"), f.TEXT, f"{path}[{k}].refusal"))
        elif part.get("type") in _TEXTS:
            texts.append(check(part.get("text"), f.TEXT, f"{path}[{k}].text"))
        else:
            problem = f"must be text: parts of type {part.get('type')!r} are not supported"
            raise BadRequest(400, problem, f"{path}[{k}].type")
    return "".join(texts)
