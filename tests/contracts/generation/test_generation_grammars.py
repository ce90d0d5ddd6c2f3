"""Completions under a grammar, on the real SGLang: their text, their log-probs, and an update in the middle."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from realsys.cluster.http_server import HttpServer
from realsys.config.schema import TinyModelConfig
from realsys.data.arith import make_tiny_model, write_char_tokenizer
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import GenerationError
from realsys.generation.client import GenerationClient, Received, SamplingSpec
from realsys.generation.server import build_app
from realsys.types import CONSTRAINED
from tests.support.serving.gateways import USER, over_server
from tests.support.serving.generation_servers import BOUND_S, publish
from tests.support.serving.sglang_server import needs_sglang, sglang_engine

ARGS = "generation.sglang.args={context-length: 512, skip-tokenizer-init: false}"
FORMAT = {"type": "regex", "pattern": "[ab]{300}"}


@dataclass
class Server:
    url: str
    tokenizer: TextTokenizer
    versions: list[Path]


@pytest.fixture(scope="module", params=["sglang"])
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    needs_sglang()
    paths = [tmp_path_factory.mktemp(f"chat{seed}") for seed in range(2)]
    for seed, path in enumerate(paths):
        make_tiny_model(TinyModelConfig(chat=True), path, seed=seed)
        write_char_tokenizer(path, chat=True)
    root = tmp_path_factory.mktemp("versions")
    versions = [publish(root, seed, path) for seed, path in enumerate(paths)]
    engine = sglang_engine(paths[0], ARGS, "rollout.max_concurrent=1")
    engine.start()
    assert engine.update(str(versions[0]), 0).result(BOUND_S).success  # its staging thread is there from now on
    http = HttpServer(build_app(engine))
    http.start()
    try:
        yield Server(http.url, TextTokenizer(paths[0]), versions)
    finally:
        http.close()
        engine.close()


def test_agents_get_the_form_that_they_ask_for(server):
    """As a plain call and as a stream; the rows are trained."""
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["x", "yz"]}}}

    async def run():
        settings = ("generation.backend=sglang", ARGS, "generation.sampling.max_new_tokens=40")
        async with over_server(server.url, server.tokenizer, *settings) as episode:
            completions = episode.sdk().chat.completions
            reply = await completions.create(model="m", messages=[USER], response_format=schema)
            assert json.loads(reply.choices[0].message.content) in ("x", "yz")
            assert reply.choices[0].finish_reason == "stop"
            choices = {"structured_outputs": {"choice": ["yes", "no"]}}
            stream = await completions.create(model="m", messages=[USER], stream=True, extra_body=choices)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            assert text in ("yes", "no")
            assert episode.session.capture.metrics()[CONSTRAINED] == len(episode.session.capture.rows()) == 2

    asyncio.run(run())


def spec_of(form, **settings):
    tag = json.dumps({"type": "structural_tag", "format": form})
    return SamplingSpec(structural_tag=tag, **{"max_new_tokens": 320, **settings})


def test_grammar_holds_across_an_update(server):
    """Log-probs are of the two letters that are left, which have all of the probability."""

    async def run():
        client, told = GenerationClient(BOUND_S, progress_s=0.02), asyncio.Event()
        received = Received(1, on_tokens=lambda number: told.set())
        prompt = server.tokenizer.encode_chat([USER])
        calls = [client.generate(server.url, prompt, spec_of(FORMAT), rid="stream", seed=1, received=received)]
        calls.append(client.generate(server.url, prompt, spec_of(FORMAT, top_logprobs_num=2), rid="plain", seed=2))
        tasks = [asyncio.ensure_future(call) for call in calls]
        await told.wait()  # both have begun, and have 300 tokens to go
        assert (await client.update_weights(server.url, str(server.versions[1]), 1, BOUND_S)).success
        (stream,), (plain,) = await asyncio.gather(*tasks)
        for completion in (stream, plain):
            assert re.fullmatch("[ab]{300}", server.tokenizer.completion_text(completion.tokens.tolist()))
            assert completion.finish_reason == "stop" and completion.versions[0] == 0
            assert completion.logprobs[-1] == 0.0, "only the end is left"
        letters = [sum(np.exp([value for _, value in best])) for best in plain.top[:300]]
        assert np.allclose(letters, 1.0, atol=1e-5)
        assert received.completions[0].tokens.tolist() == stream.tokens[: len(received.completions[0].tokens)].tolist()
        await client.close()

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_grammar_that_cannot_be_used_is_refused(server, stream):
    async def run():
        client, received = GenerationClient(BOUND_S, progress_s=0.02), Received(1)
        received.on_tokens = (lambda number: None) if stream else None
        bad = spec_of({"type": "json_schema", "json_schema": {"type": "nonsense"}})
        with pytest.raises(GenerationError, match='Unsupported type "nonsense"') as refused:
            await client.generate(server.url, [5, 6], bad, rid="bad", seed=1, received=received)
        assert not refused.value.retryable
        with pytest.raises(GenerationError, match="answer_prefix must be 0"):
            await client.generate(server.url, [5, 6], spec_of(FORMAT, answer_prefix=1), rid="rest", seed=1)
        await client.close()

    asyncio.run(run())
