"""Retries, broken connections, weight updates and ends of episodes: which completions are trained."""

import asyncio
import gc
import socket
import weakref

import httpx
import openai
import pytest

from realsys.errors import ServerBusy
from realsys.generation.client import GenerationClient
from realsys.rollout.gateway import gateway, routes
from tests.support.serving.gateways import BOUND_S, USER, Scripted, opened, over_server, post
from tests.support.serving.reward_pools import until

BODY = {"model": "m", "messages": [USER]}
LONG = ("data.max_prompt_tokens=60", "generation.sampling.max_new_tokens=400", "generation.sampling.min_new_tokens=400")


def with_script(tokenizer, body, *settings, **script):
    """Run ``body(episode, engine)`` over a scripted engine; its gate is closed if the script has one."""

    async def run():
        engine = Scripted(tokenizer, **{name: made() for name, made in script.items()})
        async with opened(engine, tokenizer, *settings) as episode:
            return await body(episode, engine)

    return asyncio.run(run())


async def give_up(episode, engine, **headers):
    """Send a call, and close the connection when the engine has it."""
    call = asyncio.create_task(post(episode, "chat/completions", BODY, headers=headers))
    calls = len(episode.engine.calls)
    await until(lambda: len(episode.engine.calls) > calls)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


def has_data(client):
    try:
        return bool(client.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False


def test_completion_of_closed_connection_is_not_trained(tokenizer, monkeypatch):
    monkeypatch.setattr(gateway, "RETRY_WINDOW_S", 0.05)

    async def body(episode, engine):
        await give_up(episode, engine)
        await until(lambda: engine.cancelled)  # after the window
        engine.gate.set()
        await post(episode, "chat/completions", BODY | {"messages": [{**USER, "content": "2+2="}]})
        (row,) = episode.session.capture.rows()
        assert row.loss_tokens == 2 and len(episode.engine.returned) == 1

    with_script(tokenizer, body, gate=asyncio.Event)


def test_real_client_that_times_out_trains_nothing(tokenizer):
    """The engine finishes the completion within the window; the agent never has it."""

    async def body(episode, engine):
        with pytest.raises(openai.APITimeoutError):
            await episode.sdk(timeout=1.0).chat.completions.create(model="m", messages=[USER])
        engine.gate.set()
        await until(lambda: episode.session.capture.metrics()["gateway/undelivered"])
        assert episode.session.capture.rows() == [] and len(episode.engine.returned) == 1

    with_script(tokenizer, body, gate=asyncio.Event)


def test_timeout_and_retry_of_the_sdk_is_one_completion(tokenizer):
    async def body(episode, engine):
        sdk = episode.sdk(timeout=0.3, max_retries=5)
        call = asyncio.create_task(sdk.chat.completions.create(model="m", messages=[USER]))
        await until(lambda: episode.session.capture.metrics()["gateway/retries"])
        engine.gate.set()
        assert (await call).choices[0].message.content == "2"
        assert len(episode.engine.calls) == len(episode.session.capture.rows()) == 1
        assert episode.session.capture.metrics()["gateway/undelivered"] == 0.0

    with_script(tokenizer, body, gate=asyncio.Event)


def test_retry_after_a_call_that_was_given_up(tokenizer):
    """The client did not retry the error. The lost reply is the one of its next call, so that is sent again."""

    async def body(episode, engine):
        statuses = [(await post(episode, "chat/completions", BODY)).status_code for _ in range(2)]
        again = await post(episode, "chat/completions", BODY, headers={"x-stainless-retry-count": "1"})
        assert [*statuses, again.json()["choices"][0]["message"]["content"]] == [503, 200, "a"]
        assert len(episode.session.capture.rows()) == 1

    with_script(tokenizer, body, texts=lambda: ["a", "b"], errors=lambda: [ServerBusy("full")])


def test_forgotten_call_leaves_only_its_completions(tokenizer, monkeypatch):
    """A call holds the whole prompt, so calls that stay would be quadratic in the number of turns."""
    monkeypatch.setattr(gateway, "RETRY_WINDOW_S", 0.05)

    async def body(episode, engine):
        reply = (await post(episode, "chat/completions", BODY)).json()
        capture = episode.session.capture
        (task,) = (weakref.ref(exchange.task) for exchange in capture._exchanges.values())
        await until(lambda: capture._expire() or not capture._exchanges)
        gc.collect()
        assert task() is None
        (row,) = capture.rows({reply["id"]: 1.0})
        assert row.loss_tokens == 2

    with_script(tokenizer, body)


def test_repeat_of_broken_request_gets_its_completion(tokenizer):
    """A client without headers about retries; the completion was ready before the repeat."""

    async def body(episode, engine):
        await give_up(episode, engine)
        engine.gate.set()
        await until(lambda: episode.engine.returned)
        first = (await post(episode, "chat/completions", BODY)).json()
        second = (await post(episode, "chat/completions", BODY)).json()
        texts = [reply["choices"][0]["message"]["content"] for reply in (first, second)]
        assert texts == ["a", "b"] and len(episode.session.capture.rows()) == 2

    with_script(tokenizer, body, gate=asyncio.Event, texts=lambda: ["a", "b"])


@pytest.mark.parametrize("headers", [{"x-stainless-retry-count": "1"}, {"idempotency-key": "k"}])
def test_retry_after_the_reply_gets_the_same(tokenizer, headers):
    async def body(episode, engine):
        first = {"idempotency-key": "k"} if "idempotency-key" in headers else {}
        replies = [await post(episode, "chat/completions", BODY, headers=each) for each in (first, headers)]
        assert replies[0].content == replies[1].content and len(episode.engine.calls) == 1
        assert len(episode.session.capture.rows()) == 1

    with_script(tokenizer, body, texts=lambda: ["a", "b"])


def test_reused_key_with_another_body_is_refused(tokenizer):
    async def body(episode, engine):
        await post(episode, "chat/completions", BODY, headers={"idempotency-key": "k"})
        reply = await post(episode, "chat/completions", BODY | {"n": 2}, headers={"idempotency-key": "k"})
        assert reply.status_code == 400 and "another body" in reply.json()["error"]["message"]

    with_script(tokenizer, body)


def test_reply_that_was_not_taken_is_not_trained(tokenizer):
    """The client reads nothing of a reply that is larger than all buffers, and closes."""

    async def body(episode, engine):
        host, _, path = episode.session.base_url.removeprefix("http://").partition("/")
        name, port = host.split(":")
        content = b'{"messages": [{"role": "user", "content": "1"}], "logprobs": true}'
        with socket.create_connection((name, int(port))) as client:
            head = f"POST /{path}/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(content)}\r\n\r\n"
            client.sendall(head.encode() + content)
            client.setblocking(False)
            await until(lambda: has_data(client))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        await until(lambda: not episode.session.capture.waiting)
        assert episode.session.capture.rows() == []

    settings = ("data.max_prompt_tokens=100000", "generation.sampling.max_new_tokens=100000")
    with_script(tokenizer, body, *settings, texts=lambda: ["x" * 80000])


def test_later_turn_shows_that_the_agent_has_it(tokenizer):
    """The connection broke at its end, but the agent goes on with the reply."""

    async def body(episode, engine):
        await give_up(episode, engine)
        engine.gate.set()
        await until(lambda: episode.session.capture.metrics()["gateway/undelivered"])
        assert episode.session.capture.rows() == []
        turns = [USER, {"role": "assistant", "content": "2"}, USER]
        await post(episode, "chat/completions", {**BODY, "messages": turns})
        assert [row.loss_tokens for row in episode.session.capture.rows()] == [4]

    with_script(tokenizer, body, gate=asyncio.Event)


def test_closing_ends_waiting_and_late_calls(tokenizer):
    async def body(episode, engine):
        call = asyncio.create_task(post(episode, "chat/completions", BODY))
        await until(lambda: episode.engine.calls)
        await episode.session.close()
        for reply in (await call, await post(episode, "chat/completions", BODY)):
            assert reply.status_code == 410 and reply.json()["error"]["message"] == "the episode has ended"
        with pytest.raises(openai.APIStatusError) as caught:  # and the SDK does not retry
            await episode.sdk(max_retries=3).chat.completions.create(model="m", messages=[USER])
        assert caught.value.status_code == 410 and engine.cancelled == 1

    with_script(tokenizer, body, gate=asyncio.Event)


def test_call_waits_for_a_weight_update(server, tokenizer, chat_model, tmp_path):
    """The completion goes on with the new version; nothing fails."""
    from tests.support.serving.gateways import make_chat_model
    from tests.support.serving.generation_servers import publish

    version = publish(tmp_path / "weights", 1, make_chat_model(tmp_path / "new", seed=5))

    async def run():
        client = GenerationClient(timeout_s=BOUND_S)
        async with over_server(server, tokenizer, *LONG) as episode:
            body = {**BODY, "return_token_ids": True}
            before = (await client.server_info(server)).generated_tokens
            call = asyncio.create_task(post(episode, "chat/completions", body))
            while (await client.server_info(server)).generated_tokens < before + 5:
                pass
            await client.pause(server, "retract")
            updated = await client.update_weights(server, str(version), 1, BOUND_S)
            assert updated.success and not call.done()
            await client.resume(server)
            versions = (await call).json()["choices"][0]["versions"]
            assert len(versions) == 400 and versions[-1] == 1 and versions[0] != 1
            (row,) = episode.session.capture.rows()
            assert row.versions.tolist() == versions
        await client.close()

    asyncio.run(run())


@pytest.mark.parametrize("route", ["chat/completions", "inference/v1/generate"])
def test_waiting_stream_sends_comments(tokenizer, monkeypatch, route):
    request = {"token_ids": tokenizer.encode_chat([USER])} if route.startswith("inference") else BODY
    monkeypatch.setattr(routes, "KEEP_ALIVE_S", 0.01)

    async def body(episode, engine):
        async with httpx.AsyncClient(timeout=BOUND_S) as client:
            url = f"{episode.session.base_url}/{route}"
            async with client.stream("POST", url, json=request | {"stream": True}) as reply:
                lines = []
                async for line in reply.aiter_lines():
                    lines.append(line)
                    if lines.count(routes.COMMENT.decode().strip()) == 2:
                        engine.gate.set()
        content = '"content":"2"' if request is BODY else '"finish_reason":"stop"'
        assert content in "".join(lines)
        assert [line for line in lines if line][-1] == "data: [DONE]" and len(episode.session.capture.rows()) == 1

    with_script(tokenizer, body, gate=asyncio.Event)


def test_broken_stream_is_not_trained(tokenizer, monkeypatch):
    monkeypatch.setattr(routes, "KEEP_ALIVE_S", 0.01)

    async def body(episode, engine):
        stream = await episode.sdk().chat.completions.create(model="m", messages=[USER], stream=True)
        await anext(aiter(stream))
        await stream.close()
        await until(lambda: not episode.session.capture.waiting)
        engine.gate.set()
        await until(lambda: episode.engine.returned)
        assert episode.session.capture.rows() == []

    with_script(tokenizer, body, gate=asyncio.Event)
