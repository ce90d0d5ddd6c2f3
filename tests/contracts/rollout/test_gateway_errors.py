"""Errors of the gateway as the agent's client sees them: cause, field, code, and whether the SDK retries."""

import asyncio
import json
import threading
from collections import Counter
from random import Random

import httpx
import openai
import pytest

from realsys.data.tokenizer import TextTokenizer
from realsys.errors import GenerationError, ServerBusy
from realsys.rollout.gateway import capture, gateway, routes, sampling
from tests.contracts.rollout.test_gateway_delivery import BODY, with_script
from tests.support.fuzz.mutations import Spoiler
from tests.support.gateway.replies import TOOL, golden_calls
from tests.support.serving.gateways import BOUND_S, USER, post
from tests.support.serving.reward_pools import until

RETRIES = 3


def chat(episode, **request):
    return episode.sdk(max_retries=RETRIES).chat.completions.create(model="m", messages=[USER], **request)


def test_wrong_key_is_an_authentication_error(tokenizer):
    async def body(episode, engine):
        url = episode.session.base_url.replace(episode.session.api_key, "wrong")
        with pytest.raises(openai.AuthenticationError, match="wrong key"):
            await episode.sdk(base_url=url).chat.completions.create(model="m", messages=[USER])
        assert episode.engine.calls == []

    with_script(tokenizer, body)


