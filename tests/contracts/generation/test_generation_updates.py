"""The contract of weight updates over HTTP, for every backend: updates, damage, pauses.

Weights are staged and verified by the product's own code, from directories with manifests.
"""

import asyncio
import copy
import dataclasses
import itertools
import os

import msgspec
import numpy as np
import pytest
import torch

from realsys.generation.client import Received, SamplingSpec
from realsys.weights.disk import manifest
from realsys.weights.disk.writer import ShardWriter
from tests.support.serving.generation_models import VOCAB
from tests.support.serving.generation_servers import (
    BOUND_S,
    PROMPT,
    Crowd,
    check,
    drive,
    flip,
    publish,
    samples,
    shard_of,
    with_progress,
)


def no_weights(version):
    shard_of(version).unlink()


def no_manifest(version):
    (version / "MANIFEST.json").unlink()


def corrupt_shard(version):
    flip(shard_of(version))


def short_shard(version):
    os.truncate(shard_of(version), 100)


def other_manifest(version):
    other = msgspec.structs.replace(manifest.load_manifest(version), version=8)
    (version / manifest.MANIFEST).write_bytes(manifest.VERSION.encode(other))


@samples
def test_update_in_mid_answer(server):
    async def test(client):
        crowd = await Crowd.decoding(client, server.url)
        result = await client.update_weights(server.url, str(server.paths[1]), 1, BOUND_S)
        assert result.success, result.message
        assert {"stage_s", "verify_s", "pause_s", "load_s", "first_token_s"} <= result.timings.keys()
        answers = await crowd.finish()
        assert any(set(a.versions.tolist()) == {server.start, 1} for a in answers)
        for answer in answers:
            assert (np.diff(answer.versions) >= 0).all()
            check(server, answer)
        assert (await client.model_info(server.url)).weight_version == "1"

    drive(test)


def test_version_other_than_the_requested_is_refused(server):
    async def test(client):
        result = await client.update_weights(server.url, str(server.paths[1]), 2, BOUND_S)
        assert not result.success
        assert "holds version 1, version 2 was requested" in result.message
        assert (await client.model_info(server.url)).weight_version == str(server.start)

    drive(test)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (no_weights, "cannot be read, but it is in the manifest"),
        (no_manifest, "MANIFEST.json"),
        (corrupt_shard, "corrupt"),
        (short_shard, "truncated"),
        (other_manifest, "holds version 8, version 7 was requested"),
    ],
)
def test_damaged_version_leaves_the_old_weights_serving(server, tmp_path, versions, damage, message):
    broken = publish(tmp_path, 7, versions.paths[-1])
    damage(broken)

    async def test(client):
        assert (await client.update_weights(server.url, str(server.paths[2]), 2, BOUND_S)).success
        result = await client.update_weights(server.url, str(broken), 7, BOUND_S)
        assert not result.success
        assert message in result.message and "\n" not in result.message
        [answer] = await client.generate(server.url, PROMPT, SamplingSpec(max_new_tokens=5), rid="a", seed=1)
        assert set(answer.versions.tolist()) == {2}
        check(server, answer)

    drive(test)


def test_corrupt_delta_leaves_the_old_weights_serving(server, tmp_path, versions):
    """The next version is taken."""
    model, writer = copy.deepcopy(versions.models[-1]), ShardWriter(deltas=True, full_every=9)
    models, paths = {}, {}
    for version in (5, 6, 7):
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight[version] += 0.3
        models[version] = copy.deepcopy(model)
        tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        base = paths[version - 1].name if version > 5 else ""
        paths[version] = publish(tmp_path, version, versions.paths[-1], tensors=tensors, writer=writer, base=base)
    known = dataclasses.replace(server, models=models if server.models else {})
    delta = shard_of(paths[6])
    assert delta.stat().st_size < shard_of(paths[5]).stat().st_size / 2
    flip(delta)

    async def serves(client, version):
        [answer] = await client.generate(server.url, PROMPT, SamplingSpec(max_new_tokens=20), rid="a", seed=1)
        assert set(answer.versions.tolist()) == {version}
        check(known, answer)

    async def test(client):
        assert (await client.update_weights(server.url, str(paths[5]), 5, BOUND_S)).success
        for version in (6, 7):  # 7 needs the delta of 6
            refused = await client.update_weights(server.url, str(paths[version]), version, BOUND_S)
            assert not refused.success and "corrupt" in refused.message
            await serves(client, 5)
        flip(delta)
        assert (await client.update_weights(server.url, str(paths[7]), 7, BOUND_S)).success
        await serves(client, 7)

    drive(test)


