"""Anthropic's messages: blocks that are sent back, and the events of a stream (its SDK reads them in contracts)."""

import json

import pytest

from realsys.rollout.conversation import forms
from realsys.rollout.gateway.dialect import Choice
from realsys.rollout.gateway.messages import MessagesDialect
from tests.support.gateway.replies import choice, generated, parse, reply_of, streamed, tool_call

ROUTE = "/v1/messages"
USER = {"role": "user", "content": "2+3?"}
TOOL = {"name": "add", "description": "Add.", "input_schema": {"type": "object"}}
PARTS = [("five", None), ("five", "adding"), ("", None, tool_call(a=1)), ("I add.", "hm", tool_call(a=1)), ("", None)]
DIALECT = MessagesDialect()


def events_of(*choices, early=0):
    call, reply = parse(ROUTE, {"messages": [USER]}), reply_of(*choices)
    raw = b"".join([DIALECT.opening(call, reply), *streamed(DIALECT, call, reply, early)]).decode()
    pairs = [block.split("\n") for block in raw.strip().split("\n\n")]
    events = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in pairs]
    assert all(name == event["type"] for name, event in events)
    return [event for _, event in events]


def body_of(each):
    return json.loads(DIALECT.reply(parse(ROUTE, {"messages": [USER]}), reply_of(each)))


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("parts", PARTS)
def test_blocks_sent_back_are_the_returned_message(parts, thinking):
    """Also without the thinking blocks, which some clients drop."""
    returned = choice(*parts)
    blocks = [block for block in body_of(returned)["content"] if thinking or block["type"] != "thinking"]
    later = parse(ROUTE, {"system": "Be brief.", "messages": [USER, {"role": "assistant", "content": blocks}, USER]})
    system = {"role": "system", "content": "Be brief."}
    assert forms(later.messages) == forms([system, USER, returned.message(), USER])


def test_tool_results_become_tool_messages_before_the_text():
    content = [
        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "5"}]},
        {"type": "tool_result", "tool_use_id": "b", "content": "6"},
        {"type": "tool_result", "tool_use_id": "c"},
        {"type": "text", "text": "Go on."},
    ]
    assert parse(ROUTE, {"messages": [{"role": "user", "content": content}]}).messages == [
        {"role": "tool", "tool_call_id": "a", "content": "5"},
        {"role": "tool", "tool_call_id": "b", "content": "6"},
        {"role": "tool", "tool_call_id": "c", "content": ""},
        {"role": "user", "content": "Go on."},
    ]


@pytest.mark.parametrize(
    ("each", "reason", "stop"),
    [
        (choice("five"), "end_turn", None),
        (choice("five", stop="\n"), "stop_sequence", "\n"),
        (choice("", None, tool_call(a=1)), "tool_use", None),
        (Choice(generated(), "fi", finish_reason="length"), "max_tokens", None),
    ],
)
def test_end_is_named_as_anthropic_does(each, reason, stop):
    body = body_of(each)
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, stop)
    assert events_of(each)[-2]["delta"] == {"stop_reason": reason, "stop_sequence": stop}


@pytest.mark.parametrize("early", [0, 3, 9])
@pytest.mark.parametrize("parts", PARTS)
def test_stream_adds_up_to_the_reply(parts, early):
    events, blocks = events_of(choice(*parts), early=early), []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"] | {"json": ""})
        if event["type"] == "content_block_delta":
            kind = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
            key = kind.get(event["delta"]["type"], "json")
            blocks[event["index"]][key] += event["delta"].get(key, event["delta"].get("partial_json"))
    for block in blocks:
        arguments = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(arguments)
    assert blocks == body_of(choice(*parts))["content"]
    assert [events[0]["type"], *(event["type"] for event in events[-2:])] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    assert events[-2]["usage"]["input_tokens"] == 3


def test_tools_and_settings_become_those_of_a_chat():
    body = {"messages": [USER], "tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}], "top_k": 3}
    call = parse(ROUTE, body | {"stop_sequences": ["\n"], "tool_choice": {"type": "any"}, "max_tokens": 7})
    function = {"name": "add", "description": "Add.", "parameters": {"type": "object"}}
    assert call.tools == [{"type": "function", "function": function}]
    assert (call.stop, call.max_tokens, call.sampling) == (("\n",), 7, {"top_k": 3})
    assert call.ignored == ["tools[1]", "tool_choice"]


def test_system_blocks_become_one_system_message():
    system = [
        {"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "brief."},
    ]
    assert parse(ROUTE, {"messages": [USER], "system": system}).messages[0]["content"] == "Be\nbrief."


def test_errors_have_the_form_of_anthropic():
    error = {"type": "error", "error": {"type": "rate_limit_error", "message": "n: too many"}}
    assert json.loads(DIALECT.error(429, "too many", "n")) == error
    assert DIALECT.error_event(503, "no server").startswith(b'event: error\ndata: {"type":"error"')


def test_count_of_tokens():
    assert json.loads(DIALECT.count(12)) == {"input_tokens": 12}
