"""A completion of the engine as the client reads it: text, reasoning, tool calls, reason of its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from realsys.data.tokenizer import TextTokenizer
from realsys.generation.client import Generated
from realsys.rollout.gateway.wire.base import Call, Choice, ChoiceEnd
from realsys.rollout.gateway.wire.call_ids import call_id

if TYPE_CHECKING:  # it imports renderers, which takes half a second
    from realsys.rollout.gateway.formats.parser import Parser


def read_choice(
    tokenizer: TextTokenizer, parser: Parser, call: Call, prompt: Sequence[int], completion: Generated, name: str
) -> Choice:
    """Read one completion.

    ``name`` is unique to the completion: the ids of its tool calls are made of it. A repeated call with the same
    name and completion gets an equal choice.
    """
    end: ChoiceEnd = "length" if completion.finish_reason != "stop" else "stop"
    tokens = completion.tokens.tolist()
    if call.kind != "chat":
        text, stop = _cut(tokenizer.completion_text(tokens), call.stop if end == "stop" else ())
        return Choice(completion, text, finish_reason=end, stop=stop)
    parsed = parser.parse(tokens, call.tools if call.parse_tools else (), prompt, call.options)
    choice = Choice(completion, parsed.content, parsed.reasoning, finish_reason=end, malformed=parsed.malformed)
    if end == "stop" and call.stop:
        _cut_choice(choice, call.stop)
    choice.tool_calls = _tool_calls(parsed.calls, name)
    if choice.tool_calls:
        choice.finish_reason = "tool_calls"
    return choice


def _tool_calls(calls: list[tuple[str | None, str, dict[str, Any]]], name: str) -> list[dict[str, Any]]:
    """Return the tool calls in chat form. An id that the model wrote stays, because its tool results name it."""
    result: list[dict[str, Any]] = []
    used: set[str] = set()
    for index, (own, function, arguments) in enumerate(calls):
        number = own if own and own not in used else call_id(name, index)
        used.add(number)
        text = msgspec.json.encode(arguments).decode()
        result.append({"id": number, "type": "function", "function": {"name": function, "arguments": text}})
    return result


def _cut_choice(choice: Choice, stops: Sequence[str]) -> None:
    """Cut the stop string, which is in the content, or in the reasoning if the completion ended there."""
    if not choice.text and choice.reasoning:
        choice.reasoning, choice.stop = _cut(choice.reasoning, stops)
    else:
        choice.text, choice.stop = _cut(choice.text, stops)


def _cut(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Return the text before the first stop string, and that string; the whole text and None if it has none."""
    places = [(place, stop) for stop in stops if (place := text.find(stop)) >= 0]
    if not places:
        return text, None
    place, stop = min(places)
    return text[:place], stop
