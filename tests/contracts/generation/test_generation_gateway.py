"""Calls of an agent's endpoint while a server gets new weights, on every engine: they wait, and none fails."""

import asyncio
import itertools

import httpx
import pytest

from realsys.data.tokenizer import TextTokenizer
from realsys.generation.client import GenerationClient
from realsys.rollout.gateway import routes
from tests.support.serving.gateways import make_chat_model, over_server, post
from tests.support.serving.generation_servers import BOUND_S, BUSY, EOS, samples
from tests.support.serving.reward_pools import until

TOKENS = "inference/v1/generate"
PROMPTS = "data.max_prompt_tokens=60"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    made = TextTokenizer(make_chat_model(tmp_path_factory.mktemp("chat_model")))
    made.eos_token_ids = (EOS,)  # the servers' models end with another token than the tokenizer's
    return made


def body_of(number, route):
    """Return the body of call ``number``, whose prompt no other call has: another would be taken for its repeat."""
    prompt = [10 + number % 80, 10 + number // 80, 30]
    return {"token_ids": prompt} if route == TOKENS else {"model": "m", "prompt": prompt}


async def listen(episode, number, route, waiting):
    """Read a stream to its end. ``waiting`` is set when a comment says that the call waits."""
    async with httpx.AsyncClient(timeout=BOUND_S) as client:
        url, body = f"{episode.session.base_url}/{route}", body_of(number, route) | {"stream": True}
        async with client.stream("POST", url, json=body) as reply:
            lines = []
            async for line in reply.aiter_lines():
                lines.append(line)
                if line == routes.COMMENT.decode().strip():
                    waiting.set()
    assert reply.status_code == 200 and [line for line in lines if line][-1] == "data: [DONE]"


@samples
def test_gateway_calls_wait_for_a_weight_update(server, tokenizer, monkeypatch):
    """Plain calls and streams that begin in a pause get tokens of the new version; waiting streams get comments."""
    monkeypatch.setattr(routes, "KEEP_ALIVE_S", 0.01)

    async def run():
        client = GenerationClient(timeout_s=BOUND_S)
        async with over_server(server.url, tokenizer, PROMPTS, "generation.sampling.max_new_tokens=20") as episode:
            assert (await client.update_weights(server.url, str(server.paths[0]), 0, BOUND_S)).success
            await client.pause(server.url, "retract")
            streams = [(number, route, asyncio.Event()) for number, route in enumerate([TOKENS, "completions"])]
            async with asyncio.TaskGroup() as calls:
                tasks = [calls.create_task(listen(episode, *stream)) for stream in streams]
                bodies = [(route, body_of(5 + number, route)) for number, route, _ in streams]
                tasks += [calls.create_task(post(episode, route, body)) for route, body in bodies]
                await asyncio.gather(*(waiting.wait() for *_, waiting in streams))
                await until(lambda: len(episode.engine.calls) == 4)
                assert (await client.update_weights(server.url, str(server.paths[1]), 1, BOUND_S)).success
                assert not any(task.done() for task in tasks)
                await client.resume(server.url)
            assert [task.result().status_code for task in tasks[2:]] == [200, 200]
            assert [set(row.versions.tolist()) for row in episode.session.capture.rows()] == [{1}] * 4
        await client.close()

    asyncio.run(run())


@samples
def test_gateway_calls_around_a_weight_update_succeed(server, tokenizer):
    """Calls and streams follow each other while the weights change under them. The last ones begin after the update."""
    replies, updated = [], asyncio.Event()

    async def keep_calling(episode, first):
        for number in itertools.count(first, BUSY):
            is_last = updated.is_set()
            body = body_of(number, TOKENS) | {"stream": number % 2 > 0}
            replies.append(await post(episode, TOKENS, body))
            if is_last:
                return

    async def run():
        client = GenerationClient(timeout_s=BOUND_S)
        async with over_server(server.url, tokenizer, PROMPTS, "generation.sampling.max_new_tokens=400") as episode:
            assert (await client.update_weights(server.url, str(server.paths[0]), 0, BOUND_S)).success
            async with asyncio.TaskGroup() as callers:
                for first in range(BUSY):
                    callers.create_task(keep_calling(episode, first))
                await until(lambda: replies)  # the others sample, too
                assert (await client.update_weights(server.url, str(server.paths[1]), 1, BOUND_S)).success
                updated.set()
            assert {reply.status_code for reply in replies} == {200}
            versions = [row.versions.tolist() for row in episode.session.capture.rows()]
            assert len(versions) == len(replies) and all(each == sorted(each) for each in versions)
            assert versions[0][0] == 0 and [set(each) for each in versions].count({1}) >= BUSY
        await client.close()

    asyncio.run(run())
