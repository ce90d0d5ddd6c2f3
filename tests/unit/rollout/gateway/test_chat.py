"""OpenAI's chat completions, read by OpenAI's SDK."""

import json

import openai
import pytest

from realsys.rollout.gateway.chat import ChatDialect
from realsys.rollout.gateway.dialect import BadRequest
from tests.support.gateway.replies import TOOL, Endpoint, choice, generated, parse, reply_of, tool_call

ROUTE = "/v1/chat/completions"
QUESTION = [{"role": "user", "content": "2+3?"}]


def test_reply_has_text_reasoning_and_usage():
    endpoint = Endpoint(choice("five", "adding"))
    reply = endpoint.client().chat.completions.create(model="policy", messages=QUESTION)
    message = reply.choices[0].message
    assert (message.content, message.reasoning_content, message.tool_calls) == ("five", "adding", None)
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (3, 2, 5)
    assert reply.choices[0].finish_reason == "stop" and reply.model == "policy"


def test_tool_call_without_text_has_null_content():
    endpoint = Endpoint(choice("", None, tool_call(a=1)))
    reply = endpoint.client().chat.completions.create(model="policy", messages=QUESTION, tools=[TOOL])
    message = reply.choices[0].message
    assert message.content is None and reply.choices[0].finish_reason == "tool_calls"
    assert json.loads(message.tool_calls[0].function.arguments) == {"a": 1}


@pytest.mark.parametrize("early", [0, 3, 9])
@pytest.mark.parametrize("parts", [("five", None), ("", None, tool_call(a=1)), ("I add.", "hm", tool_call(a=1))])
def test_stream_adds_up_to_the_reply(parts, early):
    """The SDK's accumulator builds the same message from the events as from the whole reply."""
    endpoint = Endpoint(choice(*parts), early=early)
    client = endpoint.client()
    whole = client.chat.completions.create(model="policy", messages=QUESTION, tools=[TOOL])
    with client.chat.completions.stream(
        model="policy", messages=QUESTION, tools=[TOOL], stream_options={"include_usage": True}
    ) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_completion()
    ours, theirs = streamed.choices[0].message, whole.choices[0].message
    assert (ours.content or "", streamed.choices[0].finish_reason) == (
        theirs.content or "",
        whole.choices[0].finish_reason,
    )
    assert getattr(ours, "reasoning_content", None) == getattr(theirs, "reasoning_content", None)
    assert [(call.id, call.function.arguments) for call in ours.tool_calls or []] == [
        (call.id, call.function.arguments) for call in theirs.tool_calls or []
    ]
    assert streamed.usage == whole.usage and "chunk" in kinds


@pytest.mark.parametrize("early", [0, 3, 9])
def test_stream_of_several_choices_keeps_them_apart(early):
    endpoint = Endpoint(choice("one"), choice("two"), early=early)
    chunks = endpoint.client().chat.completions.create(model="policy", messages=QUESTION, n=2, stream=True)
    texts = {0: "", 1: ""}
    for chunk in chunks:
        for each in chunk.choices:
            texts[each.index] += each.delta.content or ""
    assert texts == {0: "one", 1: "two"} and endpoint.calls[0].n == 2


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_come_with_their_versions(stream):
    endpoint = Endpoint(choice("ok"))
    reply = endpoint.client().chat.completions.create(
        model="policy", messages=QUESTION, stream=stream, extra_body={"return_token_ids": True}
    )
    last = [chunk for chunk in reply if chunk.choices][-1] if stream else reply
    assert last.prompt_token_ids == [1, 2, 3]
    assert (last.choices[0].token_ids, last.choices[0].versions) == ([111, 107], [3, 3])


def test_token_ids_are_left_out_unless_wanted():
    text = ChatDialect().reply(parse(ROUTE, {"messages": QUESTION}), reply_of(choice())).decode()
    assert "token_ids" not in text and "versions" not in text


def test_logprobs_have_text_bytes_and_alternatives():
    endpoint = Endpoint(choice("ok"))
    endpoint.choices[0].completion = generated("o\u007f")
    object.__setattr__(endpoint.choices[0].completion, "top", [[(111, -0.5), (65, -2.0)], [(0xE2, -1.0), (66, -3.0)]])
    reply = endpoint.client().chat.completions.create(model="policy", messages=QUESTION, logprobs=True, top_logprobs=1)
    first, second = reply.choices[0].logprobs.content
    assert (first.token, first.bytes, first.logprob) == ("o", [111], -0.5)
    assert [(top.token, top.logprob) for top in first.top_logprobs] == [("o", -0.5)]
    assert [(top.token, top.bytes) for top in second.top_logprobs] == [("\ufffd", [0xE2])]  # half of a character


def test_tokens_are_written_as_ids_on_request():
    call = parse(ROUTE, {"messages": QUESTION, "logprobs": True, "return_tokens_as_token_ids": True})
    body = json.loads(ChatDialect().reply(call, reply_of(choice())))
    assert [entry["token"] for entry in body["choices"][0]["logprobs"]["content"]] == ["token_id:111", "token_id:107"]


def test_infinite_logprob_is_written_as_a_number():
    endpoint = Endpoint(choice())
    endpoint.choices[0].completion.logprobs[0] = -float("inf")
    reply = endpoint.client().chat.completions.create(model="policy", messages=QUESTION, logprobs=True)
    assert reply.choices[0].logprobs.content[0].logprob == -9999.0


