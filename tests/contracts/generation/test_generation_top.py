"""The contract of top log-probs over HTTP, for every backend: the most probable tokens at each sampled token."""

import asyncio
import itertools

import pytest

from realsys.errors import GenerationError
from realsys.generation.client import GenerationClient, Received, SamplingSpec
from tests.support.serving.generation_models import reference_logprobs
from tests.support.serving.generation_servers import BOUND_S, PROMPT, Crowd, check, drive, raw, samples


def check_top(server, answer, count, temperature=1.0, prompt=PROMPT):
    """They are the most probable tokens of the version that sampled, in order, with its log-probs."""
    tokens = answer.tokens.tolist()
    assert len(answer.top) == len(tokens)
    for version in set(answer.versions.tolist()):
        reference = reference_logprobs(server.models[version], prompt, tokens, temperature)
        values = reference.topk(count).values.tolist()
        for place in (answer.versions == version).nonzero()[0].tolist():
            best = answer.top[place]
            assert [value for _, value in best] == pytest.approx(values[place], abs=1e-4)
            assert [value for _, value in best] == sorted((value for _, value in best), reverse=True)
            assert [float(reference[place, token]) for token, _ in best] == pytest.approx(values[place], abs=1e-4)
            assert len({token for token, _ in best}) == count


@samples
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 0.0}], ids=str)
def test_top_logprobs_are_of_the_whole_distribution(server, filters):
    """Before top-k and top-p, at the temperature of the request, as the log-prob of the token itself."""

    async def test(client):
        spec = SamplingSpec(**{"max_new_tokens": 20, "temperature": 0.7, "top_logprobs_num": 5, "n": 2, **filters})
        for answer in await client.generate(server.url, PROMPT, spec, rid="a", seed=5):
            check_top(server, answer, 5, spec.temperature or 1.0)
            for token, logprob, best in zip(answer.tokens.tolist(), answer.logprobs, answer.top, strict=True):
                assert dict(best).get(token, logprob) == pytest.approx(logprob, abs=1e-4)

    drive(test)


@samples
def test_requests_with_other_numbers_run_together(server):
    async def test(client):
        numbers = [0, 1, 20, 3, 0, 7]
        specs = [SamplingSpec(max_new_tokens=12, top_logprobs_num=number) for number in numbers]
        calls = [client.generate(server.url, PROMPT, s, rid=f"t{k}", seed=k) for k, s in enumerate(specs)]
        for number, [answer] in zip(numbers, await asyncio.gather(*calls), strict=True):
            if number:
                check_top(server, answer, number)
            else:
                assert answer.top is None

    drive(test)


@samples
def test_top_logprobs_survive_a_weight_update(server):
    async def test(client):
        crowd = await Crowd.decoding(client, server.url)
        spec = SamplingSpec(max_new_tokens=480, top_logprobs_num=2)
        request = asyncio.create_task(client.generate(server.url, PROMPT, spec, rid="top", seed=1))
        assert (await client.update_weights(server.url, str(server.paths[1]), 1, BOUND_S)).success
        [answer] = await request
        check(server, answer)
        check_top(server, answer, 2)
        await crowd.finish()

    drive(test)


@samples
def test_progress_has_the_top_logprobs_so_far(server):
    """A completion may be short, and on a busy machine all of it may arrive at once: requests are sent until one has
    progress.
    """

    async def test(_):
        client = GenerationClient(BOUND_S, progress_s=0.01)
        spec, seen = SamplingSpec(max_new_tokens=480, n=2, top_logprobs_num=3), 0
        for seed in itertools.count(5):
            received = Received(2)
            answers = await client.generate(server.url, PROMPT, spec, rid=str(seed), seed=seed, received=received)
            for part, answer in zip(received.completions, answers, strict=True):
                arrived = part.top or []  # None before the first token
                found = [tuple(map(tuple, best)) for best in arrived]
                assert found == [tuple(best) for best in answer.top[: len(arrived)]]
                assert len(arrived) == len(part.tokens)
                seen += len(arrived)
            if seen:
                break
        await client.close()

    drive(test)


@samples
def test_reply_has_top_logprobs_in_sglangs_form(server):
    async def test(_):
        sampling = {"max_new_tokens": 3, "temperature": 0, "top_logprobs_num": 2}
        body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
        _, reply = await raw(server, "/generate", body)
        best = reply["meta_info"]["output_top_logprobs"]
        assert [[entry[1:] for entry in place[:1]] for place in best] == [[[t, None]] for t in reply["output_ids"]]
        assert [len(place) for place in best] == [2, 2, 2]
        assert best[0][0][0] == pytest.approx(reply["meta_info"]["output_token_logprobs"][0][0], abs=1e-5)
        del sampling["top_logprobs_num"]
        _, plain = await raw(server, "/generate", body)
        assert "output_top_logprobs" not in plain["meta_info"]

    drive(test)


def test_number_of_top_logprobs_is_bounded(server):
    async def test(client):
        with pytest.raises(GenerationError, match="top_logprobs_num=21: must be from 0 to 20") as refused:
            await client.generate(server.url, PROMPT, SamplingSpec(top_logprobs_num=21), rid="a", seed=1)
        assert not refused.value.retryable
        if not server.models:
            with pytest.raises(GenerationError, match="this engine has no top log-probs"):
                await client.generate(server.url, PROMPT, SamplingSpec(top_logprobs_num=1), rid="a", seed=1)

    drive(test)