@pytest.mark.parametrize(
    ("request_body", "field"),
    [
        (b'{"messages": [', None),
        (b"[]", None),
        (b"\xff\xfe", None),
        (b'{"messages": "hello"}', "messages"),
        (b'{"messages": [{"role": "user", "content": 3}]}', "messages[0].content"),
        (b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": "many"}', "max_tokens"),
        (b'{"messages": [{"role": "user", "content": "a"}], "n": 1000}', "n"),
    ],
)
def test_malformed_body_is_refused_with_its_field(tokenizer, request_body, field):
    async def body(episode, engine):
        reply = await post(episode, "chat/completions", request_body)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"], error["type"]) == (400, field, "invalid_request_error")
        assert episode.engine.calls == []

    with_script(tokenizer, body)


def test_spoilt_requests_of_clients_end_no_service(tokenizer):
    """Requests of real clients, changed anywhere: a reply or a refusal with a cause, and never an error of a server."""
    spoiler, statuses = Spoiler(Random(0)), set[int]()

    async def body(episode, engine):
        async with httpx.AsyncClient(timeout=BOUND_S) as client:
            for name, call in golden_calls() * 5:
                url = f"{episode.session.base_url}{call['path']}"
                reply = await client.post(url, content=spoiler.spoil(json.dumps(call["body"]).encode()))
                assert reply.status_code in (200, 400, 413), (name, reply.text)
                statuses.add(reply.status_code)
        assert (await post(episode, "chat/completions", BODY)).status_code == 200 and statuses == {200, 400}

    with_script(tokenizer, body, "rollout.agent_limits.max_turns=10000", "data.max_prompt_tokens=4000")


def test_compressed_body_is_named(tokenizer):
    async def body(episode, engine):
        reply = await post(episode, "chat/completions", b"\x1f\x8b", headers={"content-encoding": "gzip"})
        assert reply.status_code == 415 and "send it as plain JSON" in reply.json()["error"]["message"]
        assert (await post(episode, "chat/completions/", BODY)).status_code == 200, (
            "a slash at the end is no other route"
        )

    with_script(tokenizer, body)


def test_too_large_body_is_refused(tokenizer, monkeypatch):
    monkeypatch.setattr(gateway, "MAX_BODY", 1000)

    async def body(episode, engine):
        reply = await post(episode, "chat/completions", b" " * 1001)
        assert reply.status_code == 413 and "over the limit of 1000 bytes" in reply.json()["error"]["message"]

    with_script(tokenizer, body)


def test_refusal_of_size_has_the_form_of_route(tokenizer, caplog, monkeypatch):
    monkeypatch.setattr(gateway, "MAX_BODY", 1000)

    async def body(episode, engine):
        reply = await post(episode, "messages", b" " * 1001)
        assert (reply.status_code, reply.json()["type"]) == (413, "error")
        assert reply.json()["error"]["message"] == "/messages: body is over the limit of 1000 bytes"
        assert episode.session.api_key not in reply.text + caplog.text

    with_script(tokenizer, body)


@pytest.mark.parametrize(("method", "route", "status"), [("POST", "embeddings", 404), ("GET", "chat/completions", 405)])
def test_unknown_route_or_method_is_refused(tokenizer, method, route, status):
    async def body(episode, engine):
        async with httpx.AsyncClient() as client:
            reply = await client.request(method, f"{episode.session.base_url}/{route}")
        assert reply.status_code == status and "chat/completions" in reply.json()["error"]["message"]

    with_script(tokenizer, body)


def test_prompt_without_room_has_the_code_of_openai(tokenizer):
    async def body(episode, engine):
        with pytest.raises(openai.BadRequestError) as caught:
            long = {"role": "user", "content": "1" * 500}
            await episode.sdk(max_retries=RETRIES).chat.completions.create(model="m", messages=[long])
        assert caught.value.code == "context_length_exceeded"

    with_script(tokenizer, body)


def test_failure_of_the_engine_is_not_retried(tokenizer):
    """The engine has given up after many servers. The episode fails, whatever the agent makes of the error."""

    async def body(episode, engine):
        with pytest.raises(openai.APIStatusError, match="no server can"):
            await chat(episode)
        assert len(episode.engine.calls) == 1
        with pytest.raises(GenerationError, match="no server can"):
            episode.session.check()

    with_script(tokenizer, body, errors=lambda: [GenerationError("no server can")])


def test_failure_that_may_pass_is_retried(tokenizer):
    async def body(episode, engine):
        assert (await chat(episode)).choices[0].message.content == "2"
        assert len(episode.engine.calls) == 2
        episode.session.check()

    with_script(tokenizer, body, errors=lambda: [ServerBusy("full")])


def test_messages_that_the_template_refuses_are_a_bad_request(tokenizer):
    async def body(episode, engine):
        with pytest.raises(openai.BadRequestError, match="data.chat_template is false"):
            await chat(episode)

    with_script(tokenizer, body, "data.chat_template=false")


def test_malformed_sampled_call_is_data(tokenizer):
    text = '<tool_call>\n{"name": "add", "arguments": {"a": "\\ud800"}}\n</tool_call>'

    async def body(episode, engine):
        reply = await chat(episode, tools=[TOOL])
        assert (reply.choices[0].message.content, reply.choices[0].message.tool_calls) == (text, None)
        assert episode.session.capture.metrics()["gateway/malformed_calls"] == 1
        episode.session.check()

    with_script(tokenizer, body, "generation.sampling.max_new_tokens=100", texts=lambda: [text])


@pytest.mark.parametrize("token", [99999, 1 << 31, 1 << 70])
@pytest.mark.parametrize(
    ("route", "request_body", "field"),
    [
        ("inference/v1/generate", {"token_ids": "TOKENS", "sampling_params": {"max_tokens": 2}}, "token_ids"),
        ("completions", {"prompt": "TOKENS"}, "prompt"),
        ("chat/completions", {"messages": [USER], "stop_token_ids": "TOKENS"}, "stop_token_ids"),
    ],
)
def test_token_outside_of_the_vocabulary_is_refused(tokenizer, route, request_body, field, token):
    async def body(episode, engine):
        reply = await post(episode, route, json.dumps(request_body).replace('"TOKENS"', f"[5, {token}]").encode())
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)
        assert episode.engine.calls == []
        episode.session.check()

    with_script(tokenizer, body)


