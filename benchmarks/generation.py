"""Tokens per second of the embedded engine, against ``transformers.generate`` and a bare decode loop.

Everything runs on one core: engine, HTTP server and client share it. The bare loop is what a batch of equal answers
could reach with plain torch: static cache, no scheduling, no requests, no HTTP. ``transformers.generate`` is called as
a user would, with its default cache; a batch of unequal answers runs until the longest is done, and only
requested tokens count.

Speeds are tokens per second of CPU time, of this process and of the SGLang it has started: on a free core that is wall
time, and what else the machine does disturbs it little. ``http_wall`` is by the clock, waits included.

With ``--sglang PYTHON``, an interpreter that has sglang (docs/generation.md), the same requests go to its own server.

    python -m benchmarks.generation [--repeats 3] [--concurrent 1 8 32 64] [--lengths equal heavy] [--sglang PYTHON]

``--model 135m`` measures random weights in bfloat16 with the sizes of SmolLM2-135M, without the bare loop, and writes
``generation_135m.json``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import math
import os
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from benchmarks._models import on_one_core, random_qwen2
from benchmarks._table import report
from realsys.cluster.http_server import HttpServer
from realsys.cluster.network import free_ports
from realsys.config.schema import EmbeddedConfig, GenerationConfig
from realsys.errors import WeightsError
from realsys.generation.backend import Staged
from realsys.generation.client import GenerationClient, SamplingSpec
from realsys.generation.embedded.engine import EmbeddedEngine, build_engine
from realsys.generation.protocol import SamplingParams
from realsys.generation.server import build_app
from realsys.generation.sglang.process import Launch
from realsys.model_files.architecture import ModelSizes

PROMPT, ANSWER, CONTEXT, VOCAB = 32, 128, 256, 1024
SIZES = ModelSizes(hidden=128, layers=2, heads=4, kv_heads=2, head_dim=32, ffn=384, outputs=VOCAB)
SIZES_135M = ModelSizes(hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64, ffn=1536, outputs=49_152)
#: name -> sizes, dtype, tied embeddings
MODELS = {"arith": (SIZES, "float32", False), "135m": (SIZES_135M, "bfloat16", True)}


@dataclass(frozen=True, slots=True)
class Load:
    """Request i wants ``lengths[i]`` tokens; ``concurrent`` requests run at a time."""

    name: str
    concurrent: int
    lengths: list[int]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def make_load(name: str, concurrent: int) -> Load:
    """equal: one batch of 128-token answers. heavy: four batches' worth, P(length) ~ length^-1.5 from 8 to 128."""
    if name == "equal":
        return Load(name, concurrent, [ANSWER] * concurrent)
    uniform = np.random.default_rng(concurrent).random(4 * concurrent)
    lengths = np.minimum(8 * (1 - uniform) ** -1.0, ANSWER).astype(int)
    return Load(name, concurrent, lengths.tolist())


def prompt(index: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(index).integers(4, VOCAB, PROMPT)]


class EngineOverHttp:
    """Requests by the product's client to the product's server."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self._server = HttpServer(build_app(engine))
        self._server.start()

    def __call__(self, load: Load) -> None:
        self._engine.flush().result(600)  # every turn sends the same prompts
        asyncio.run(self._run(load))

    async def _run(self, load: Load) -> None:
        client = GenerationClient(timeout_s=600)
        todo = iter(enumerate(load.lengths))

        async def caller() -> None:
            for index, length in todo:
                spec = SamplingSpec(max_new_tokens=length)
                [answer] = await client.generate(self._server.url, prompt(index), spec, rid=str(index), seed=index)
                assert len(answer.tokens) == length

        try:
            await asyncio.gather(*(caller() for _ in range(load.concurrent)))
        finally:
            await client.close()

    def close(self) -> None:
        self._server.close()


class SglangOverHttp:
    """The same requests to SGLang's own server, started as this system starts it, on the same core."""

    _START_S = 180.0

    def __init__(self, python: str, model_path: Path, dtype: str, log: Path) -> None:
        [port] = free_ports(1)
        launch = Launch(python, model_path, dtype, False, CONTEXT, tensor=1, seed=0, threads=1, gpus=False, options={})
        self._url = f"http://127.0.0.1:{port}"
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                launch.command(port), env=launch.environment(), stdout=output, stderr=output, start_new_session=True
            )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def __call__(self, load: Load) -> None:
        asyncio.run(self._run(load))

    def cpu_s(self) -> float:
        """Seconds of all its processes so far."""
        root = psutil.Process(self._process.pid)
        return sum(sum(p.cpu_times()[:2]) for p in (root, *root.children(recursive=True)))

    def close(self) -> None:
        children = psutil.Process(self._process.pid).children(recursive=True) if self._process.poll() is None else []
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self._process.wait()

    def _wait(self) -> None:
        end = time.monotonic() + self._START_S
        while time.monotonic() < end and self._process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self._url}/health", timeout=5) as reply:
                if reply.status == 200:
                    return
            time.sleep(0.5)
        raise RuntimeError(f"SGLang does not serve; the end of its log: {self._log.read_text()[-2000:]}")

    async def _run(self, load: Load) -> None:
        todo = iter(enumerate(load.lengths))
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def caller() -> None:
                for index, length in todo:
                    params = {"max_new_tokens": length, "temperature": 1.0, "ignore_eos": True}
                    body = {"input_ids": prompt(index), "sampling_params": params, "return_logprob": True}
                    async with session.post(f"{self._url}/generate", json=body) as response:
                        assert len((await response.json())["output_ids"]) == length

            await asyncio.gather(*(caller() for _ in range(load.concurrent)))


