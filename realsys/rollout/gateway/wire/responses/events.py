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


def begin_events(item: dict[str, Any], index: int) -> Iterator[Event]:
    """Yield the events before the text of item ``index``. ``item``: a reasoning or a message."""
    (part,) = item["content"]
    begun = item | {"status": "in_progress", "content": []}
    yield {"type": "response.output_item.added", "output_index": index, "item": begun}
    yield {"type": "response.content_part.added", "part": part | {"text": ""}, **_place(item, index)}


def text_event(item: dict[str, Any], index: int, text: str) -> Event:
    """Return the event of further text of an item."""
    (part,) = item["content"]
    logprobs: Event = {"logprobs": []} if "logprobs" in part else {}
    return {"type": f"response.{part['type']}.delta", "delta": text, **logprobs, **_place(item, index)}


def end_events(item: dict[str, Any], index: int) -> Iterator[Event]:
    """Yield the events after the text of an item, which have all of it."""
    (part,), place = item["content"], _place(item, index)
    logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    yield {"type": f"response.{part['type']}.done", "text": part["text"], **logprobs, **place}
    yield {"type": "response.content_part.done", "part": part, **place}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def call_events(item: dict[str, Any], index: int) -> Iterator[Event]:
    """Yield the events of a function call."""
    kind, place = "response.function_call_arguments", {"output_index": index, "item_id": item["id"]}
    begun = item | {"status": "in_progress", "arguments": ""}
    yield {"type": "response.output_item.added", "output_index": index, "item": begun}
    yield {"type": f"{kind}.delta", "delta": item["arguments"], **place}
    yield {"type": f"{kind}.done", "arguments": item["arguments"], "name": item["name"], **place}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def numbered(events: Iterable[Event], first: int) -> Iterator[bytes]:
    """Encode events with their numbers in the stream."""
    for number, event in enumerate(events, first):
        yield frames.event(event | {"sequence_number": number})


def _place(item: dict[str, Any], index: int) -> Event:
    return {"content_index": 0, "output_index": index, "item_id": item["id"]}
