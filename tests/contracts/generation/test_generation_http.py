"""The contract of a generation server over HTTP, for every backend: completions, limits, aborts, bad requests.

The suite knows a server by its ``ServerUnderTest`` only; another backend joins by another parameter of the fixture
(``conftest.py``). Tests of the model are marked ``samples``.
"""

import asyncio
import functools
import itertools

import aiohttp
import numpy as np
import pytest
import torch

from realsys.errors import GenerationError, ServerBusy, ServerFailed, ServerSilent
from realsys.generation.child.engine import ChildEngine
from realsys.generation.child.requests import SplitRequest
from realsys.generation.client import GenerationClient, Received, SamplingSpec
from realsys.generation.embedded.engine import EmbeddedEngine
from tests.support.serving.generation_models import VOCAB, chosen, reference_logprobs
from tests.support.serving.generation_servers import (
    BOUND_S,
    BUSY,
    CONTEXT,
    EOS,
    LONG,
    MOST_VERSIONS,
    PROMPT,
    Crowd,
    check,
    drive,
    raw,
    samples,
    with_progress,
)


def test_idle_server_reports_health_and_version(server):
    async def test(client):
        async with aiohttp.ClientSession() as session, session.get(server.url + "/health") as response:
            assert response.status == 200
        info = await client.model_info(server.url)
        assert info.weight_version == str(server.start)
        assert info.model_path == str(server.paths[server.start])
        load = await client.server_info(server.url)
        assert (load.running, load.queued, load.context_length) == (0, 0, CONTEXT)

    drive(test)


@samples
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


def test_seed_gives_one_completion_under_any_load(server):
    if not server.seeded:
        pytest.skip("a seed decides an answer only with SGLang's deterministic inference, which a CPU has not")

    async def test(client):
        spec = SamplingSpec(max_new_tokens=30, temperature=0.9, n=2)
        alone = await client.generate(server.url, PROMPT, spec, rid="a", seed=3)
        crowd = [client.generate(server.url, [i + 1], spec, rid=f"c{i}", seed=i) for i in range(5)]
        *_, again = await asyncio.gather(*crowd, client.generate(server.url, PROMPT, spec, rid="b", seed=3))
        assert [a.tokens.tolist() for a in alone] == [a.tokens.tolist() for a in again]

    drive(test)


@samples
@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 5}, {"top_p": 0.6}, {"top_k": 8, "top_p": 0.8}], ids=lambda f: "+".join(f) or "plain"
)
def test_logprobs_cover_the_whole_distribution(server, filters):
    """They are taken at the sampling temperature.

    As they are trained on: softmax(logits / temperature), whatever top-k and top-p leave to draw from.
    """

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


@samples
def test_abort_of_running_requests_returns_what_there_is(server):
    async def test(client):
        crowd = await Crowd.decoding(client, server.url)
        async with asyncio.timeout(BOUND_S):  # until one that had begun is cut off
            while not any(answer.finish_reason == "abort" and len(answer.tokens) for answer in crowd.answers):
                for slot in range(BUSY):
                    await client.abort(server.url, str(slot))
        for answer in await crowd.finish():
            if len(answer.tokens):
                check(server, answer)

    drive(test)


def test_abort_by_id(server):
    async def test(client):
        await client.pause(server.url, "in_place")
        request = asyncio.create_task(client.generate(server.url, PROMPT, LONG, rid="mine", seed=1))
        async with asyncio.timeout(BOUND_S):
            while (await client.server_info(server.url)).queued < 1:
                pass
        await client.abort(server.url, "mine")
        [answer] = await request
        assert (answer.finish_reason, len(answer.tokens)) == ("abort", 0)
        await client.abort(server.url, "nobody")
        await client.resume(server.url)

    drive(test)


def test_requests_of_a_disconnected_client_end(server):
    async def test(client):
        await client.pause(server.url, "in_place")
        gone = asyncio.create_task(client.generate(server.url, PROMPT, LONG, rid="gone", seed=1))
        async with asyncio.timeout(BOUND_S):
            while (await client.server_info(server.url)).queued < 1:
                pass
            gone.cancel()
            while (await client.server_info(server.url)).queued:
                pass
        await client.resume(server.url)

    drive(test)


class Watched(Received):
    """Tokens that a client has received; ``grown`` is set by every line. ``empty_lines`` came before any token."""

    def __init__(self, n):
        super().__init__(n)
        self.grown = asyncio.Event()
        self.empty_lines = 0

    def take(self, line):
        super().take(line)
        self.grown.set()
        self.empty_lines += not any(len(one.tokens) for one in self.completions)