def engine_direct(engine: EmbeddedEngine, load: Load) -> None:
    """The same requests without HTTP."""
    engine.flush().result(600)
    futures = [
        engine.generate(str(index), prompt(index), SamplingParams(max_new_tokens=length, sampling_seed=index))
        for index, length in enumerate(load.lengths)
    ]
    for future in futures:
        future.result(600)


@torch.inference_mode()
def transformers_generate(model: PreTrainedModel, load: Load) -> None:
    todo = iter(enumerate(load.lengths))
    while batch := list(itertools.islice(todo, load.concurrent)):
        ids = torch.tensor([prompt(index) for index, _ in batch])
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=max(length for _, length in batch),
        )


class BareLoop:
    """A decode loop over one static batch, in straightforward torch."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._config, self._state = model.config, dict(model.state_dict())
        self._fused: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for index in range(self._config.num_hidden_layers):
            name = f"model.layers.{index}."
            qkv = torch.cat([self._state[f"{name}self_attn.{part}_proj.weight"] for part in "qkv"])
            bias = torch.cat([self._state[f"{name}self_attn.{part}_proj.bias"] for part in "qkv"])
            gate_up = torch.cat([self._state[f"{name}mlp.{part}_proj.weight"] for part in ("gate", "up")])
            self._fused.append((qkv, bias, gate_up))
        dim = self._config.hidden_size // self._config.num_attention_heads
        angles = torch.outer(torch.arange(CONTEXT).float(), 10000.0 ** -(torch.arange(0, dim, 2) / dim))
        self._cos, self._sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)

    @torch.inference_mode()
    def __call__(self, load: Load) -> None:
        c, n = self._config, load.concurrent
        dim = c.hidden_size // c.num_attention_heads
        keys = torch.zeros(c.num_hidden_layers, n, c.num_key_value_heads, CONTEXT, dim)
        values = torch.zeros_like(keys)
        ids = torch.tensor([prompt(index)[-1] for index in range(n)])
        for position in range(PROMPT, PROMPT + ANSWER):
            logits = self._forward(ids, position, keys, values)
            logprobs = logits.log_softmax(-1)
            ids = torch.multinomial(logprobs.exp(), 1).squeeze(1)
            ids.tolist(), logprobs.gather(1, ids.unsqueeze(1))

    def _forward(self, ids: torch.Tensor, position: int, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        c, n, state = self._config, len(ids), self._state
        heads, kv, hidden = c.num_attention_heads, c.num_key_value_heads, (c.hidden_size,)
        dim = c.hidden_size // heads
        mask = torch.arange(CONTEXT) > position

        def rotate(x: torch.Tensor) -> torch.Tensor:
            turned = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1)
            return x * self._cos[position] + turned * self._sin[position]

        x = state["model.embed_tokens.weight"][ids]
        for index, (qkv, bias, gate_up) in enumerate(self._fused):
            name = f"model.layers.{index}."
            h = F.rms_norm(x, hidden, state[name + "input_layernorm.weight"], 1e-6)
            q, k, v = torch.split(F.linear(h, qkv, bias), [heads * dim, kv * dim, kv * dim], -1)
            keys[index, :, :, position] = rotate(k.view(n, kv, dim))
            values[index, :, :, position] = v.view(n, kv, dim)
            scores = rotate(q.view(n, kv, heads // kv, dim)) @ keys[index].transpose(-1, -2) / math.sqrt(dim)
            context = scores.masked_fill(mask, float("-inf")).softmax(-1) @ values[index]
            x = x + F.linear(context.reshape(n, -1), state[name + "self_attn.o_proj.weight"])
            h = F.rms_norm(x, hidden, state[name + "post_attention_layernorm.weight"], 1e-6)
            gate, up = F.linear(h, gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, state[name + "mlp.down_proj.weight"])
        return F.linear(F.rms_norm(x, hidden, state["model.norm.weight"], 1e-6), state["lm_head.weight"])


def never(path: str, version: int, *, loaded: bool = False) -> Staged:
    raise WeightsError(f"no weights are updated here ({path}, {version})")


def measure(
    methods: dict[str, Callable[[Load], None]], load: Load, repeats: int, cpu_s: Callable[[], float]
) -> dict[str, float]:
    """Best tokens/s of each method by CPU time, and as ``{name}_wall`` by the clock; the methods take turns."""
    best = dict.fromkeys([*methods, *(f"{name}_wall" for name in methods)], math.inf)
    for turn in range(repeats + 1):
        for name, method in methods.items():
            wall, cpu = time.perf_counter(), cpu_s()
            method(load)
            if turn:  # the first is for warming up
                best[name] = min(best[name], cpu_s() - cpu)
                best[f"{name}_wall"] = min(best[f"{name}_wall"], time.perf_counter() - wall)
    return {name: load.tokens / seconds for name, seconds in best.items()}


def compare(
    args: argparse.Namespace, path: Path, model: PreTrainedModel, sglang: SglangOverHttp | None
) -> list[dict[str, Any]]:
    def cpu_s() -> float:
        return time.process_time() + (sglang.cpu_s() if sglang else 0.0)

    embedded = EmbeddedConfig(max_running=max(args.concurrent), context_length=CONTEXT)
    dtype = next(model.parameters()).dtype
    rows = []
    for lengths, concurrent in itertools.product(args.lengths, args.concurrent):
        load = make_load(lengths, concurrent)
        config = GenerationConfig(embedded=embedded.model_copy(update={"max_running": concurrent}))
        engine = build_engine(path, config, never, dtype=dtype)
        engine.start()
        http = EngineOverHttp(engine)
        methods: dict[str, Callable[[Load], None]] = {
            "http": http,
            "direct": lambda load, engine=engine: engine_direct(engine, load),  # type: ignore[misc]
            "transformers": lambda load: transformers_generate(model, load),
        }
        if lengths == "equal" and args.model == "arith":
            methods["bare_loop"] = BareLoop(model)
        if sglang is not None:
            methods["sglang"] = sglang
        speed = measure(methods, load, args.repeats, cpu_s)
        engine.close()
        http.close()
        row: dict[str, Any] = {"lengths": lengths, "concurrent": concurrent, "http_wall": speed["http_wall"]}
        row |= {name: speed[name] for name in methods}
        row["http_vs_transformers"] = speed["http"] / speed["transformers"]
        if "bare_loop" in speed:
            row["http_vs_bare_loop"] = speed["http"] / speed["bare_loop"]
        if sglang is not None:
            row["http_vs_sglang"] = speed["http"] / speed["sglang"]
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--concurrent", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--lengths", nargs="+", choices=("equal", "heavy"), default=["equal", "heavy"])
    parser.add_argument("--model", choices=MODELS, default="arith")
    parser.add_argument("--sglang", metavar="PYTHON", help="an interpreter that has sglang")
    args = parser.parse_args()
    on_one_core()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        sizes, dtype, tied = MODELS[args.model]
        model = random_qwen2(sizes, path, positions=CONTEXT, dtype=dtype, tied=tied)
        sglang = SglangOverHttp(args.sglang, path, dtype, path / "sglang.log") if args.sglang else None
        try:
            rows = compare(args, path, model, sglang)
        finally:
            if sglang is not None:
                sglang.close()
    meta = {
        "unit": "tokens per CPU second",
        "hidden": sizes.hidden,
        "layers": sizes.layers,
        "dtype": dtype,
        "prompt": PROMPT,
        "answer": ANSWER,
    }
    report(
        "generation" if args.model == "arith" else f"generation_{args.model}",
        rows,
        {**meta, "repeats": args.repeats, "threads": 1},
    )


if __name__ == "__main__":
    main()