@pytest.mark.parametrize("arguments", ["[" * 3000, '{"a":' * 3000, "9" * 5000], ids=["list", "object", "digits"])
def test_malformed_arguments_in_the_history_are_text(tokenizer, arguments):
    called = {"id": "abc", "type": "function", "function": {"name": "add", "arguments": arguments}}
    history = [USER, {"role": "assistant", "content": None, "tool_calls": [called]}, USER]

    async def body(episode, engine):
        assert (await post(episode, "chat/completions", {"messages": history})).status_code == 200
        episode.session.check()

    with_script(tokenizer, body, "data.max_prompt_tokens=30000")


def test_failure_that_may_pass_uses_no_turn(tokenizer):
    async def body(episode, engine):
        assert (await chat(episode)).choices[0].message.content == "2"

    with_script(
        tokenizer, body, "rollout.agent_limits.max_turns=1", errors=lambda: [ServerBusy("full"), ServerBusy("full")]
    )


def test_refused_call_uses_no_turn(tokenizer):
    async def body(episode, engine):
        long = {"role": "user", "content": "1" * 500}
        assert (await post(episode, "chat/completions", BODY | {"messages": [long]})).status_code == 400
        assert (await chat(episode)).choices[0].message.content == "2"
        assert episode.session.capture.metrics()["gateway/calls"] == 1

    with_script(tokenizer, body, "rollout.agent_limits.max_turns=1")


@pytest.mark.parametrize("n", [1, 2, 8])
def test_sampled_tokens_are_bounded_for_all_choices(tokenizer, n):
    async def body(episode, engine):
        await chat(episode, n=n)
        assert episode.session.sampled == 10 // n * n

    with_script(tokenizer, body, "rollout.gateway.max_sampled_tokens=10", texts=lambda: ["1" * 20])


def test_sampled_tokens_are_bounded_for_concurrent_calls(tokenizer):
    async def body(episode, engine):
        first = asyncio.create_task(post(episode, "chat/completions", BODY | {"max_tokens": 8}))
        await until(lambda: episode.engine.calls)
        second = asyncio.create_task(post(episode, "chat/completions", BODY))
        await until(lambda: len(episode.engine.calls) == 2)
        refused = await post(episode, "chat/completions", BODY)
        assert refused.status_code == 429 and "may sample the rest" in refused.json()["error"]["message"]
        engine.gate.set()
        await asyncio.gather(first, second)
        assert episode.session.sampled == 10
        assert (await post(episode, "chat/completions", BODY)).json()["error"]["code"] == "episode_limit_reached"

    with_script(tokenizer, body, "rollout.gateway.max_sampled_tokens=10", gate=asyncio.Event, texts=lambda: ["1" * 20])


def test_failures_and_names_of_models_are_bounded(tokenizer, monkeypatch):
    monkeypatch.setattr(capture, "MOST_FAILURES", 2)
    monkeypatch.setattr(capture, "MOST_MODELS", 2)

    async def body(episode, engine):
        for k in range(4):
            assert (await post(episode, "chat/completions", BODY | {"model": f"m{k}"})).status_code == 503
        engine.errors.clear()
        for k in range(4):
            assert (await post(episode, "chat/completions", BODY | {"model": f"m{k}"})).status_code == 200
        assert episode.session.capture.models() == ["policy", "m0"]
        with pytest.raises(ServerBusy, match="full"):  # of those that were not kept nobody knows that they passed
            episode.session.check()

    with_script(tokenizer, body, errors=lambda: [ServerBusy("full")] * 4)


def test_error_of_a_call_lists_ignored_fields(tokenizer):
    async def body(episode, engine):
        reply = await post(episode, "chat/completions", BODY | {"odd": 1})
        assert (reply.status_code, reply.headers["x-realsys-ignored"]) == (424, "odd")

    with_script(tokenizer, body, errors=lambda: [GenerationError("no server can")])


def test_turns_beyond_the_bound_are_refused(tokenizer):
    async def body(episode, engine):
        await chat(episode)
        with pytest.raises(openai.BadRequestError) as caught:
            await chat(episode)
        assert caught.value.code == "episode_limit_reached" and len(episode.engine.calls) == 1

    with_script(tokenizer, body, "rollout.agent_limits.max_turns=1")


