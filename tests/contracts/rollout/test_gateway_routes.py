"""Every route of the gateway over real sockets and the real engine, with OpenAI's SDK and httpx."""

import asyncio
import json

import httpx
import pytest

from tests.support.serving.gateways import USER, over_server, post


def with_server(server, tokenizer, body, *settings):
    async def run():
        async with over_server(server, tokenizer, *settings) as episode:
            return await body(episode)

    return asyncio.run(run())


def test_chat_returns_what_the_engine_sampled(server, tokenizer):
    async def body(episode):
        reply = await episode.sdk().chat.completions.create(
            model="any", messages=[USER], logprobs=True, top_logprobs=2, extra_body={"return_token_ids": True}
        )
        (tokens, completion), (row,) = episode.engine.returned[0], episode.session.capture.rows()
        choice = reply.choices[0]
        assert reply.model == "any" and reply.prompt_token_ids == tokens
        assert choice.token_ids == completion.tokens.tolist() and choice.versions == completion.versions.tolist()
        assert [entry.logprob for entry in choice.logprobs.content] == pytest.approx(completion.logprobs.tolist())
        assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
        assert row.tokens.tolist() == tokens + completion.tokens.tolist()
        assert reply.usage.completion_tokens == len(completion.tokens) == row.loss_tokens

    with_server(server, tokenizer, body)


def test_later_turns_extend_one_row(server, tokenizer):
    async def body(episode):
        messages, sdk = [USER], episode.sdk()
        for _ in range(4):
            reply = await sdk.chat.completions.create(model="m", messages=messages)
            messages += [reply.choices[0].message.model_dump(), USER]
        (row,) = episode.session.capture.rows()
        tokens, completion = episode.engine.returned[-1]
        assert row.tokens.tolist() == tokens + completion.tokens.tolist()
        assert row.loss_tokens == sum(len(completion.tokens) for _, completion in episode.engine.returned)
        assert episode.session.capture.metrics()["gateway/calls"] == 4.0

    with_server(server, tokenizer, body)


def test_stream_has_the_text_usage_and_ids(server, tokenizer):
    async def body(episode):
        stream = await episode.sdk().chat.completions.create(
            model="m",
            messages=[USER],
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True},
        )
        chunks = [chunk async for chunk in stream]
        _, completion = episode.engine.returned[0]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == tokenizer.completion_text(completion.tokens.tolist())
        assert chunks[-1].usage.completion_tokens == len(completion.tokens)
        end = [chunk.choices[0] for chunk in chunks if chunk.choices][-1]
        assert end.token_ids == completion.tokens.tolist() and end.finish_reason in ("stop", "length")
        assert len(episode.row_tokens()) == 1

    with_server(server, tokenizer, body)


def test_stream_ends_with_done(server, tokenizer):
    async def body(episode):
        reply = await post(episode, "chat/completions", {"messages": [USER], "stream": True})
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.text.endswith("data: [DONE]\n\n")

    with_server(server, tokenizer, body)


def test_several_choices_are_several_rows(server, tokenizer):
    async def body(episode):
        reply = await episode.sdk().chat.completions.create(model="m", messages=[USER], n=3)
        texts = [choice.message.content for choice in reply.choices]
        rows = episode.session.capture.rows()
        assert [choice.index for choice in reply.choices] == [0, 1, 2] and len(set(texts)) == len(rows) == 3
        assert sum(row.loss_tokens for row in rows) == reply.usage.completion_tokens

    with_server(server, tokenizer, body)


def test_stop_string_ends_the_text_only(server, tokenizer):
    """The text ends before the stop string; the recorded tokens contain it."""

    async def body(episode):
        whole = (await episode.sdk().chat.completions.create(model="m", messages=[USER])).choices[0].message.content
        stop = next(character for character in whole[3:] if character.isascii())
        again = episode.another(episode=0)  # the same seed
        sdk = episode.sdk(base_url=again.base_url, api_key=again.api_key)
        choice = (await sdk.chat.completions.create(model="m", messages=[USER], stop=stop)).choices[0]
        assert choice.message.content == whole.partition(stop)[0] and choice.finish_reason == "stop"
        _, completion = episode.engine.returned[-1]
        assert tokenizer.decode(completion.tokens.tolist()).endswith(stop)
        await again.close()

    with_server(server, tokenizer, body)


