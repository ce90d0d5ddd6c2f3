"""What the contract suite of generation servers knows of a server, and how it talks to one."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
import torch

from realsys.generation.client import Generated, GenerationClient, SamplingSpec
from realsys.generation.weights import read_tensors
from realsys.weights import manifest
from realsys.weights.shards import ShardWriter
from tests.generation_models import VOCAB, chosen, reference_logprobs

PROMPT = [3, 1, 4, 1, 5]
EOS = VOCAB - 1
CONTEXT = 512
LONG = SamplingSpec(max_new_tokens=480)
BUSY = 16  # requests on four rows: rounds enough that a loaded machine sees them run


@dataclass
class ServerUnderTest:
    """A running server. ``models[v]`` is what transformers says about version v.

    ``start``: the version that it serves when a test begins. ``seeded``: a seed decides an answer whatever else runs;
    SGLang needs its deterministic inference for that, which it has not on a CPU.
    """

    url: str
    models: dict[int, object]
    paths: dict[int, Path]
    max_answers: int  # that it runs and queues
    start: int = -1
    seeded: bool = True


def publish(
    root: Path,
    version: int,
    model_dir: Path,
    *,
    tensors: dict[str, torch.Tensor] | None = None,
    writer: ShardWriter | None = None,
    base: str = "",
) -> Path:
    """A version of ``tensors``, or else of those in ``model_dir``. ``base``: folder of the version before."""
    tmp = manifest.prepare(root, version, "test")
    file = tmp / "model-00001-of-00001.safetensors"
    shard = (writer or ShardWriter()).write(file, tensors or read_tensors(model_dir), base)
    return manifest.commit(tmp, version=version, incarnation="test", step=version, shards=[shard], model_dir=model_dir)


def drive(test):
    """Run ``test(client)`` with a client of the product."""

    async def body():
        client = GenerationClient(timeout_s=30)
        try:
            return await test(client)
        finally:
            await client.close()

    return asyncio.run(body())


async def until_decoding(client: GenerationClient, url: str, answers: int = BUSY) -> None:
    """Return when more than the prompts of these answers is in the KV cache. Every look is a round trip."""
    async with asyncio.timeout(60):
        while (await client.server_info(url)).kv_tokens < answers * len(PROMPT) + 10:
            pass


def start_long(client: GenerationClient, url: str, count: int = BUSY) -> list[asyncio.Task]:
    """Requests that run long enough to be interrupted, most of them: which ends when is the model's whim."""
    return [asyncio.create_task(client.generate(url, PROMPT, LONG, rid=str(i), seed=i)) for i in range(count)]


async def answers_of(requests: list[asyncio.Task]) -> list[Generated]:
    return [answer for group in await asyncio.gather(*requests) for answer in group]


def check(server: ServerUnderTest, answer, prompt=PROMPT) -> None:
    """Every log-prob is that of the version the token is attributed to."""
    tokens = answer.tokens.tolist()
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


# ---- what can be wrong with a version


def no_weights(version: Path) -> None:
    shard_of(version).unlink()


def no_manifest(version: Path) -> None:
    (version / "MANIFEST.json").unlink()


def corrupt_shard(version: Path) -> None:
    flip(shard_of(version))


def short_shard(version: Path) -> None:
    os.truncate(shard_of(version), 100)


def other_manifest(version: Path) -> None:
    manifest = json.loads((version / "MANIFEST.json").read_text())
    (version / "MANIFEST.json").write_text(json.dumps({**manifest, "version": 8}))


def shard_of(version: Path) -> Path:
    return next(version.glob("model-*"))
