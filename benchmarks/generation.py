"""Tokens per second of the embedded engine, against ``transformers.generate`` and a bare decode loop.

Everything runs on one core: engine, HTTP server and client share it. The bare loop is what a batch of equal answers
could reach with plain torch: static cache, no scheduling, no requests, no HTTP. ``transformers.generate`` is called as
a user would, with its default cache; a batch of unequal answers runs until the longest is done, and only tokens that
were asked for count.

Speeds are tokens per second of this process's CPU time: all parts run in it, so on a free core that is wall time, and
what else the machine does disturbs it little. ``http_wall`` is by the clock, waits included.

    python -m benchmarks.generation [--repeats 3] [--concurrent 1 8 32 64] [--lengths equal heavy]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

from benchmarks._table import report
from realsys.config.schema import EmbeddedConfig, GenerationConfig
from realsys.errors import WeightsError
from realsys.generation.build import build_engine
from realsys.generation.client import GenerationClient, SamplingSpec
from realsys.generation.engine import Engine, Staged
from realsys.generation.protocol import SamplingParams
from realsys.generation.server import HttpServer, build_app

PROMPT, ANSWER, CONTEXT, VOCAB = 32, 128, 256, 1024


@dataclass(frozen=True, slots=True)
class Load:
    """``lengths[i]`` tokens are asked of request i; ``concurrent`` of them at a time."""

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

    def __init__(self, engine: Engine) -> None:
        self._server = HttpServer(build_app(engine))
        self._server.start()

    def __call__(self, load: Load) -> None:
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


def engine_direct(engine: Engine, load: Load) -> None:
    """The same requests without HTTP."""
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


def make_model(path: Path) -> PreTrainedModel:
    """Hidden 128, 2 layers, float32; no end-of-text token, so that lengths are what was asked for."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    transformers_logging.disable_progress_bar()
    model = Qwen2ForCausalLM(config).eval()
    model.save_pretrained(path)
    return model


def never(path: str, version: int) -> Staged:
    raise WeightsError(f"no weights are updated here ({path}, {version})")


def measure(methods: dict[str, Callable[[Load], None]], load: Load, repeats: int) -> dict[str, float]:
    """Best tokens/s of each method by CPU time, and as ``{name}_wall`` by the clock; the methods take turns."""
    best = dict.fromkeys([*methods, *(f"{name}_wall" for name in methods)], math.inf)
    for turn in range(repeats + 1):
        for name, method in methods.items():
            wall, cpu = time.perf_counter(), time.process_time()
            method(load)
            if turn:  # the first is for warming up
                best[name] = min(best[name], time.process_time() - cpu)
                best[f"{name}_wall"] = min(best[f"{name}_wall"], time.perf_counter() - wall)
    return {name: load.tokens / seconds for name, seconds in best.items()}


def compare(args: argparse.Namespace, path: Path) -> list[dict[str, Any]]:
    model = make_model(path)
    embedded = EmbeddedConfig(max_running=max(args.concurrent), context_length=CONTEXT)
    rows = []
    for lengths, concurrent in itertools.product(args.lengths, args.concurrent):
        load = make_load(lengths, concurrent)
        config = GenerationConfig(embedded=embedded.model_copy(update={"max_running": concurrent}))
        engine = build_engine(path, config, never, max_prompt_tokens=PROMPT)
        engine.start()
        http = EngineOverHttp(engine)
        methods: dict[str, Callable[[Load], None]] = {
            "http": http,
            "direct": lambda load, engine=engine: engine_direct(engine, load),  # type: ignore[misc]
            "transformers": lambda load: transformers_generate(model, load),
        }
        if lengths == "equal":
            methods["bare_loop"] = BareLoop(model)
        speed = measure(methods, load, args.repeats)
        engine.close()
        http.close()
        row: dict[str, Any] = {"lengths": lengths, "concurrent": concurrent, "http_wall": speed["http_wall"]}
        row |= {name: speed[name] for name in methods}
        row["http_vs_transformers"] = speed["http"] / speed["transformers"]
        if lengths == "equal":
            row["http_vs_bare_loop"] = speed["http"] / speed["bare_loop"]
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--concurrent", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--lengths", nargs="+", choices=("equal", "heavy"), default=["equal", "heavy"])
    args = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(args, Path(folder))
    meta = {
        "unit": "tokens per CPU second",
        "hidden": 128,
        "layers": 2,
        "dtype": "float32",
        "prompt": PROMPT,
        "answer": ANSWER,
    }
    report("generation", rows, {**meta, "repeats": args.repeats, "threads": 1})


if __name__ == "__main__":
    main()