def test_text_completion_has_text_and_token_prompts(server, tokenizer):
    async def body(episode):
        sdk = episode.sdk()
        first = await sdk.completions.create(model="m", prompt="1+1=", max_tokens=4)
        assert first.usage.completion_tokens <= 4 and first.choices[0].finish_reason in ("stop", "length")
        ids = tokenizer.encode_text("2+2=")
        await sdk.completions.create(model="m", prompt=ids, max_tokens=4)
        assert episode.engine.calls[1].token_ids == ids
        extended = f"1+1={first.choices[0].text}"
        await sdk.completions.create(model="m", prompt=extended, max_tokens=4)
        (tokens, completion) = episode.engine.returned[0]
        assert episode.engine.calls[2].token_ids == tokens + completion.tokens.tolist()

    with_server(server, tokenizer, body)


def test_generate_takes_and_returns_token_ids(server, tokenizer):
    async def body(episode):
        ids = tokenizer.encode_chat([USER])
        request = {"model": "m", "token_ids": ids, "sampling_params": {"max_tokens": 6, "logprobs": 1}}
        url = episode.session.base_url.removesuffix("/v1") + "/inference/v1/generate"
        sdk = episode.sdk()
        reply = await sdk.post(url, cast_to=dict, body=request, options={"headers": {"X-Session-ID": "7"}})
        (tokens, completion), choice = episode.engine.returned[0], reply["choices"][0]
        assert tokens == ids and choice["token_ids"] == completion.tokens.tolist()
        names = [entry["token"] for entry in choice["logprobs"]["content"]]
        assert names == [f"token_id:{token}" for token in completion.tokens.tolist()]
        assert episode.row_tokens() == [ids + completion.tokens.tolist()]

    with_server(server, tokenizer, body)


def test_generate_streams_one_event_per_choice(server, tokenizer):
    async def body(episode):
        ids = tokenizer.encode_chat([USER])
        request = {"token_ids": ids, "sampling_params": {"n": 2, "max_tokens": 6, "logprobs": 1}, "stream": True}
        reply = await post(episode, "inference/v1/generate", request | {"stream_options": {"include_usage": True}})
        assert reply.headers["content-type"].startswith("text/event-stream")
        *events, end = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
        *choices, usage = [json.loads(event) for event in events]
        completions = [completion for _, completion in episode.engine.returned]
        assert end == "[DONE]" and usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == sum(len(completion.tokens) for completion in completions)
        sent = [event["choices"][0] for event in choices]
        assert [(choice["index"], len(choice["logprobs"]["content"])) for choice in sent] == [
            (index, len(choice["token_ids"])) for index, choice in enumerate(sent)
        ]
        tokens = [completion.tokens.tolist() for completion in completions]
        assert sorted(choice["token_ids"] for choice in sent) == sorted(tokens)
        assert sorted(episode.row_tokens()) == sorted(ids + each for each in tokens)

    with_server(server, tokenizer, body)


def test_responses_and_messages_are_answered(server, tokenizer):
    async def body(episode):
        reply = await episode.sdk().responses.create(model="m", input="1+1=")
        _, first = episode.engine.returned[0]
        assert reply.output_text == tokenizer.completion_text(first.tokens.tolist())
        headers = {"x-api-key": episode.session.api_key, "anthropic-version": "2023-06-01"}
        message = {"model": "m", "max_tokens": 8, "messages": [USER]}
        answer = (await post(episode, "messages", message, headers=headers)).json()
        _, second = episode.engine.returned[1]
        assert answer["content"][0]["text"] == tokenizer.completion_text(second.tokens.tolist())
        counted = (await post(episode, "messages/count_tokens", {"model": "m", "messages": [USER]})).json()
        assert counted["input_tokens"] == len(tokenizer.encode_chat([USER]))

    with_server(server, tokenizer, body)


def test_models_tell_the_context_length(server, tokenizer):
    async def body(episode):
        cards = [card async for card in await episode.sdk().models.list()]
        assert [card.max_model_len for card in cards] == [424] and cards[0].id == "policy"
        assert (await episode.sdk().models.retrieve("other/name")).max_model_len == 424
        async with httpx.AsyncClient() as client:
            head = await client.head(f"{episode.session.base_url}/models")
        assert (head.status_code, head.content) == (200, b"")

    with_server(server, tokenizer, body)


def test_tokenize_gives_the_tokens_of_a_call(server, tokenizer):
    async def body(episode):
        reply = (await post(episode, "tokenize", {"messages": [USER]})).json()
        await episode.sdk().chat.completions.create(model="m", messages=[USER])
        assert reply["tokens"] == episode.engine.calls[0].token_ids and reply["max_model_len"] == 424

    with_server(server, tokenizer, body)