def test_error_in_stream_raises_in_sdk():
    endpoint = Endpoint(choice())
    endpoint.failure = (503, "no server")
    with pytest.raises(openai.APIError, match="no server"):
        list(endpoint.client().chat.completions.create(model="policy", messages=QUESTION, stream=True))


def test_refused_request_raises_with_its_field():
    with pytest.raises(openai.BadRequestError) as caught:
        Endpoint(choice()).client().chat.completions.create(model="policy", messages=QUESTION, temperature="warm")
    assert caught.value.param == "temperature" and "must be a number" in caught.value.message


def test_settings_of_client_have_engine_names():
    call = parse(ROUTE, {"messages": QUESTION, "temperature": 0.3, "top_k": 5, "seed": 1, "min_tokens": 2})
    assert call.sampling == {"temperature": 0.3, "top_k": 5, "sampling_seed": 1, "min_new_tokens": 2}


def test_fields_without_effect_are_listed():
    body = {"messages": QUESTION, "response_format": {"type": "json_object"}, "invented": 1, "user": "u", "audio": None}
    assert parse(ROUTE, body | {"logit_bias": {}}).ignored == ["invented"]


@pytest.mark.parametrize(
    ("choice_of_tool", "parses", "ignored"),
    [
        ("auto", True, []),
        ("none", False, []),
        ("required", True, ["tool_choice"]),
        ({"type": "function", "function": {"name": "add"}}, True, ["tool_choice"]),
    ],
)
def test_tool_choice_can_only_forbid(choice_of_tool, parses, ignored):
    call = parse(ROUTE, {"messages": QUESTION, "tools": [TOOL], "tool_choice": choice_of_tool})
    assert (call.parse_tools, call.ignored) == (parses, ignored)


def test_newer_limit_of_tokens_wins():
    assert parse(ROUTE, {"messages": QUESTION, "max_tokens": 5, "max_completion_tokens": 7}).max_tokens == 7


def test_developer_messages_become_system_messages():
    call = parse(ROUTE, {"messages": [{"role": "developer", "content": "Be brief."}]})
    assert call.messages == [{"role": "system", "content": "Be brief."}]


def test_refusal_part_becomes_text():
    messages = [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}]
    assert parse(ROUTE, {"messages": messages}).messages[0]["content"] == [{"type": "text", "text": "No."}]


SCHEMA = {"type": "object", "required": ["a"]}
NAMED = {"type": "json_schema", "schema": SCHEMA, "name": "n"}
YES_NO = {"type": "or", "elements": [{"type": "const_string", "value": text} for text in ("yes", "no")]}


@pytest.mark.parametrize(
    ("route", "fields", "grammar", "named"),
    [
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            SCHEMA,
            [],
        ),
        ("/v1/chat/completions", {"response_format": {"type": "json_object"}}, {"type": "object"}, []),
        ("/v1/chat/completions", {"response_format": {"type": "text"}}, None, []),
        ("/v1/chat/completions", {"response_format": {"type": "image"}}, None, ["response_format"]),
        ("/v1/chat/completions", {"structured_outputs": {"json": json.dumps(SCHEMA)}}, SCHEMA, []),
        ("/v1/chat/completions", {"structured_outputs": {"choice": ["yes", "no"], "regex": None}}, YES_NO, []),
        ("/v1/chat/completions", {"structured_outputs": {"regex": "a+"}}, {"type": "regex", "pattern": "a+"}, []),
        ("/v1/completions", {"structured_outputs": {"grammar": "r"}}, {"type": "grammar", "grammar": "r"}, []),
        ("/v1/responses", {"text": {"format": NAMED, "verbosity": "medium"}}, SCHEMA, []),
        ("/v1/responses", {"text": {"format": NAMED, "verbosity": "low"}}, SCHEMA, ["text"]),
        ("/v1/responses", {"text": {"format": {"type": "text"}}}, None, []),
        ("/v1/messages", {"output_config": {"format": NAMED}}, SCHEMA, []),
        ("/v1/messages", {"output_config": {"effort": "high"}}, None, ["output_config"]),
        ("/v1/messages", {"output_format": NAMED}, SCHEMA, []),
        ("/inference/v1/generate", {"sampling_params": {"structured_outputs": {"json": SCHEMA}}}, SCHEMA, []),
    ],
)
def test_form_of_the_completion_is_read_in_every_dialect(route, fields, grammar, named):
    prompts = {
        "/v1/completions": {"prompt": "x"},
        "/v1/responses": {"input": "x"},
        "/inference/v1/generate": {"token_ids": [1]},
    }
    call = parse(route, prompts.get(route, {"messages": QUESTION}) | {"max_tokens": 5} | fields)
    expected = {"type": "json_schema", "json_schema": grammar} if grammar in (SCHEMA, {"type": "object"}) else grammar
    assert (call.grammar and call.grammar[0]) == expected
    assert [name for name in call.ignored if name != "max_tokens"] == named


@pytest.mark.parametrize(
    ("form", "field"),
    [
        ({"type": "json_schema", "json_schema": 3}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"schema": []}}, "response_format.schema"),
        ({"json": "{"}, "response_format.json"),
        ({"choice": [3]}, "response_format.choice[0]"),
        ({"regex": 3}, "response_format.regex"),
    ],
)
def test_malformed_form_names_the_field(form, field):
    with pytest.raises(BadRequest) as refused:
        parse("/v1/chat/completions", {"messages": QUESTION, "response_format": form})
    assert refused.value.field == field