@samples
def test_tokens_arrive_before_the_reply(server):
    """Whatever has arrived is the beginning of the reply, with its log-probs and versions.

    An answer may be short, and on a busy machine all of it may arrive at once: requests are sent until one shows.
    """

    async def test(client):
        spec, seen = SamplingSpec(max_new_tokens=480, n=3), False
        for seed in itertools.count(5):
            received = Watched(3)
            request = asyncio.create_task(
                client.generate(server.url, PROMPT, spec, rid=str(seed), seed=seed, received=received)
            )
            while not request.done():
                received.grown.clear()
                seen = seen or any(len(one.tokens) for one in received.completions)
                grown = asyncio.create_task(received.grown.wait())
                await asyncio.wait((request, grown), return_when="FIRST_COMPLETED")
                grown.cancel()
            for so_far, answer in zip(received.completions, await request, strict=True):
                count = len(so_far.tokens)
                assert so_far.tokens.tolist() == answer.tokens[:count].tolist()
                assert so_far.logprobs.tolist() == answer.logprobs[:count].tolist()
                assert so_far.versions.tolist() == answer.versions[:count].tolist()
                check(server, answer)
            if seen:
                break

    with_progress(test)


def test_stream_brings_tokens_as_they_are_sampled(server):
    """The engine pauses after each token until the client has it. A stream samples the same tokens."""
    engine, counts = server.engine, []
    if not isinstance(engine, EmbeddedEngine):
        pytest.skip("only the embedded engine can be held after a token; the next test is about the others")
    spec = SamplingSpec(max_new_tokens=8, min_new_tokens=8)

    def told(number):
        counts.append(len(received.completions[number].tokens))
        engine.resume()

    received = Received(1, on_tokens=told)

    async def test(client):
        (whole,) = await client.generate(server.url, PROMPT, spec, rid="whole", seed=5)
        engine._on_step = lambda core: setattr(engine, "_paused", not core.idle)
        (streamed,) = await client.generate(server.url, PROMPT, spec, rid="stream", seed=5, received=received)
        assert counts[:7] == list(range(1, 8))
        for name in ("tokens", "logprobs", "versions"):
            assert getattr(streamed, name).tolist() == getattr(whole, name).tolist()

    with_progress(test)


@samples
def test_stream_of_a_child_engine_has_an_event_per_token(server, monkeypatch):
    """If its HTTP process lags behind, it joins the events that wait. So streams are tried until one has them all."""
    if not isinstance(server.engine, ChildEngine):
        pytest.skip("this engine runs in the server's process")
    heard, hear = [], SplitRequest.hear

    def note(request, number, reply):
        heard.append(len(reply.output_ids))
        return hear(request, number, reply)

    monkeypatch.setattr(SplitRequest, "hear", note)

    async def test(client):
        for seed in itertools.count():
            heard.clear()
            received = Received(1, on_tokens=lambda number: None)
            spec = SamplingSpec(max_new_tokens=8)
            (answer,) = await client.generate(server.url, PROMPT, spec, rid=str(seed), seed=seed, received=received)
            if len(answer.tokens) == 8 and set(heard) == set(range(1, 9)):
                break

    with_progress(test)


def test_stream_that_is_refused_has_its_status(server):
    async def test(client):
        received = Received(1, on_tokens=lambda number: None)
        with pytest.raises(GenerationError, match="status 400: input_ids is empty") as refused:
            await client.generate(server.url, [], LONG, rid="a", seed=1, received=received)
        assert not refused.value.retryable

    with_progress(test)


@samples
def test_aborted_stream_returns_its_tokens(server):
    """The model may end a completion before the abort: then another one is aborted."""

    async def test(client):
        completion = None
        for seed in itertools.count(1):
            told = asyncio.Event()
            received = Received(1, on_tokens=lambda number, told=told: told.set())
            call = client.generate(server.url, PROMPT, LONG, rid=str(seed), seed=seed, received=received)
            request = asyncio.create_task(call)
            await asyncio.wait((request, asyncio.create_task(told.wait())), return_when="FIRST_COMPLETED")
            await client.abort(server.url, str(seed))
            (completion,) = await request
            if completion.finish_reason == "abort":
                break
        count = len(received.completions[0].tokens)
        assert 0 < count <= len(completion.tokens) < 480
        assert received.completions[0].tokens.tolist() == completion.tokens[:count].tolist()

    with_progress(test)


