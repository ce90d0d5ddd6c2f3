"""Undoes changes that clients make to assistant messages before they send them back.

A conversation stays one row only if its history equals the replies of the gateway. Two changes are known. Both can be
undone exactly, because the episode remembers its replies:

    a stop string     cut from the text by the API, and written again by the client (code agents of smolagents)
    tool calls        written as text, "Calling tools:" and the repr of a list (tool agents of smolagents); calls that
                      the client read from the text itself are appended in the same way
"""

from __future__ import annotations

import ast
from typing import Any

from realsys.data.chat import text_of
from realsys.rollout.gateway.wire.base import Choice

_CALLS = "Calling tools:\n["


class Echoes:
    """Replies of one episode that clients are known to change."""

    def __init__(self) -> None:
        self._stopped: dict[str, str] = {}  # text with its stop string -> text that was returned
        self._calls: dict[str, dict[str, Any]] = {}  # id -> tool call that was returned

    def remember(self, choice: Choice) -> None:
        """Note a completion that is returned to the client."""
        if choice.stop is not None:
            self._stopped[(choice.text + choice.stop).strip()] = choice.text
        for call in choice.tool_calls:
            self._calls[call["id"]] = call

    def restore(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages as they were returned to the client. Raises DataError for a content that is no text."""
        return [self._restored(message) if message.get("role") == "assistant" else message for message in messages]

    def _restored(self, message: dict[str, Any]) -> dict[str, Any]:
        text = text_of(message.get("content")) or ""
        if message.get("tool_calls") or not (self._stopped or _CALLS in text):
            return message
        content, calls = self._split(text)
        content = self._stopped.get(content.strip(), content)
        if content == text:
            return message
        return message | {"content": content} | ({"tool_calls": calls} if calls else {})

    def _split(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Split a text into what the model wrote and the calls that the client wrote behind it."""
        head, mark, _ = text.rpartition(_CALLS)
        if not mark:
            return text, []
        try:
            written = ast.literal_eval(text[len(head) + len(mark) - 1 :])
            ids = [call["id"] for call in written]
        except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError):
            return text, []
        return head.strip(), [self._calls[number] for number in ids if number in self._calls]
