"""The contract of cached keys over HTTP, for every backend: next turns use them, updates drop or keep them.

The reference is transformers, with the keys of a prefix from one model and the rest from another.
"""

import asyncio

import numpy as np
import pytest
import torch

from realsys.generation.client import SamplingSpec
from realsys.generation.completion import Completion
from tests.support.serving.generation_models import chosen
from tests.support.serving.generation_servers import BOUND_S, PROMPT, Crowd, check, drive, keeping, publish, samples

pytestmark = samples

TAIL = [7, 7, 2]
START = PROMPT * 8  # long enough to be retained
SPEC = SamplingSpec(max_new_tokens=24)


@torch.no_grad()
def logprobs_on_kept_keys(old, new, prompt, tokens, kept):
    """Log-probs of ``tokens`` by ``new``, whose first ``kept`` positions have the keys of ``old``."""
    ids = torch.tensor([[*prompt, *tokens]])
    cache = old(ids[:, :kept], use_cache=True).past_key_values
    logits = new(ids[:, kept:], past_key_values=cache).logits[0].float()
    start = len(prompt) - 1 - kept
    return chosen(logits[start : start + len(tokens)].log_softmax(-1), tokens)


async def counts(client, server):
    info = await client.server_info(server.url)
    return info.prefilled_tokens, info.reused_tokens


async def update(client, server, version):
    result = await client.update_weights(server.url, str(server.paths[version]), version, BOUND_S)
    assert result.success, result.message


async def turn(client, server, prompt):
    """Sample a completion of ``prompt``. Return it, and how many tokens of the prompt were cached."""
    _, before = await counts(client, server)
    [answer] = await client.generate(server.url, prompt, SPEC, rid=f"turn{len(prompt)}", seed=len(prompt))
    _, after = await counts(client, server)
    return answer, after - before


def cached(server, count):
    """How many of ``count`` tokens stay in the prefix cache, which may have whole blocks only."""
    return count // server.block * server.block


def next_prompt(prompt, answer):
    return [*prompt, *answer.tokens.tolist(), *TAIL]


async def turns_over_update(client, server, version):
    """Sample a turn, load ``version``, and sample the next turn. Return its prompt, completion and cached tokens."""
    first, _ = await turn(client, server, START)
    await update(client, server, version)
    prompt = next_prompt(START, first)
    return prompt, *await turn(client, server, prompt)


def test_next_turn_computes_only_new_tokens(server):
    async def test(client):
        prompt = START
        for number in range(4):
            begun = (await counts(client, server))[0]
            answer, reused = await turn(client, server, prompt)
            # The last token of a completion has no keys yet.
            new = len(TAIL) + 1 if number else len(START)
            assert reused == cached(server, len(prompt) - new)
            assert (await counts(client, server))[0] - begun <= new + server.block - 1
            check(server, answer, prompt)
            assert answer.kv_versions is None
            prompt = next_prompt(prompt, answer)

    drive(test)


def test_recomputed_keys_are_those_of_new_weights(server):
    async def test(client):
        prompt, second, reused = await turns_over_update(client, server, 1)
        assert (reused, second.kv_versions) == (0, None)
        check(server, second, prompt)

    drive(test)


def test_kept_keys_are_reused_within_the_bound(server):
    async def test(client):
        with keeping(server, 1):
            await update(client, server, 0)
            prompt, second, reused = await turns_over_update(client, server, 1)
            assert reused == cached(server, len(prompt) - len(TAIL) - 1)
            assert set(second.versions.tolist()) == {1} and set(second.kv_versions.tolist()) == {0}
            models, tokens = server.models, second.tokens.tolist()
            expected = logprobs_on_kept_keys(models[0], models[1], prompt, tokens, reused)
            assert np.abs(expected - second.logprobs).max() <= 1e-4
            await update(client, server, 2)
            prompt = next_prompt(prompt, second)
            third, reused = await turn(client, server, prompt)
            assert (reused, third.kv_versions) == (0, None)
            check(server, third, prompt)

    drive(test)