@pytest.mark.parametrize("form", ["{url}/v1/chat/completions", "{url}/chat/completions", "{host}/v1/chat/completions"])
def test_key_may_be_in_path_or_header(server, tokenizer, form):
    async def body(episode):
        url = episode.session.base_url.removesuffix("/v1")
        host, _, _ = url.partition("/e/")
        headers = {"authorization": f"Bearer {episode.session.api_key}"} if form.startswith("{host}") else {}
        async with httpx.AsyncClient() as client:
            reply = await client.post(form.format(url=url, host=host), json={"messages": [USER]}, headers=headers)
        assert reply.status_code == 200

    with_server(server, tokenizer, body)


def test_sampling_of_the_agent_is_recorded_not_used(server, tokenizer):
    async def body(episode):
        await episode.sdk().chat.completions.create(model="m", messages=[USER], temperature=0.1, max_tokens=5)
        spec, metrics = episode.engine.calls[0].spec, episode.session.capture.metrics()
        assert (spec.temperature, spec.max_new_tokens) == (1.0, 5)
        assert metrics["gateway/asked_temperature"] == 0.1

    with_server(server, tokenizer, body)


def test_request_mode_samples_as_the_agent_asks(server, tokenizer):
    async def body(episode):
        for _ in range(2):
            await episode.sdk().chat.completions.create(model="m", messages=[USER], temperature=0)
        (_, first), (_, second) = episode.engine.returned
        assert first.tokens.tolist() == second.tokens.tolist()
        assert episode.engine.calls[0].spec.temperature == 0

    with_server(server, tokenizer, body, "rollout.gateway.sampling=request")


def test_ignored_fields_are_listed_in_a_header(server, tokenizer):
    async def body(episode):
        reply = await post(episode, "chat/completions", {"messages": [USER], "odd": 1, "bad\r\nname": 2})
        assert reply.status_code == 200 and reply.headers["x-realsys-ignored"] == "odd, bad??name"

    with_server(server, tokenizer, body)


@pytest.mark.parametrize("route", ["chat/completions", "tokenize", "messages/count_tokens"])
def test_every_route_lists_its_ignored_fields(server, tokenizer, route):
    async def body(episode):
        reply = await post(episode, route, {"messages": [USER], "odd": 1})
        assert reply.status_code == 200 and reply.headers["x-realsys-ignored"] == "odd"

    with_server(server, tokenizer, body)


@pytest.mark.parametrize(("mode", "listed"), [("request", "seed"), ("policy", None)])
def test_seed_is_listed_where_others_are_obeyed(server, tokenizer, mode, listed):
    async def body(episode):
        reply = await post(episode, "chat/completions", {"messages": [USER], "seed": 3, "temperature": 0.5})
        assert reply.status_code == 200 and reply.headers.get("x-realsys-ignored") == listed

    with_server(server, tokenizer, body, f"rollout.gateway.sampling={mode}")


def test_max_tokens_is_cut_to_the_room(server, tokenizer):
    async def body(episode):
        long = {"role": "user", "content": "1" * (415 - len(tokenizer.encode_chat([{**USER, "content": ""}])))}
        await episode.sdk().chat.completions.create(model="m", messages=[long])
        assert episode.engine.calls[0].spec.max_new_tokens == 9

    with_server(server, tokenizer, body)


def test_concurrent_conversations_are_rows_of_their_own(server, tokenizer):
    """Sub-agents of one episode: each call has its own conversation."""

    async def body(episode):
        async def talk(name):
            messages = [{"role": "user", "content": name}]
            for _ in range(3):
                reply = await sdk.chat.completions.create(model="m", messages=messages)
                messages += [reply.choices[0].message.model_dump(), USER]

        sdk = episode.sdk()
        await asyncio.gather(*(talk(name) for name in ("ann", "bob", "cy")))
        rows = episode.session.capture.rows()
        assert len(rows) == 3
        assert sum(row.loss_tokens for row in rows) == sum(len(made.tokens) for _, made in episode.engine.returned)

    with_server(server, tokenizer, body)


def test_reward_of_a_completion_is_at_its_last_token(server, tokenizer):
    async def body(episode):
        reply = await episode.sdk().chat.completions.create(model="m", messages=[USER])
        (row,) = episode.session.capture.rows({reply.id: 0.5})
        assert row.rewards == ((len(row.tokens) - 1, 0.5),)
        assert json.loads(reply.model_dump_json())["object"] == "chat.completion"
        assert episode.session.capture.last().tokens == row.loss_tokens

    with_server(server, tokenizer, body)
