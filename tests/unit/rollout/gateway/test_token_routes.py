"""Text completions, token ids in and out, tokenize, models."""

import json

import pytest
from renderers.client import _parse_completion_logprobs, parse_generate_response

from realsys.rollout.gateway.generate import GenerateDialect
from realsys.rollout.gateway.tokenize import TokenizeDialect, model, models
from tests.support.gateway.replies import Choice, Endpoint, choice, generated, parse, reply_of, tool_call

ROUTE = "/v1/completions"


@pytest.mark.parametrize("prompt", ["2+3=", ["2+3="]])
def test_text_prompt_is_kept_as_text(prompt):
    call = parse(ROUTE, {"prompt": prompt})
    assert (call.kind, call.text, call.max_tokens) == ("text", "2+3=", 16)  # OpenAI's default of this route


@pytest.mark.parametrize("prompt", [[5, 6], [[5, 6]]])
def test_token_prompt_is_kept_as_tokens(prompt):
    call = parse(ROUTE, {"prompt": prompt})
    assert (call.kind, call.token_ids) == ("tokens", [5, 6])


@pytest.mark.parametrize("stream", [False, True])
def test_text_completion_has_older_logprobs(stream):
    reply = Endpoint(choice("ok")).client().completions.create(model="policy", prompt="a", logprobs=0, stream=stream)
    each = next(chunk for chunk in reply if chunk.choices[0].text) if stream else reply
    assert each.choices[0].text == "ok" and each.choices[0].finish_reason == "stop"
    assert each.choices[0].logprobs.to_dict() == {
        "tokens": ["o", "k"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{}, {}],
        "text_offset": [0, 1],
    }


def test_text_completion_never_ends_with_tool_calls():
    reply = Endpoint(choice("ok", None, tool_call(a=1))).client().completions.create(model="policy", prompt="a")
    assert reply.choices[0].finish_reason == "stop"


def test_text_completion_returns_ids_and_versions():
    extra = {"return_token_ids": True}
    reply = Endpoint(choice("ok")).client().completions.create(model="policy", prompt="a", extra_body=extra)
    each = reply.choices[0]
    assert (each.token_ids, each.versions, each.prompt_token_ids) == ([111, 107], [3, 3], [1, 2, 3])


def test_generated_tokens_satisfy_the_client_of_renderers():
    """Its own validation reads the reply: one entry per token, named by its id, with a finite log-prob."""
    call = parse("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {"logprobs": 1, "max_tokens": 4}})
    assert (call.kind, call.token_ids, call.max_tokens, call.top_logprobs) == ("tokens", [1, 2], 4, 0)
    body = parse_generate_response(GenerateDialect().reply(call, reply_of(choice("ok"))))
    each = body["choices"][0]
    assert _parse_completion_logprobs(each, each["token_ids"]) == [-0.5, -0.5]
    assert (each["token_ids"], each["versions"], each["finish_reason"]) == ([111, 107], [3, 3], "stop")
    assert body["request_id"] == "reply-1" and "prompt_token_ids" not in body


def test_cut_generation_ends_with_length():
    cut = Choice(generated("ok", "length"), "ok", finish_reason="length")
    call = parse("/inference/v1/generate", {"token_ids": [1], "return_token_ids": True})
    body = json.loads(GenerateDialect().reply(call, reply_of(cut)))
    assert body["choices"][0]["finish_reason"] == "length" and body["prompt_token_ids"] == [1, 2, 3]


def test_settings_of_generate_are_read_from_their_object():
    settings = {"temperature": 0.5, "stop_token_ids": [7], "skip_special_tokens": False, "logit_bias": {"5": 1}}
    call = parse("/inference/v1/generate", {"token_ids": [1], "sampling_params": settings, "features": {}})
    assert (call.sampling, call.stop_token_ids) == ({"temperature": 0.5}, (7,))
    assert call.ignored == ["sampling_params.logit_bias", "features"]


def test_models_carry_their_longest_sequence():
    listed = json.loads(models(["policy"], 1, 512))
    assert listed["data"] == [json.loads(model("policy", 1, 512))]
    assert (listed["data"][0]["id"], listed["data"][0]["max_model_len"]) == ("policy", 512)


def test_tokenize_counts_its_tokens():
    assert json.loads(TokenizeDialect().reply([4, 5], 512))["count"] == 2