@samples
def test_streams_go_on_across_an_update(server):
    """Streams follow each other while the weights change. Their tokens come before the reply, each with its version."""
    streams, told, updated = [], asyncio.Event(), asyncio.Event()

    async def keep_streaming(client, slot):
        for seed in itertools.count(slot, BUSY):
            is_last, received = updated.is_set(), Received(1, on_tokens=lambda number: told.set())
            calls = client.generate(server.url, PROMPT, LONG, rid=str(slot), seed=seed, received=received)
            streams.append((received.completions, *await calls))
            if is_last:
                return

    async def test(client):
        async with asyncio.TaskGroup() as callers:
            for slot in range(BUSY):
                callers.create_task(keep_streaming(client, slot))
            for version in range(1, MOST_VERSIONS):
                told.clear()
                await told.wait()
                assert (await client.update_weights(server.url, str(server.paths[version]), version, BOUND_S)).success
                if any(len(set(completion.versions.tolist())) > 1 for _, completion in streams):
                    break  # else all streams of that moment had just begun or ended
            else:
                pytest.fail("no update has met a stream")
            updated.set()
        for (so_far,), completion in streams:
            count = len(so_far.tokens)
            for name in ("tokens", "logprobs", "versions"):
                assert getattr(so_far, name).tolist() == getattr(completion, name)[:count].tolist()
            check(server, completion)

    with_progress(test)


@samples
def test_request_behind_others_is_not_silent(server):
    """Lines without a token of its own show the work on the requests before it: it may wait for any time."""
    if not server.seeded:
        pytest.skip("SGLang samples all of them at a time: none is behind others")

    async def test(client):
        crowd = await Crowd.decoding(client, server.url)
        behind = Watched(1)
        await client.generate(server.url, PROMPT, LONG, rid="behind", seed=1, received=behind)
        assert behind.empty_lines > 1, "the first line comes without any work"
        await crowd.finish()

    with_progress(test)


def test_paused_server_is_silent_not_failed(server):
    async def test(client):
        await client.pause(server.url, "in_place")
        impatient = GenerationClient(0.3, progress_s=0.05)
        with pytest.raises(ServerSilent, match="no answer and no progress within 0.3 s"):
            await impatient.generate(server.url, PROMPT, LONG, rid="a", seed=1)
        await impatient.close()
        async with asyncio.timeout(BOUND_S):  # the request of a client that left ends
            while (await client.server_info(server.url)).queued:
                pass
        await client.resume(server.url)

    drive(test)


@samples
def test_server_works_while_it_samples(server, monkeypatch):
    watch = functools.partial(monkeypatch.setattr, "realsys.generation.client.WATCH_S")
    watch(0.1)

    async def test(client):
        assert await client.works(server.url) is False  # it has no request, so ours is lost
        assert await client.works("http://127.0.0.1:1") is False
        crowd = await Crowd.decoding(client, server.url)
        watch(1.0)  # it samples within this time on a busy machine, too
        assert await client.works(server.url) is True
        watch(0.1)
        await crowd.finish()
        await client.pause(server.url, "in_place")
        assert await client.works(server.url) is True
        await client.resume(server.url)

    drive(test)


def test_client_that_leaves_a_stream_frees_its_places(server):
    async def test(client):
        await client.pause(server.url, "in_place")
        received = Watched(1)
        gone = asyncio.create_task(client.generate(server.url, PROMPT, LONG, rid="g", seed=1, received=received))
        await received.grown.wait()  # the first line: the reply has begun
        gone.cancel()
        while (await client.server_info(server.url)).queued:
            pass
        await client.resume(server.url)

    with_progress(test)


def test_full_server_is_busy_not_failed(server):
    async def test(client):
        await client.pause(server.url, "in_place")
        spec = SamplingSpec(max_new_tokens=4, n=server.max_answers)
        accepted = asyncio.create_task(client.generate(server.url, PROMPT, spec, rid="a", seed=1))
        async with asyncio.timeout(BOUND_S):
            while (await client.server_info(server.url)).queued < server.max_answers:
                pass
        with pytest.raises(ServerBusy, match="status 429: queue full") as refused:
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
            f"stop_token_ids contains {VOCAB}",
        ),
        ("/generate", {"input_ids": [1], "sampling_params": {"stop": ["end"]}}, "needs a tokenizer.json"),
        ("/update_weights_from_disk", {"model_path": "x", "weight_version": "new"}, "weight_version='new'"),
        ("/pause_generation", {"mode": "gently"}, "gently"),
        ("/abort_request", {}, "needs rid"),
    ],
)
def test_bad_requests_get_400_and_one_line(server, path, body, message):
    async def test(_):
        status, reply = await raw(server, path, body)
        assert status == 400
        assert message in reply["error"]["message"]
        assert "\n" not in reply["error"]["message"]
        good = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}
        assert (await raw(server, "/generate", good))[0] == 200

    drive(test)


def test_dead_server_is_a_retryable_named_error():
    async def test(client):
        with pytest.raises(ServerFailed, match=r"http://127\.0\.0\.1:1/generate: connection failed") as error:
            await client.generate("http://127.0.0.1:1", PROMPT, LONG, rid="a", seed=1)
        assert error.value.retryable

    drive(test)
