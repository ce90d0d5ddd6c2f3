"""What a generation server must do over HTTP, whatever runs behind it.

The suite knows a server by its ``ServerUnderTest`` only; another backend joins by another parameter of the fixture.
Weights are staged and verified by the product's own code, from directories with manifests.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from realsys.config.schema import EmbeddedConfig, GenerationConfig
from realsys.errors import GenerationError
from realsys.generation.build import build_engine
from realsys.generation.client import GenerationClient, SamplingSpec
from realsys.generation.server import HttpServer, build_app
from realsys.generation.weights import read_tensors
from realsys.weights import manifest
from realsys.weights.shards import write_shard
from realsys.weights.stage import stage
from tests.generation_models import VOCAB, chosen, make_model, reference_logprobs

PROMPT = [3, 1, 4, 1, 5]
EOS = VOCAB - 1
CONTEXT = 512
LONG = SamplingSpec(max_new_tokens=480)


@dataclass
class ServerUnderTest:
    """A running server. ``models[v]`` is what transformers says about published version v; -1 is the base model."""

    url: str
    models: dict[int, object]
    paths: dict[int, Path]
    max_answers: int  # that it runs and queues


def publish(root: Path, version: int, model_dir: Path) -> Path:
    tmp = manifest.prepare(root, version, "test")
    shard = write_shard(tmp / "model-00001-of-00001.safetensors", read_tensors(model_dir))
    return manifest.commit(tmp, version=version, incarnation="test", step=version, shards=[shard], model_dir=model_dir)


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """Base model and two published versions of one architecture."""
    root = tmp_path_factory.mktemp("weights")
    models, paths = {}, {}
    for version in (-1, 1, 2):
        path = root / f"hf{version}"
        models[version] = make_model("qwen2", path, seed=version + 10, eos=EOS)
        paths[version] = path if version < 0 else publish(root, version, path)
    return models, paths


@pytest.fixture(params=["embedded"])
def server(request, versions) -> Iterator[ServerUnderTest]:
    models, paths = versions
    config = GenerationConfig(embedded=EmbeddedConfig(max_running=4, max_queued=12, context_length=CONTEXT))
    engine = build_engine(paths[-1], config, lambda path, version: stage(Path(path), version), max_prompt_tokens=16)
    http = HttpServer(build_app(engine))
    engine.start()
    http.start()
    yield ServerUnderTest(http.url, models, paths, 16)
    engine.close()
    http.close()


def drive(test):
    """Run ``test(client)`` with a client of the product."""

    async def body():
        client = GenerationClient(timeout_s=30)
        try:
            return await test(client)
        finally:
            await client.close()

    return asyncio.run(body())


async def until_decoding(client: GenerationClient, url: str) -> None:
    """Return when the server has sampled tokens of the requests that run now. Every look is a round trip."""
    before = (await client.server_info(url)).generated_tokens
    async with asyncio.timeout(20):
        while (await client.server_info(url)).generated_tokens < before + 10:
            pass


def check(server: ServerUnderTest, answer, prompt=PROMPT) -> None:
    """Every log-prob is that of the version the token is attributed to."""
    tokens = answer.tokens.tolist()
    for version in set(answer.versions.tolist()):
        expected = chosen(reference_logprobs(server.models[version], prompt, tokens), tokens)
        mine = answer.versions == version
        assert np.abs(expected - answer.logprobs)[mine].max() <= 1e-4


async def raw(server: ServerUnderTest, path: str, body: object) -> tuple[int, dict]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with aiohttp.ClientSession() as session, session.post(server.url + path, data=data) as response:
        return response.status, await response.json()


def test_a_fresh_server_is_healthy_and_unsynced(server):
    async def test(client):
        async with aiohttp.ClientSession() as session, session.get(server.url + "/health") as response:
            assert response.status == 200
        info = await client.model_info(server.url)
        assert info.weight_version == "-1"
        assert info.model_path == str(server.paths[-1])
        load = await client.server_info(server.url)
        assert (load.running, load.queued, load.context_length) == (0, 0, CONTEXT)

    drive(test)


def test_answers_carry_tokens_logprobs_and_versions(server):
    async def test(client):
        spec = SamplingSpec(max_new_tokens=12, n=3, stop_token_ids=(7,))
        answers = await client.generate(server.url, PROMPT, spec, rid="a", seed=5)
        assert len(answers) == 3
        for answer in answers:
            assert (answer.tokens.dtype, answer.logprobs.dtype, answer.versions.dtype) == ("int32", "float32", "int32")
            assert set(answer.versions.tolist()) == {-1}
            stopped = answer.tokens[-1] in (7, EOS)
            assert answer.finish_reason == ("stop" if stopped else "length")
            assert stopped or len(answer.tokens) == 12
            check(server, answer)
        assert len({tuple(a.tokens.tolist()) for a in answers}) == 3

    drive(test)


def test_reply_has_the_shape_of_sglang(server):
    async def test(_):
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 3, "temperature": 0}, "rid": "r1"}
        status, one = await raw(server, "/generate", {**body, "return_logprob": True})
        assert status == 200
        meta = one["meta_info"]
        assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("r1", 5, 3)
        assert meta["finish_reason"] == {"type": "length", "length": 3}
        assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[t, None] for t in one["output_ids"]]
        assert meta["weight_version"] == "-1"
        assert meta["weight_versions"] == [["-1", 3]]
        _, plain = await raw(server, "/generate", body)
        assert "output_token_logprobs" not in plain["meta_info"]
        _, two = await raw(server, "/generate", {**body, "sampling_params": {"max_new_tokens": 3, "n": 2}})
        assert isinstance(two, list) and len(two) == 2

    drive(test)


def test_a_seed_gives_the_same_answer_alone_and_in_a_crowd(server):
    async def test(client):
        spec = SamplingSpec(max_new_tokens=30, temperature=0.9, n=2)
        alone = await client.generate(server.url, PROMPT, spec, rid="a", seed=3)
        crowd = [client.generate(server.url, [i + 1], spec, rid=f"c{i}", seed=i) for i in range(5)]
        *_, again = await asyncio.gather(*crowd, client.generate(server.url, PROMPT, spec, rid="b", seed=3))
        assert [a.tokens.tolist() for a in alone] == [a.tokens.tolist() for a in again]

    drive(test)


def test_update_in_mid_answer(server):
    async def test(client):
        # Sixteen answers on four rows take many rounds: some run, some wait while the weights change.
        requests = [
            asyncio.create_task(client.generate(server.url, PROMPT, LONG, rid=str(i), seed=i)) for i in range(16)
        ]
        await until_decoding(client, server.url)
        result = await client.update_weights(server.url, str(server.paths[1]), 1, 20)
        assert result.success, result.message
        assert {"stage_s", "verify_s", "pause_s", "load_s", "reprefill_s"} <= result.timings.keys()
        answers = [answer for group in await asyncio.gather(*requests) for answer in group]
        assert any(set(a.versions.tolist()) == {-1, 1} for a in answers)
        for answer in answers:
            assert (np.diff(answer.versions) >= 0).all()
            check(server, answer)
        assert (await client.model_info(server.url)).weight_version == "1"

    drive(test)


def test_version_that_is_not_the_one_asked_for_is_refused(server):
    async def test(client):
        result = await client.update_weights(server.url, str(server.paths[1]), 2, 20)
        assert not result.success
        assert "holds version 1, version 2 was asked for" in result.message
        assert (await client.model_info(server.url)).weight_version == "-1"

    drive(test)


def test_corrupt_version_leaves_the_old_weights_serving(server, tmp_path, versions):
    broken = publish(tmp_path, 7, versions[1][-1])
    shard = next(broken.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)

    async def test(client):
        assert (await client.update_weights(server.url, str(server.paths[2]), 2, 20)).success
        result = await client.update_weights(server.url, str(broken), 7, 20)
        assert not result.success
        assert "corrupt" in result.message
        [answer] = await client.generate(server.url, PROMPT, SamplingSpec(max_new_tokens=5), rid="a", seed=1)
        assert set(answer.versions.tolist()) == {2}
        check(server, answer)

    drive(test)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pause_holds_requests_and_continue_finishes_them(server, mode):
    async def test(client):
        request = asyncio.create_task(client.generate(server.url, PROMPT, LONG, rid="a", seed=1))
        await until_decoding(client, server.url)
        await client.pause(server.url, mode)
        assert (await client.update_weights(server.url, str(server.paths[1]), 1, 20)).success
        steps = (await client.server_info(server.url)).steps
        assert (await client.model_info(server.url)).weight_version == "1"
        assert (await client.server_info(server.url)).steps == steps
        await client.resume(server.url)
        [answer] = await request
        assert set(answer.versions.tolist()) <= {-1, 1}
        check(server, answer)

    drive(test)


def test_pause_abort_returns_what_there_is(server):
    async def test(client):
        requests = [
            asyncio.create_task(client.generate(server.url, PROMPT, LONG, rid=str(i), seed=i)) for i in range(8)
        ]
        await until_decoding(client, server.url)
        await client.pause(server.url, "abort")
        answers = [answer for group in await asyncio.gather(*requests) for answer in group]
        assert "abort" in {a.finish_reason for a in answers}
        await client.resume(server.url)
        [after] = await client.generate(server.url, PROMPT, SamplingSpec(max_new_tokens=2), rid="z", seed=1)
        assert after.finish_reason in ("length", "stop")

    drive(test)


def test_abort_by_id(server):
    async def test(client):
        await client.pause(server.url, "in_place")
        request = asyncio.create_task(client.generate(server.url, PROMPT, LONG, rid="mine", seed=1))
        async with asyncio.timeout(20):
            while (await client.server_info(server.url)).queued < 1:
                pass
        await client.abort(server.url, "mine")
        [answer] = await request
        assert (answer.finish_reason, len(answer.tokens)) == ("abort", 0)
        await client.abort(server.url, "nobody")
        await client.resume(server.url)

    drive(test)


def test_requests_of_a_client_that_went_away_are_ended(server):
    async def test(client):
        await client.pause(server.url, "in_place")
        gone = asyncio.create_task(client.generate(server.url, PROMPT, LONG, rid="gone", seed=1))
        async with asyncio.timeout(20):
            while (await client.server_info(server.url)).queued < 1:
                pass
            gone.cancel()
            while (await client.server_info(server.url)).queued:
                pass
        await client.resume(server.url)

    drive(test)


def test_full_server_answers_503(server):
    async def test(client):
        await client.pause(server.url, "in_place")
        spec = SamplingSpec(max_new_tokens=4, n=server.max_answers)
        accepted = asyncio.create_task(client.generate(server.url, PROMPT, spec, rid="a", seed=1))
        async with asyncio.timeout(20):
            while (await client.server_info(server.url)).queued < server.max_answers:
                pass
        with pytest.raises(GenerationError, match="status 503: queue full") as refused:
            await client.generate(server.url, PROMPT, SamplingSpec(max_new_tokens=4), rid="b", seed=1)
        assert refused.value.retryable
        assert server.url in str(refused.value)
        await client.resume(server.url)
        assert len(await accepted) == server.max_answers

    drive(test)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/generate", b"{", "/generate: "),
        ("/generate", {"input_ids": "text"}, "input_ids"),
        ("/generate", {"input_ids": [1], "sampling_params": {"temprature": 1}}, "temprature"),
        ("/generate", {"input_ids": []}, "input_ids is empty"),
        ("/generate", {"input_ids": [VOCAB]}, f"the vocabulary has {VOCAB} tokens"),
        ("/generate", {"input_ids": [1] * CONTEXT}, f"exceed the context of {CONTEXT}"),
        ("/generate", {"input_ids": [1], "sampling_params": {"top_p": 2}}, "top_p=2"),
        ("/update_weights_from_disk", {"model_path": "x", "weight_version": "new"}, "weight_version='new'"),
        ("/pause_generation", {"mode": "gently"}, "gently"),
        ("/abort_request", {}, "needs rid"),
    ],
)
def test_bad_requests_are_answered_with_400_and_one_line(server, path, body, message):
    async def test(_):
        status, reply = await raw(server, path, body)
        assert status == 400
        assert message in reply["error"]["message"]
        assert "\n" not in reply["error"]["message"]

    drive(test)


def test_a_dead_server_is_a_retryable_error_that_names_it():
    async def test(client):
        with pytest.raises(GenerationError, match=r"http://127\.0\.0\.1:1/generate: connection failed") as error:
            await client.generate("http://127.0.0.1:1", PROMPT, LONG, rid="a", seed=1)
        assert error.value.retryable

    drive(test)