@samples
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pause_holds_requests_and_continue_finishes_them(server, mode):
    async def test(client):
        crowd = await Crowd.decoding(client, server.url)
        await client.pause(server.url, mode)
        assert (await client.update_weights(server.url, str(server.paths[1]), 1, BOUND_S)).success
        before = await client.server_info(server.url)
        ended = len(crowd.answers)
        assert before.paused and before.running + before.queued > 0
        assert (await client.model_info(server.url)).weight_version == "1"
        after = await client.server_info(server.url)
        assert (after.steps, after.generated_tokens) == (before.steps, before.generated_tokens)
        assert len(crowd.answers) == ended
        crowd.dismiss()
        await client.resume(server.url)
        answers = await crowd.finish()
        assert any(set(answer.versions.tolist()) == {server.start, 1} for answer in answers)
        for answer in answers:
            assert set(answer.versions.tolist()) <= {server.start, 1}
            check(server, answer)

    drive(test)


@samples
def test_pause_abort_returns_what_there_is(server):
    async def test(client):
        crowd = await Crowd.decoding(client, server.url)
        async with asyncio.timeout(BOUND_S):  # all requests may end, and the next not have begun, as the pause comes
            while "abort" not in {answer.finish_reason for answer in crowd.answers}:
                await client.pause(server.url, "abort")
                await client.resume(server.url)
        await crowd.finish()
        [after] = await client.generate(server.url, PROMPT, SamplingSpec(max_new_tokens=2), rid="z", seed=1)
        assert after.finish_reason in ("length", "stop")

    drive(test)


@samples
def test_sleep_and_wake_change_no_token(server):
    """A greedy request is cut by the sleep, and continues with the same weights, which an update loads again."""
    greedy, version = SamplingSpec(max_new_tokens=480, temperature=0), 0

    async def load(client):
        return await client.update_weights(server.url, str(server.paths[version]), version, BOUND_S)

    async def test(client):
        for number in itertools.count():  # the model may end a completion before the sleep: then another one is cut
            prompt, told = [number % VOCAB, *PROMPT], asyncio.Event()
            [whole] = await client.generate(server.url, prompt, greedy, rid=f"whole{number}", seed=1)
            received = Received(1, on_tokens=lambda _, told=told: told.set())
            call = client.generate(server.url, prompt, greedy, rid=str(number), seed=1, received=received)
            request, told = asyncio.create_task(call), asyncio.create_task(told.wait())
            await asyncio.wait((request, told), return_when="FIRST_COMPLETED")
            await client.sleep(server.url)
            asleep = await client.server_info(server.url)
            assert asleep.paused and asleep.weight_version == "-1" and asleep.kv_tokens == 0
            refused = await load(client)
            assert not refused.success and "wake it first" in refused.message
            late = asyncio.create_task(client.generate(server.url, [7], greedy, rid=f"late{number}", seed=1))
            await client.wake(server.url)
            awake = await client.server_info(server.url)
            assert awake.paused and awake.generated_tokens == asleep.generated_tokens and not late.done()
            assert (await load(client)).success
            [completion] = await request
            assert len((await late)[0].tokens)
            assert completion.tokens.tolist() == whole.tokens.tolist()
            assert np.abs(completion.logprobs - whole.logprobs).max() <= 1e-4
            if asleep.running + asleep.queued:  # the sleep has cut it
                break
        assert set(completion.versions.tolist()) == {server.start, version}

    with_progress(test)
