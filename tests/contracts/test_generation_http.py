"""What a generation server must do over HTTP, whatever runs behind it.

The suite knows a server by its ``ServerUnderTest`` only; another backend joins by another parameter of the fixture.
Weights are staged and verified by the product's own code, from directories with manifests.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import torch

from realsys.config.schema import EmbeddedConfig, GenerationConfig
from realsys.errors import GenerationError
from realsys.generation.build import build_engine
from realsys.generation.client import SamplingSpec
from realsys.generation.server import HttpServer, build_app
from realsys.generation.sglang.engine import SglangEngine
from realsys.weights.shards import ShardWriter
from realsys.weights.stage import HeldWeights, StagedWeights, stage
from tests.contracts.generation_servers import (
    BUSY,
    CONTEXT,
    EOS,
    LONG,
    PROMPT,
    ServerUnderTest,
    answers_of,
    check,
    corrupt_shard,
    drive,
    flip,
    no_manifest,
    no_weights,
    other_manifest,
    publish,
    raw,
    shard_of,
    short_shard,
    start_long,
    until_decoding,
)
from tests.generation_models import VOCAB, chosen, make_model, reference_logprobs
from tests.sglang_server import needs_sglang, sglang_engine


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """A base model, -1, which is also published as version 0, and two more versions of its architecture."""
    root = tmp_path_factory.mktemp("weights")
    models, paths = {}, {}
    for version in (-1, 1, 2):
        path = root / f"hf{version}"
        models[version] = make_model("qwen2", path, seed=version + 10, eos=EOS)
        paths[version] = path if version < 0 else publish(root, version, path)
    models[0], paths[0] = models[-1], publish(root, 0, paths[-1])
    return models, paths


@pytest.fixture(scope="module")
def sglang(versions, tmp_path_factory) -> Iterator[tuple[SglangEngine, HttpServer]]:
    """One server for all tests: it takes long to start."""
    needs_sglang()
    _, paths = versions
    overflow = tmp_path_factory.mktemp("staged") / "overflow"
    engine = sglang_engine(paths[-1], overflow, "generation.sglang.max_answers=16", "rollout.max_concurrent=1")
    engine.start()
    assert engine.update(str(paths[0]), 0).result(60).success  # its staging thread is there from now on
    http = HttpServer(build_app(engine))
    http.start()
    yield engine, http
    engine.close()
    http.close()


@pytest.fixture(scope="module", params=["embedded", "sglang", "sglang-derived"])
def running(request) -> Iterator[tuple[SglangEngine, HttpServer] | None]:
    """None: an embedded engine for each test. sglang-derived: SGLang taken for one that tells no version per token."""
    if request.param == "embedded":
        yield None
        return
    engine, http = request.getfixturevalue("sglang")
    traffic = engine._traffic
    run = traffic.run
    traffic.run = dataclasses.replace(run, reports=request.param == "sglang")
    yield engine, http
    traffic.run = run


@pytest.fixture
def server(running, versions) -> Iterator[ServerUnderTest]:
    models, paths = versions
    if running is not None:
        engine, http = running
        for call in (engine.abort_all(), engine.resume()):
            call.result(10)
        back = engine.update(str(paths[0]), 0).result(30)
        assert back.success, back.message
        yield ServerUnderTest(http.url, models, paths, 16, start=0, seeded=False)
        return
    config = GenerationConfig(embedded=EmbeddedConfig(max_running=4, max_queued=12, context_length=CONTEXT))
    held = HeldWeights(everything=True)

    def load(path: str, version: int) -> StagedWeights:
        return stage(Path(path), version, held)

    engine = build_engine(paths[-1], config, load, max_prompt_tokens=16)
    http = HttpServer(build_app(engine))
    engine.start()
    http.start()
    yield ServerUnderTest(http.url, models, paths, 16)
    engine.close()
    http.close()


def test_an_idle_server_is_healthy_and_tells_its_version(server):
    async def test(client):
        async with aiohttp.ClientSession() as session, session.get(server.url + "/health") as response:
            assert response.status == 200
        info = await client.model_info(server.url)
        assert info.weight_version == str(server.start)
        assert info.model_path == str(server.paths[server.start])
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
            assert set(answer.versions.tolist()) == {server.start}
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
        assert meta["weight_version"] == str(server.start)
        assert meta["weight_versions"] == [[str(server.start), 3]]
        _, plain = await raw(server, "/generate", body)
        assert "output_token_logprobs" not in plain["meta_info"]
        _, two = await raw(server, "/generate", {**body, "sampling_params": {"max_new_tokens": 3, "n": 2}})
        assert isinstance(two, list) and len(two) == 2

    drive(test)


def test_a_seed_gives_the_same_answer_alone_and_in_a_crowd(server):
    if not server.seeded:
        pytest.skip("a seed decides an answer only with SGLang's deterministic inference, which a CPU has not")

    async def test(client):
        spec = SamplingSpec(max_new_tokens=30, temperature=0.9, n=2)
        alone = await client.generate(server.url, PROMPT, spec, rid="a", seed=3)
        crowd = [client.generate(server.url, [i + 1], spec, rid=f"c{i}", seed=i) for i in range(5)]
        *_, again = await asyncio.gather(*crowd, client.generate(server.url, PROMPT, spec, rid="b", seed=3))
        assert [a.tokens.tolist() for a in alone] == [a.tokens.tolist() for a in again]

    drive(test)


def test_update_in_mid_answer(server):
    async def test(client):
        requests = start_long(client, server.url)
        await until_decoding(client, server.url, 4)
        result = await client.update_weights(server.url, str(server.paths[1]), 1, 20)
        assert result.success, result.message
        assert {"stage_s", "verify_s", "pause_s", "load_s", "first_token_s"} <= result.timings.keys()
        answers = await answers_of(requests)
        assert any(set(a.versions.tolist()) == {server.start, 1} for a in answers)
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
        assert (await client.model_info(server.url)).weight_version == str(server.start)

    drive(test)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (no_weights, "cannot be read, but it is in the manifest"),
        (no_manifest, "MANIFEST.json"),
        (corrupt_shard, "corrupt"),
        (short_shard, "truncated"),
        (other_manifest, "holds version 8, version 7 was asked for"),
    ],
)
def test_damaged_version_leaves_the_old_weights_serving(server, tmp_path, versions, damage, message):
    broken = publish(tmp_path, 7, versions[1][-1])
    damage(broken)

    async def test(client):
        assert (await client.update_weights(server.url, str(server.paths[2]), 2, 20)).success
        result = await client.update_weights(server.url, str(broken), 7, 20)
        assert not result.success
        assert message in result.message and "\n" not in result.message
        [answer] = await client.generate(server.url, PROMPT, SamplingSpec(max_new_tokens=5), rid="a", seed=1)
        assert set(answer.versions.tolist()) == {2}
        check(server, answer)

    drive(test)


def test_corrupt_delta_leaves_the_old_weights_serving_and_the_next_one_is_taken(server, tmp_path, versions):
    model, writer = copy.deepcopy(versions[0][-1]), ShardWriter(deltas=True, full_every=9)
    models, paths = {}, {}
    for version in (5, 6, 7):
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight[version] += 0.3
        models[version] = copy.deepcopy(model)
        tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        base = paths[version - 1].name if version > 5 else ""
        paths[version] = publish(tmp_path, version, versions[1][-1], tensors=tensors, writer=writer, base=base)
    known = dataclasses.replace(server, models=models)
    delta = shard_of(paths[6])
    assert delta.stat().st_size < shard_of(paths[5]).stat().st_size / 2
    flip(delta)

    async def serves(client, version):
        [answer] = await client.generate(server.url, PROMPT, SamplingSpec(max_new_tokens=20), rid="a", seed=1)
        assert set(answer.versions.tolist()) == {version}
        check(known, answer)

    async def test(client):
        assert (await client.update_weights(server.url, str(paths[5]), 5, 20)).success
        for version in (6, 7):  # 7 needs the delta of 6
            refused = await client.update_weights(server.url, str(paths[version]), version, 20)
            assert not refused.success and "corrupt" in refused.message
            await serves(client, 5)
        flip(delta)
        assert (await client.update_weights(server.url, str(paths[7]), 7, 20)).success
        await serves(client, 7)

    drive(test)


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 5}, {"top_p": 0.6}, {"top_k": 8, "top_p": 0.8}], ids=lambda f: "+".join(f) or "plain"
)
def test_logprobs_are_of_the_whole_distribution_at_the_temperature(server, filters):
    """As they are trained on: softmax(logits / temperature), whatever top-k and top-p leave to draw from."""

    async def test(client):
        spec = SamplingSpec(max_new_tokens=40, temperature=0.7, n=2, **filters)
        for answer in await client.generate(server.url, PROMPT, spec, rid="a", seed=5):
            tokens = answer.tokens.tolist()
            expected = reference_logprobs(server.models[server.start], PROMPT, tokens, temperature=0.7)
            assert np.abs(chosen(expected, tokens) - answer.logprobs).max() <= 1e-4
            if "top_k" in filters:
                ranks = (expected > expected.gather(1, torch.tensor(tokens)[:, None])).sum(-1)
                assert ranks.max() < filters["top_k"]

    drive(test)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pause_holds_requests_and_continue_finishes_them(server, mode):
    async def test(client):
        requests = start_long(client, server.url)
        await until_decoding(client, server.url, 4)
        await client.pause(server.url, mode)
        assert (await client.update_weights(server.url, str(server.paths[1]), 1, 20)).success
        before = await client.server_info(server.url)
        ended = [request.done() for request in requests]
        assert before.paused and not all(ended)
        assert (await client.model_info(server.url)).weight_version == "1"
        after = await client.server_info(server.url)
        assert (after.steps, after.generated_tokens) == (before.steps, before.generated_tokens)
        assert [request.done() for request in requests] == ended
        await client.resume(server.url)
        answers = await answers_of(requests)
        assert any(set(answer.versions.tolist()) == {server.start, 1} for answer in answers)
        for answer in answers:
            assert set(answer.versions.tolist()) <= {server.start, 1}
            check(server, answer)

    drive(test)


def test_pause_abort_returns_what_there_is(server):
    async def test(client):
        requests = start_long(client, server.url)
        await until_decoding(client, server.url, 4)
        await client.pause(server.url, "abort")
        answers = await answers_of(requests)
        assert "abort" in {a.finish_reason for a in answers}
        await client.resume(server.url)
        [after] = await client.generate(server.url, PROMPT, SamplingSpec(max_new_tokens=2), rid="z", seed=1)
        assert after.finish_reason in ("length", "stop")

    drive(test)


def test_abort_of_running_requests_returns_what_there_is(server):
    async def test(client):
        requests = start_long(client, server.url)
        await until_decoding(client, server.url, 4)
        for index in range(BUSY):
            await client.abort(server.url, str(index))
        answers = await answers_of(requests)
        assert any(answer.finish_reason == "abort" and len(answer.tokens) for answer in answers)
        for answer in answers:
            if len(answer.tokens):
                check(server, answer)

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
        (
            "/generate",
            {"input_ids": [1], "sampling_params": {"stop_token_ids": [VOCAB]}},
            f"stop_token_ids holds {VOCAB}",
        ),
        ("/generate", {"input_ids": [1], "sampling_params": {"stop": ["end"]}}, "needs a tokenizer.json"),
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
        good = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}
        assert (await raw(server, "/generate", good))[0] == 200

    drive(test)


def test_a_dead_server_is_a_retryable_error_that_names_it():
    async def test(client):
        with pytest.raises(GenerationError, match=r"http://127\.0\.0\.1:1/generate: connection failed") as error:
            await client.generate("http://127.0.0.1:1", PROMPT, LONG, rid="a", seed=1)
        assert error.value.retryable

    drive(test)
