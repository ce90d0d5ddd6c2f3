"""POST /v1/responses of OpenAI. Responses are not stored: a request carries its whole conversation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from realsys.rollout.gateway import replies, request_fields
from realsys.rollout.gateway.dialect import BadRequest, GatewayCall, GatewayReply, ReplyHead, Sent, same_completion
from realsys.rollout.gateway.request_fields import check, limits, read, tool_choice, top_logprobs

_LOGPROBS = "message.output_text.logprobs"
#: fields that need stored state, and what a client does instead
_STATEFUL = {
    "previous_response_id": "responses are not stored: send the whole conversation as input",
    "conversation": "conversations are not stored: send the whole conversation as input",
    "prompt": "prompts are not stored: send instructions and input",
    "background": "responses are not stored: wait for the reply",
}


class ResponsesDialect(replies.OpenAIErrors):
    """OpenAI's responses."""

    def parse(self, body: bytes, headers: Mapping[str, str]) -> GatewayCall:
        request = read(body, request_fields.RESPONSES)
        for name, remedy in _STATEFUL.items():
            if request.get(name):
                raise BadRequest(400, remedy, name, "unsupported_parameter")
        call = limits(
            GatewayCall("chat", messages=messages_of(request.get("input"), request.get("instructions"))), request
        )
        call.tools = tools_of(request.get("tools", []), call)
        call.max_tokens = request.get("max_output_tokens")
        tool_choice(call, request.get("tool_choice"))
        call.logprobs = _LOGPROBS in request.get("include", ())
        call.top_logprobs = top_logprobs(request.get("top_logprobs", 0), "top_logprobs")
        call.options = dict(request.get("chat_template_kwargs", {}))
        effort = request.get("reasoning", {}).get("effort")
        if effort is not None:
            call.options.setdefault("reasoning_effort", effort)
        return call

    def reply(self, call: GatewayCall, reply: GatewayReply) -> bytes:
        return replies.encode(_finished(call, reply))

    def opening(self, call: GatewayCall, head: ReplyHead) -> bytes:
        return b"".join(numbered(opening_events(_body(call, head)), 0))

    def part(self, call: GatewayCall, head: ReplyHead, index: int, sent: Sent, reasoning: str, text: str) -> bytes:
        events: list[Event] = []
        if reasoning:
            item = _reasoning(head, "")
            if not sent.reasoning:
                events += begin_events(item, 0)
            events.append(text_event(item, 0, reasoning))
            sent.reasoning += reasoning
        if text:
            item, place = _message(head, "", [], "in_progress"), int(bool(sent.reasoning))
            if not sent.text:
                if sent.reasoning:
                    events += end_events(_reasoning(head, sent.reasoning), 0)
                events += begin_events(item, place)
            events.append(text_event(item, place, text))
            sent.text += text
        return self._numbered(events, sent)

    def events(self, call: GatewayCall, reply: GatewayReply, sent: Sequence[Sent]) -> Iterator[bytes]:
        (choice,), (so_far,) = reply.choices, sent
        yield self.part(call, reply, 0, so_far, *so_far.rest(choice))
        body, events = _finished(call, reply), list[Event]()
        for index, item in enumerate(body["output"]):
            if item["type"] == "function_call":
                events += call_events(item, index)
            elif item["type"] == "message":
                if not so_far.text:  # an empty one
                    events += [*begin_events(item, index), text_event(item, index, "")]
                events += end_events(item, index)
            elif not so_far.text:
                events += end_events(item, index)
        events.append({"type": f"response.{body['status']}", "response": body})
        yield self._numbered(events, so_far)

    def _numbered(self, events: list[Event], sent: Sent) -> bytes:
        first, sent.events = len(opening_events({})) + sent.events, sent.events + len(events)
        return b"".join(numbered(events, first))

    def error_event(self, status: int, message: str) -> bytes:
        error = replies.openai_error(status, message)["error"]
        # The fields of OpenAI's event, and "error", which makes its SDK raise.
        event = {"type": "error", "code": error["type"], "message": message, "param": None, "sequence_number": 0}
        return replies.event(event | {"error": error})


def _body(call: GatewayCall, head: ReplyHead) -> dict[str, Any]:
    return {
        "id": head.id,
        "object": "response",
        "created_at": head.created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": call.max_tokens,
        "metadata": {},
        "model": head.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "temperature": call.sampling.get("temperature"),
        "tool_choice": "auto" if call.parse_tools else "none",
        "tools": [{"type": "function", "strict": False, "parameters": {}} | tool["function"] for tool in call.tools],
        "top_p": call.sampling.get("top_p"),
        "truncation": "disabled",
        "usage": None,
    }


