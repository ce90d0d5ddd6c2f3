"""Server-sent events of OpenAI's responses.

response.created, response.in_progress
for each item: output_item.added, its content, output_item.done
response.completed or response.incomplete
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from realsys.rollout.gateway.wire import frames

Event = dict[str, Any]


def opening_events(body: dict[str, Any]) -> list[Event]:
    """Return the events that may be sent before the completion is sampled. ``body``: the response without output."""
    return [{"type": f"response.{kind}", "response": body} for kind in ("created", "in_progress")]


def item_events(output: list[dict[str, Any]]) -> Iterator[Event]:
    """Yield the events of all items."""
    for index, item in enumerate(output):
        place = {"output_index": index, "item_id": item["id"]}
        yield {"type": "response.output_item.added", "output_index": index, "item": _begun(item)}
        if item["type"] == "function_call":
            yield from _arguments(item, place)
        else:
            yield from _content(item, place)
        yield {"type": "response.output_item.done", "output_index": index, "item": item}


def numbered(events: Iterable[Event], first: int) -> Iterator[bytes]:
    """Encode events with their numbers in the stream."""
    for number, event in enumerate(events, first):
        yield frames.event(event | {"sequence_number": number})


def _begun(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item before its content has arrived."""
    begun = item | {"status": "in_progress"}
    if item["type"] == "function_call":
        return begun | {"arguments": ""}
    return begun | {"content": []}


def _arguments(item: dict[str, Any], place: dict[str, Any]) -> Iterator[Event]:
    kind = "response.function_call_arguments"
    yield {"type": f"{kind}.delta", "delta": item["arguments"], **place}
    yield {"type": f"{kind}.done", "arguments": item["arguments"], "name": item["name"], **place}


def _content(item: dict[str, Any], place: dict[str, Any]) -> Iterator[Event]:
    for index, part in enumerate(item["content"]):
        at = {"content_index": index, **place}
        logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        yield {"type": "response.content_part.added", "part": part | {"text": ""}, **at}
        yield {"type": f"response.{part['type']}.delta", "delta": part["text"], **logprobs, **at}
        yield {"type": f"response.{part['type']}.done", "text": part["text"], **logprobs, **at}
        yield {"type": "response.content_part.done", "part": part, **at}
