"""Refusals of requests: each names the field, and none is an exception of another kind."""

from __future__ import annotations

import contextlib
import json
from random import Random

import pytest

from realsys.rollout.gateway import request_fields
from realsys.rollout.gateway.dialect import BadRequest
from realsys.rollout.gateway.request_fields import check
from realsys.rollout.gateway.tokenize import TokenizeDialect
from tests.support.gateway.replies import DIALECTS, parse

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
USER = {"role": "user", "content": "hi"}
ROUTES = {
    CHAT: request_fields.CHAT,
    RESPONSES: request_fields.RESPONSES,
    MESSAGES: request_fields.MESSAGES,
    GENERATE: request_fields.GENERATE,
    COMPLETIONS: request_fields.COMPLETIONS,
}
KEYS = (
    *("type", "role", "content", "text", "refusal", "tool_calls", "function", "name", "arguments", "id", "input"),
    *("thinking", "tool_use_id", "call_id", "output", "summary", "effort", "input_schema", "parameters"),
)
VALUES = (
    *("message", "function_call", "function_call_output", "reasoning", "text", "output_text", "refusal", "tool_use"),
    *("tool_result", "thinking", "user", "assistant", "system", "function", "auto", None, True, 0, -1, 2**70, 0.5),
)


def any_json(random, depth=4):
    """Return a value of the shapes and words that requests have, in any order."""
    kind = random.randrange(4 if depth else 2)
    if kind == 2:
        return [any_json(random, depth - 1) for _ in range(random.randrange(3))]
    if kind == 3:
        return {random.choice(KEYS): any_json(random, depth - 1) for _ in range(random.randrange(6))}
    return random.choice(VALUES)


@pytest.mark.parametrize(
    ("route", "body", "field"),
    [
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hi"}, "messages"),
        (CHAT, {"messages": ["hi"]}, "messages[0]"),
        (CHAT, {"messages": [{"role": "robot"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        (CHAT, {"messages": [USER], "continue_final_message": True}, "continue_final_message"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (CHAT, {"messages": [USER | {"tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
        (CHAT, {"messages": [{"role": []}]}, "messages[0].role"),
        (MESSAGES, {"messages": [USER], "tool_choice": {"type": []}}, "tool_choice.type"),
        (CHAT, {"messages": [USER], "n": 0}, "n"),
        (CHAT, {"messages": [USER], "n": True}, "n"),
        (CHAT, {"messages": [USER], "n": 10**400}, "n"),
        (CHAT, {"messages": [USER], "temperature": "0"}, "temperature"),
        (CHAT, {"messages": [USER], "stop": [1]}, "stop[0]"),
        (CHAT, {"messages": [USER], "stream": "yes"}, "stream"),
        (CHAT, {"messages": [USER], "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"messages": [USER], "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": [USER], "tools": [{"type": "web_search"}]}, "tools[0]"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [1, -2]}, "prompt[1]"),
        (GENERATE, {"token_ids": []}, "token_ids"),
        (GENERATE, {"token_ids": [1, True]}, "token_ids[1]"),
        (GENERATE, {"token_ids": [1], "sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
        (GENERATE, {"token_ids": [1], "stream": "yes"}, "stream"),
        (RESPONSES, {"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        (RESPONSES, {"input": "a", "conversation": "c"}, "conversation"),
        (RESPONSES, {"input": "a", "background": True}, "background"),
        (RESPONSES, {"input": []}, "input"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        (RESPONSES, {"input": [{"type": "computer_call"}]}, "input[0].type"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        (RESPONSES, {"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, "input[0].arguments"),
        (MESSAGES, {"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        (MESSAGES, {"messages": [USER, {"role": "assistant", "content": "I"}]}, "messages"),
        (MESSAGES, {"messages": [USER], "max_tokens": "many"}, "max_tokens"),
        (MESSAGES, {"messages": [USER], "stop_sequences": [3]}, "stop_sequences[0]"),
    ],
)
def test_wrong_field_is_named(route, body, field):
    with pytest.raises(BadRequest) as caught:
        parse(route, body)
    assert (caught.value.status, caught.value.field) == (400, field)
    error = json.loads(DIALECTS[route].error(caught.value.status, caught.value.message, field))["error"]
    assert error["type"] == "invalid_request_error" and field in error["message"]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"a"', b"\xff", b"[" * 100_000, b'{"messages": "\\ud800"}']
)
def test_malformed_body_is_a_bad_request(route, body):
    with pytest.raises(BadRequest):
        DIALECTS[route].parse(body, {})


@pytest.mark.parametrize("route", ROUTES)
def test_any_json_is_read_or_refused(route):
    """No value of any field raises anything but BadRequest."""
    random, listed = Random(1), ROUTES[route]
    names = [*listed.honoured, *listed.overridden, *listed.ignored]
    valid = {"messages": [USER], "prompt": "a", "input": "a", "token_ids": [1]}
    read = 0
    for _ in range(4000):
        body = {name: valid[name] for name in listed.required}
        for name in random.choices([*names, *listed.required * 5], k=2):
            body[name] = random.choice([any_json(random), [any_json(random)], [USER, any_json(random, 5)]])
        with contextlib.suppress(BadRequest):
            parse(route, body)
            read += 1
    assert 0 < read < 4000


@pytest.mark.parametrize("route", ROUTES)
def test_null_counts_as_absent(route):
    listed = ROUTES[route]
    valid = {"messages": [USER], "prompt": "a", "input": "a", "token_ids": [1]}
    body = {name: valid[name] for name in listed.required}
    nulls = dict.fromkeys([*listed.honoured, *listed.overridden, *listed.accepted, *listed.ignored]) | body
    assert parse(route, nulls) == parse(route, body)


@pytest.mark.parametrize("listed", [*ROUTES.values(), request_fields.GENERATE_SAMPLING, request_fields.TOKENIZE])
def test_field_has_one_meaning_per_route(listed):
    groups = [set(listed.honoured), set(listed.overridden), set(listed.accepted), set(listed.ignored)]
    assert sum(map(len, groups)) == len(set().union(*groups)) and set(listed.required) <= set(listed.honoured)


def test_tokenize_wants_either_text_or_messages():
    dialect = TokenizeDialect()
    assert dialect.parse(b'{"prompt": "a"}', {}).text == "a"
    assert dialect.parse(b'{"messages": [{"role": "user", "content": "a"}]}', {}).kind == "chat"
    for body in (b"{}", b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}'):
        with pytest.raises(BadRequest):
            dialect.parse(body, {})


@pytest.mark.parametrize(("route", "body"), [(CHAT, {"messages": [USER]}), (COMPLETIONS, {"prompt": "a"})])
@pytest.mark.parametrize("name", ["skip_special_tokens", "add_special_tokens", "include_reasoning"])
def test_field_that_would_change_the_reply_is_listed(route, body, name):
    assert [name] in [parse(route, body | {name: value}).ignored for value in (True, False)]


def test_value_of_any_depth_is_described():
    value = []
    for _ in range(50_000):
        value = [value]
    with pytest.raises(BadRequest, match="a positive integer, not a value of so many levels"):
        check(value, request_fields.COUNT, "n")