def test_call_beyond_those_in_flight_waits_and_retries(tokenizer, monkeypatch):
    monkeypatch.setattr(sampling, "MAX_IN_FLIGHT", 1)

    async def body(episode, engine):
        first = asyncio.create_task(chat(episode))
        await until(lambda: episode.engine.calls)
        refused = await post(episode, "chat/completions", BODY)
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        second = asyncio.create_task(chat(episode, max_tokens=9))
        engine.gate.set()
        await asyncio.gather(first, second)

    with_script(tokenizer, body, gate=asyncio.Event)


def test_burst_is_bounded_too(tokenizer, monkeypatch):
    """Requests that arrive together are counted before their tasks begin."""
    monkeypatch.setattr(sampling, "MAX_IN_FLIGHT", 4)

    async def body(episode, engine):
        replies = [asyncio.create_task(post(episode, "chat/completions", BODY)) for _ in range(30)]
        await until(lambda: sum(reply.done() for reply in replies) == 26)
        engine.gate.set()
        codes = Counter(reply.status_code for reply in await asyncio.gather(*replies))
        assert codes == {200: 4, 429: 26} and len(episode.engine.calls) == 4

    with_script(tokenizer, body, gate=asyncio.Event)


@pytest.mark.parametrize("route", ["chat/completions", "tokenize", "messages/count_tokens"])
def test_text_that_fits_in_no_row_costs_no_other_episode(tokenizer, monkeypatch, route):
    """The size of a huge one is enough to refuse it. Another thread counts a long one, and nothing encodes it."""
    encoded, threads = [], []
    encode, count = TextTokenizer._encode, TextTokenizer.count

    def noting_size(self, text, special):
        encoded.append(len(text))
        return encode(self, text, special)

    def noting_thread(self, text):
        threads.append(threading.current_thread())
        return count(self, text)

    monkeypatch.setattr(TextTokenizer, "_encode", noting_size)
    monkeypatch.setattr(TextTokenizer, "count", noting_thread)
    monkeypatch.setattr(capture, "LONG_TEXT", 5000)

    async def body(episode, engine):
        size = capture.UNSEEN * episode.session.capture.context_length * tokenizer.longest_token
        for length, counted in ((size + 1, 0), (5001, 1)):
            messages = [{"role": "user", "content": "1" * length}]
            reply = await post(episode, route, {"model": "m", "max_tokens": 5, "messages": messages})
            assert reply.status_code == 400 and "maximum context length is 424 tokens" in reply.text
            assert len(threads) == counted
        assert threading.main_thread() not in threads and max(encoded, default=0) < 5000
        assert episode.engine.calls == []

    with_script(tokenizer, body)


def test_ignored_field_is_logged_once_and_counted(tokenizer, caplog):
    async def body(episode, engine):
        for _ in range(2):
            await chat(episode, response_format={"type": "json_object"}, logit_bias={"1": 2}, temperature=_)
        metrics = episode.session.capture.metrics()
        assert metrics["gateway/ignored_response_format"] == metrics["gateway/ignored_logit_bias"] == 2.0
        assert caplog.text.count("'response_format', which has no effect") == 1

    with_script(tokenizer, body)


def test_error_in_a_stream_reaches_the_sdk(tokenizer, monkeypatch):
    monkeypatch.setattr(routes, "KEEP_ALIVE_S", 0.01)

    async def body(episode, engine):
        stream = aiter(await chat(episode, stream=True))
        await anext(stream)
        engine.gate.set()
        with pytest.raises(openai.APIError, match="no server can"):
            await anext(stream)

    with_script(tokenizer, body, gate=asyncio.Event, errors=lambda: [GenerationError("no server can")])


def test_anthropic_errors_have_their_own_form(tokenizer):
    async def body(episode, engine):
        reply = await post(episode, "messages", {"model": "m", "max_tokens": 1, "messages": []})
        assert reply.status_code == 400 and reply.json()["type"] == "error"
        assert reply.json()["error"]["type"] == "invalid_request_error"

    with_script(tokenizer, body)
