"""The view that the contract suite of generation servers has of a server, and its client."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import aiohttp
import numpy as np
import pytest
import torch

from realsys.cluster.http_server import HttpServer
from realsys.config.schema import Config, EmbeddedConfig, GenerationConfig
from realsys.errors import GenerationError
from realsys.generation.backend import EngineParts, GenerationEngine, Materialised, make_backend
from realsys.generation.child import engine as child
from realsys.generation.child.engine import ChildEngine
from realsys.generation.child.requests import KeptKeys
from realsys.generation.client import GenerationClient, SamplingSpec
from realsys.generation.completion import Completion
from realsys.generation.embedded.decoder import read_tensors
from realsys.generation.embedded.engine import EmbeddedEngine, build_engine
from realsys.generation.embedded.prefix_cache import KvPolicy
from realsys.generation.server import build_app
from realsys.weights.disk import manifest
from realsys.weights.disk.stage import DiskReader
from realsys.weights.disk.writer import ShardWriter
from tests.support.processes.config_trees import changed
from tests.support.serving.generation_models import VOCAB, chosen, make_model, reference_logprobs
from tests.support.serving.sglang_server import VLLM_ROWS, sglang_engine, vllm_engine

log = logging.getLogger(__name__)

PROMPT = [3, 1, 4, 1, 5]
EOS = VOCAB - 1
CONTEXT = 512
VLLM_BLOCK = 32  # tokens of a block of its cache, on a CPU
LONG = SamplingSpec(max_new_tokens=480)
HEADS = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}  # of 32: vLLM has no smaller on a CPU
MOST_VERSIONS = 12
BUSY = 8  # requests of a crowd: more than an embedded server's rows
EXAMPLES = Path(__file__).resolve().parents[3] / "docs" / "examples"
#: For tests of the model behind the server; docs/examples/backend.py has none.
samples = pytest.mark.parametrize(
    "backend", ["embedded", "sglang", "sglang-derived", "vllm"], indirect=True, scope="module"
)
BOUND_S = 120.0  # no wait of a test is longer


@dataclass
class ServerUnderTest:
    """A running server. ``models[v]`` is what transformers says about version v; no models: it echoes its prompt.

    ``start``: the version that it serves when a test begins. ``seeded``: a seed decides an answer whatever else runs;
    SGLang needs its deterministic inference for that, which it has not on a CPU. ``block``: tokens of a block of its
    prefix cache.
    """

    url: str
    models: dict[int, object]
    paths: dict[int, Path]
    max_answers: int  # that it runs and queues
    start: int = -1
    seeded: bool = True
    block: int = 1
    engine: GenerationEngine | None = None


@dataclass(frozen=True)
class Versions:
    """A base model, -1, which is also published as version 0, and versions of two more models of its architecture."""

    models: dict[int, object]
    paths: dict[int, Path]


@dataclass(frozen=True)
class Running:
    """One SGLang or vLLM for many tests."""

    engine: ChildEngine
    url: str


def make_versions(root: Path) -> Versions:
    models, paths = {}, {}
    for version in (-1, 1, 2):
        path = root / f"hf{version}"
        models[version] = make_model("qwen2", path, seed=version + 10, eos=EOS, **HEADS)
        paths[version] = path if version < 0 else publish(root, version, path)
    models[0], paths[0] = models[-1], publish(root, 0, paths[-1])
    for version in range(3, MOST_VERSIONS):  # the weights of 1 and 2 in turn
        same = 2 - version % 2
        models[version], paths[version] = models[same], publish(root, version, root / f"hf{same}")
    return Versions(models, paths)


@contextmanager
def child_server(name: str, versions: Versions) -> Iterator[Running]:
    with mock.patch.object(child, "MAX_ANSWERS", 16):
        make = sglang_engine if name == "sglang" else vllm_engine
        engine = make(versions.paths[-1], "rollout.max_concurrent=1", "weights.transport=group")
    engine.start()
    try:
        # Its staging thread is there from now on.
        assert engine.update(str(versions.paths[0]), 0).result(BOUND_S).success
        http = HttpServer(build_app(engine))
        http.start()
        try:
            yield Running(engine, http.url)
        finally:
            http.close()
    finally:
        engine.close()


@contextmanager
def reporting(running: Running, reports: bool) -> Iterator[None]:
    """Make SGLang report the version of every token, or not."""
    traffic = running.engine._traffic
    run = traffic.run
    assert run is not None
    traffic.run = replaced = dataclasses.replace(run, reports=reports)
    yield
    if traffic.run is replaced:  # else SGLang has been restarted, and this run is over
        traffic.run = run


def _reset(engine: ChildEngine, versions: Versions) -> str:
    try:
        for call in (engine.abort_all, engine.wake, engine.resume):
            call().result(BOUND_S)
        back = engine.update(str(versions.paths[0]), 0).result(BOUND_S)
    except GenerationError as error:
        return str(error)
    return "" if back.success else back.message


def fresh(running: Running, versions: Versions) -> ServerUnderTest:
    """An engine with nothing left of the test before, back at version 0. Its supervisor restarts one that died."""
    end = time.monotonic() + BOUND_S
    while problem := _reset(running.engine, versions):
        assert time.monotonic() < end, problem
        log.warning("%s; waiting for the engine", problem)
        threading.Event().wait(0.5)
    vllm = running.engine.info().result(BOUND_S).backend == "vllm"
    return ServerUnderTest(
        running.url,
        versions.models,
        versions.paths,
        16,
        start=0,
        seeded=vllm,
        block=VLLM_BLOCK if vllm else 1,
        engine=running.engine,
    )


@contextmanager
def embedded_server(versions: Versions) -> Iterator[ServerUnderTest]:
    config = GenerationConfig(embedded=EmbeddedConfig(max_running=4, max_queued=12, context_length=CONTEXT))
    engine = build_engine(versions.paths[-1], config, DiskReader(everything=True).stage)
    with serving(engine) as url:
        yield ServerUnderTest(url, versions.models, versions.paths, 16, engine=engine)


@contextmanager
def keeping(server: ServerUnderTest, reuse: int) -> Iterator[None]:
    """Set asynchronous.kv_on_update=keep and kv_reuse_versions on a running server, which has no request."""
    if isinstance(server.engine, EmbeddedEngine):  # each test has its own
        server.engine.core._kv = KvPolicy(True, reuse)
        yield
        return
    assert isinstance(server.engine, ChildEngine)
    traffic = server.engine._traffic
    before, traffic.keys = traffic.keys, KeptKeys(keep=True, reuse=reuse)
    traffic.keys.restart(traffic.version)
    try:
        yield
    finally:
        traffic.keys = before  # the next load drops what is kept


@contextmanager
def example_server(versions: Versions) -> Iterator[ServerUnderTest]:
    """The example of docs/examples/backend.py, built as a GenerationServer builds it."""
    settings = ["data.max_prompt_tokens=32", f"generation.sampling.max_new_tokens={CONTEXT - 32}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        config = changed("generation.backend=backend:Echo", *settings)
        backend = make_backend(config)
        with serving(backend.build(engine_parts(config, versions.paths[-1]))) as url:
            yield ServerUnderTest(url, {}, versions.paths, backend.capacity())


def engine_parts(config: Config, model_path: Path) -> EngineParts:
    """Parts of an engine outside of a GenerationServer process; versions are verified as in one."""

    def materialise(source: str, version: int, target: Path, *, loaded: bool = False) -> Materialised:
        raise AssertionError("this engine loads from memory")

    load = DiskReader(everything=True).stage
    return EngineParts(config, model_path, 0, load, materialise, lambda change: None, lambda callback: None)


@contextmanager
def serving(engine: GenerationEngine) -> Iterator[str]:
    """Start an engine behind HTTP; gives the URL."""
    http = HttpServer(build_app(engine))
    engine.start()
    http.start()
    try:
        yield http.url
    finally:
        engine.close()
        http.close()


def publish(
    root: Path,
    version: int,
    model_dir: Path,
    *,
    tensors: dict[str, torch.Tensor] | None = None,
    writer: ShardWriter | None = None,
    base: str = "",
    incarnation: str = "test",
) -> Path:
    """A version of ``tensors``, or else of those in ``model_dir``. ``base``: folder of the version before."""
    tmp = manifest.prepare(root, version, incarnation)
    file = tmp / "model-00001-of-00001.safetensors"
    shard = (writer or ShardWriter()).write(file, tensors or read_tensors(model_dir), base)
    return manifest.commit(
        tmp, version=version, incarnation=incarnation, step=version, shards=[shard], model_dir=model_dir
    )


def drive(test):
    """Run ``test(client)`` with a client of the product."""

    async def body():
        client = GenerationClient(timeout_s=BOUND_S)
        try:
            return await test(client)
        finally:
            await client.close()

    return asyncio.run(body())


def with_progress(test):
    """Run ``test(client)`` with a client that requests progress every 20 ms."""

    async def body():
        client = GenerationClient(BOUND_S, progress_s=0.02)
        try:
            async with asyncio.timeout(BOUND_S):
                await test(client)
        finally:
            await client.close()

    asyncio.run(body())


class Crowd:
    """``busy`` requests at a time that run for long: whenever one ends the next begins, until ``finish``.

    So some run whatever the machine does and wherever the model ends an answer. Every one of a slot has the slot's id.
    """

    def __init__(self, client: GenerationClient, url: str, busy: int = BUSY) -> None:
        self.answers: list[Completion] = []
        self._client, self._url = client, url
        self._last = False
        self._slots = [asyncio.create_task(self._keep(slot)) for slot in range(busy)]

    @classmethod
    async def decoding(cls, client: GenerationClient, url: str, busy: int = BUSY) -> Crowd:
        """Start a crowd, and return it when some of its requests decode."""
        crowd = cls(client, url, busy)
        await until_decoding(client, url, busy)
        return crowd

    def dismiss(self) -> None:
        """No further request begins."""
        self._last = True

    async def finish(self) -> list[Completion]:
        """All answers, once those under way have ended."""
        self.dismiss()
        await asyncio.gather(*self._slots)
        return self.answers

    async def _keep(self, slot: int) -> None:
        for seed in itertools.count(slot, BUSY):
            self.answers += await self._client.generate(self._url, PROMPT, LONG, rid=str(slot), seed=seed)
            if self._last:
                return


async def until_decoding(client: GenerationClient, url: str, busy: int) -> None:
    """Return when more than the prompts of those that run is in the KV cache. Every look is a round trip.

    A cache of blocks has a whole one for each prompt that runs: then it must have one more.
    """
    async with asyncio.timeout(BOUND_S):
        while (info := await client.server_info(url)).kv_tokens < (
            (min(busy, VLLM_ROWS) + 1) * VLLM_BLOCK if info.backend == "vllm" else 4 * len(PROMPT) + 10
        ):
            pass


def check(server: ServerUnderTest, answer, prompt=PROMPT) -> None:
    """Every log-prob is that of the version the token is attributed to; of an echo, 0."""
    tokens = answer.tokens.tolist()
    if not server.models:
        assert tokens == prompt and answer.logprobs.tolist() == [0.0] * len(tokens)
        return
    for version in set(answer.versions.tolist()):
        expected = chosen(reference_logprobs(server.models[version], prompt, tokens), tokens)
        mine = answer.versions == version
        assert np.abs(expected - answer.logprobs)[mine].max() <= 1e-4


def flip(path: Path, offset: int = -1) -> None:
    """Change one byte of a file."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


async def raw(server: ServerUnderTest, path: str, body: object) -> tuple[int, dict]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with aiohttp.ClientSession() as session, session.post(server.url + path, data=data) as response:
        return response.status, await response.json()


def shard_of(version: Path) -> Path:
    return next(version.glob("model-*"))