def _finished(call: GatewayCall, reply: GatewayReply) -> dict[str, Any]:
    (choice,) = reply.choices
    cut = choice.finish_reason == "length"
    usage = replies.usage(reply)
    body = _body(call, reply)
    body["status"] = "incomplete" if cut else "completed"
    body["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
    body["output"] = _output(call, reply, body["status"])
    body["usage"] = {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
    return body


def _output(call: GatewayCall, reply: GatewayReply, status: str) -> list[dict[str, Any]]:
    (choice,) = reply.choices
    output: list[dict[str, Any]] = []
    if choice.reasoning:
        output.append(_reasoning(reply, choice.reasoning))
    # A reply without a tool call always has a message, so that the client has something to send back.
    if choice.text or not choice.tool_calls:
        logprobs = replies.token_logprobs(call, reply, choice) if call.logprobs else []
        output.append(_message(reply, choice.text, logprobs, status))
    for tool_call in choice.tool_calls:
        item = {"type": "function_call", "id": f"fc_{tool_call['id']}", "call_id": tool_call["id"]}
        output.append(item | tool_call["function"] | {"status": status})
    return output


def _reasoning(head: ReplyHead, text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": f"rs_{head.id}", "summary": [], "content": content}


def _message(head: ReplyHead, text: str, logprobs: list[dict[str, Any]], status: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    message = {"type": "message", "id": f"msg_{head.id}", "role": "assistant", "status": status}
    return message | {"content": [part]}


# ---- input items as chat messages
#
# A reply of the gateway has the items reasoning, message, function calls, in this order. A client sends them back in
# its next request, maybe without the reasoning, maybe with the outputs of the tools between the function calls. All
# items of one reply become one assistant message again: the one that the reply was made of.


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
            self._assistant()
            assert self._open is not None
            parts = item.get("content") or item.get("summary") or []
            self._open["reasoning_content"] = _text(parts, f"{path}.content")
        elif kind == "function_call":
            self._function_call(item, path)
        elif kind == "function_call_output":
            call_id = check(item.get("call_id"), request_fields.TEXT, f"{path}.call_id")
            text = _text(item.get("output"), f"{path}.output")
            self._append({"role": "tool", "tool_call_id": call_id, "content": text})
        elif kind == "item_reference":
            raise BadRequest(400, "responses are not stored: send the item itself", path)
        else:
            raise BadRequest(400, f"items of type {kind!r} are not supported", f"{path}.type")

    def _message(self, item: dict[str, Any], path: str) -> None:
        role = _CHAT_ROLES.get(check(item.get("role"), request_fields.TEXT, f"{path}.role"))
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

    def _function_call(self, item: dict[str, Any], path: str) -> None:
        call_id, name, arguments = (
            check(item.get(key), request_fields.TEXT, f"{path}.{key}") for key in ("call_id", "name", "arguments")
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
        folder.add(check(item, request_fields.OBJECT, f"input[{i}]"), f"input[{i}]")
    return folder.messages


def tools_of(tools: list[dict[str, Any]], call: GatewayCall) -> list[dict[str, Any]]:
    """Return the functions in chat form. Tools that OpenAI runs itself have no effect here."""
    functions = []
    for i, tool in enumerate(tools):
        if tool.get("type") != "function":
            call.ignored.append(f"tools[{i}]")
            continue
        name = check(tool.get("name"), request_fields.TEXT, f"tools[{i}].name")
        function = {"name": name, "description": tool.get("description"), "parameters": tool.get("parameters")}
        given = {key: value for key, value in function.items() if value is not None}
        functions.append({"type": "function", "function": given})
    return functions


def _text(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for k, part in enumerate(check(content, request_fields.OBJECTS, path)):
        if part.get("type") == "refusal":
            texts.append(check(part.get("refusal"), request_fields.TEXT, f"{path}[{k}].refusal"))
        elif part.get("type") in _TEXTS:
            texts.append(check(part.get("text"), request_fields.TEXT, f"{path}[{k}].text"))
        else:
            problem = f"must be text: parts of type {part.get('type')!r} are not supported"
            raise BadRequest(400, problem, f"{path}[{k}].type")
    return "".join(texts)


# ---- server-sent events
#
# response.created, response.in_progress
# for each item: output_item.added, its content, output_item.done
# response.completed or response.incomplete


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
        yield replies.event(event | {"sequence_number": number})


def _place(item: dict[str, Any], index: int) -> Event:
    return {"content_index": 0, "output_index": index, "item_id": item["id"]}
