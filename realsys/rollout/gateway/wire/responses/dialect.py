"""POST /v1/responses of OpenAI. Responses are not stored: a request carries its whole conversation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from realsys.rollout.gateway.wire import fields, frames
from realsys.rollout.gateway.wire.base import BadRequest, Call, Head, Reply, Sent
from realsys.rollout.gateway.wire.body import limits, read, tool_choice, top_logprobs
from realsys.rollout.gateway.wire.responses.events import (
    Event,
    begin_events,
    call_events,
    end_events,
    numbered,
    opening_events,
    text_event,
)
from realsys.rollout.gateway.wire.responses.items import messages_of, tools_of

_LOGPROBS = "message.output_text.logprobs"
_OPENING = len(opening_events({}))  # number of events
#: fields that need stored state, and what a client does instead
_STATEFUL = {
    "previous_response_id": "responses are not stored: send the whole conversation as input",
    "conversation": "conversations are not stored: send the whole conversation as input",
    "prompt": "prompts are not stored: send instructions and input",
    "background": "responses are not stored: wait for the reply",
}


class ResponsesDialect(frames.OpenAIErrors):
    """OpenAI's responses."""

    def parse(self, body: bytes, headers: Mapping[str, str]) -> Call:
        request = read(body, fields.RESPONSES)
        for name, remedy in _STATEFUL.items():
            if request.get(name):
                raise BadRequest(400, remedy, name, "unsupported_parameter")
        call = limits(Call("chat", messages=messages_of(request.get("input"), request.get("instructions"))), request)
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

    def reply(self, call: Call, reply: Reply) -> bytes:
        return frames.encode(_finished(call, reply))

    def opening(self, call: Call, head: Head) -> bytes:
        return b"".join(numbered(opening_events(_body(call, head)), 0))

    def part(self, call: Call, head: Head, index: int, sent: Sent, reasoning: str, text: str) -> bytes:
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

    def events(self, call: Call, reply: Reply, sent: Sequence[Sent]) -> Iterator[bytes]:
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
        first, sent.events = _OPENING + sent.events, sent.events + len(events)
        return b"".join(numbered(events, first))

    def error_event(self, status: int, message: str) -> bytes:
        error = frames.openai_error(status, message)["error"]
        # The fields of OpenAI's event, and "error", which makes its SDK raise.
        event = {"type": "error", "code": error["type"], "message": message, "param": None, "sequence_number": 0}
        return frames.event(event | {"error": error})


def _body(call: Call, head: Head) -> dict[str, Any]:
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


def _finished(call: Call, reply: Reply) -> dict[str, Any]:
    (choice,) = reply.choices
    cut = choice.finish_reason == "length"
    usage = frames.usage(reply)
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


def _output(call: Call, reply: Reply, status: str) -> list[dict[str, Any]]:
    (choice,) = reply.choices
    output: list[dict[str, Any]] = []
    if choice.reasoning:
        output.append(_reasoning(reply, choice.reasoning))
    # A reply without a tool call always has a message, so that the client has something to send back.
    if choice.text or not choice.tool_calls:
        logprobs = frames.token_logprobs(call, reply, choice) if call.logprobs else []
        output.append(_message(reply, choice.text, logprobs, status))
    for tool_call in choice.tool_calls:
        item = {"type": "function_call", "id": f"fc_{tool_call['id']}", "call_id": tool_call["id"]}
        output.append(item | tool_call["function"] | {"status": status})
    return output


def _reasoning(head: Head, text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": f"rs_{head.id}", "summary": [], "content": content}


def _message(head: Head, text: str, logprobs: list[dict[str, Any]], status: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    message = {"type": "message", "id": f"msg_{head.id}", "role": "assistant", "status": status}
    return message | {"content": [part]}