def test_running_completions_continue_on_kept_keys(server):
    """With reuse bound 0 the next turn does not use them.

    On a busy machine all completions may end before the update: it is made again until one crosses it.
    """

    async def test(client):
        with keeping(server, 0):
            crossed: list[Completion] = []
            async with asyncio.timeout(BOUND_S):
                while not crossed:
                    await update(client, server, 0)
                    crowd = await Crowd.decoding(client, server.url)
                    await update(client, server, 1)
                    answers = crossing(await crowd.finish())
                    crossed = [answer for answer in answers if cached(server, before_update(answer))]
            for answer in crossed:
                assert set(answer.kv_versions.tolist()) == {0}
                check_continued(server, answer)
            prompt = next_prompt(PROMPT, crossed[0])[:400]
            after, _ = await turn(client, server, prompt)
            assert after.kv_versions is None
            check(server, after, prompt)

    drive(test)


def test_update_in_a_pause_keeps_the_keys(server):
    async def test(client):
        with keeping(server, 0):
            answers: list[Completion] = []
            async with asyncio.timeout(BOUND_S):
                while not crossing(answers):
                    await update(client, server, 0)
                    crowd = await Crowd.decoding(client, server.url)
                    await client.pause(server.url, "in_place")
                    await update(client, server, 1)
                    crowd.dismiss()
                    await client.resume(server.url)
                    answers = await crowd.finish()
            for answer in answers:
                oldest = answer.versions if answer.kv_versions is None else answer.kv_versions
                assert (oldest <= answer.versions).all() and oldest.min() >= 0

    drive(test)


def crossing(answers):
    """Return the answers that began with version 0 and ended with version 1."""
    return [answer for answer in answers if set(answer.versions.tolist()) == {0, 1}]


def before_update(answer):
    """Tokens whose keys version 0 has computed: not that of the last token that it sampled."""
    return len(PROMPT) + int((answer.versions == 0).sum()) - 1


def check_continued(server, answer):
    """Tokens of version 1 follow on keys of version 0."""
    tokens, keys = answer.tokens.tolist(), before_update(answer)
    before = keys + 1 - len(PROMPT)
    prefix = [*PROMPT, *tokens[:before]]
    kept = cached(server, keys)
    expected = logprobs_on_kept_keys(server.models[0], server.models[1], prefix, tokens[before:], kept)
    assert np.abs(expected - answer.logprobs[before:]).max() <= 1e-4


def test_lower_version_of_next_trainer_drops_kept_keys(server, versions, tmp_path):
    """After a roll back versions are lower; keys of the later ones are not used."""
    tensors = {name: tensor.clone() for name, tensor in versions.models[1].state_dict().items()}
    earlier = publish(tmp_path, 1, versions.paths[-1], tensors=tensors, incarnation="tester")

    async def test(client):
        with keeping(server, 9):
            await update(client, server, 2)
            first, _ = await turn(client, server, START)
            crowd = await Crowd.decoding(client, server.url)
            assert (await client.update_weights(server.url, str(earlier), 1, BOUND_S)).success
            prompt = next_prompt(START, first)
            second, _ = await turn(client, server, prompt)
            assert second.kv_versions is None
            check(server, second, prompt)
            for answer in await crowd.finish():
                assert answer.kv_versions is None or (answer.kv_versions[answer.versions == 1] == 1).all()
                check(server, answer)

    drive(test)


@pytest.mark.parametrize("bound", [0, 3])
def test_aborting_update_keeps_what_the_bound_allows(server, bound):
    async def test(client):
        with keeping(server, bound):
            await update(client, server, 0)
            first, _ = await turn(client, server, START)
            crowd = await Crowd.decoding(client, server.url, 1)  # more requests would take the rows of retained keys
            path = str(server.paths[1])
            status = await client._http.call(
                f"{server.url}/update_weights_from_disk",
                {"model_path": path, "weight_version": "1", "abort_all_requests": True},
                BOUND_S,
            )
            assert b'"success":true' in status
            await crowd.finish()
            prompt = next_prompt(START, first)
            second, reused = await turn(client, server, prompt)
            assert (reused >= cached(server, len(START))) == bool(bound)
            assert (second.kv_versions is None) == (not bound)

    drive(test)
