"""Conversations with and without the keys of their earlier turns: prefilled tokens and time, over HTTP, on one core.

One conversation of 128 turns grows to 32k tokens; eight at a time grow to 2k tokens, with and without weight updates. A
turn sends the conversation so far with 7/8 new tokens and samples 1/8. Without the cache, the client calls /flush_cache
before every turn. ``new_tokens`` are those of the prompts that no earlier turn sent or sampled. ``cpu_s`` is the CPU
time of client, server and engine, which other work on the machine disturbs less than ``seconds``.

    python -m benchmarks.prefix_cache [--turns 128]
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._models import on_one_core, random_qwen2
from benchmarks._table import report
from realsys.cluster.http_client import HttpClient
from realsys.cluster.http_server import HttpServer
from realsys.config.schema import EmbeddedConfig, GenerationConfig
from realsys.generation.client import GenerationClient, SamplingSpec
from realsys.generation.embedded.decoder import read_tensors
from realsys.generation.embedded.engine import EmbeddedEngine, build_engine
from realsys.generation.embedded.prefix_cache import KvPolicy
from realsys.generation.server import build_app
from realsys.model_files.architecture import ModelSizes
from tests.support.serving.generation_models import Weights

SIZES = ModelSizes(hidden=64, layers=2, heads=2, kv_heads=1, head_dim=32, ffn=192, outputs=1024)
SLOTS, WAIT_S = 8, 600.0


@dataclass(frozen=True, slots=True)
class Case:
    """``update_every``: turns of all conversations between two weight updates; 0: none."""

    name: str
    talks: int
    turns: int
    tokens: int  # tokens by which a turn extends its conversation
    cached: bool = True
    update_every: int = 0
    kv: KvPolicy | None = None

    @property
    def context(self) -> int:
        return self.turns * self.tokens


class Conversations:
    """All conversations of a case at one server."""

    def __init__(self, case: Case, engine: EmbeddedEngine, url: str) -> None:
        self._case = case
        self._engine = engine
        self._url = url
        self._client = GenerationClient(timeout_s=WAIT_S)
        self._http = HttpClient(None)
        self._spec = SamplingSpec(max_new_tokens=case.tokens // 8)
        self._turns = 0
        self.new_tokens = 0

    async def hold(self) -> None:
        """Hold all conversations to their ends."""
        try:
            await asyncio.gather(*(self._talk(number) for number in range(self._case.talks)))
        finally:
            await self._client.close()
            await self._http.close()

    async def _talk(self, number: int) -> None:
        rng, tokens, case = np.random.default_rng(number), [], self._case
        for turn in range(case.turns):
            tail = rng.integers(4, SIZES.outputs, case.tokens - case.tokens // 8).tolist()
            tokens += tail
            self.new_tokens += len(tail)
            if not case.cached:
                await self._http.call(self._url + "/flush_cache", {}, WAIT_S, WAIT_S)
            [completion] = await self._client.generate(
                self._url, tokens, self._spec, rid=f"{number}.{turn}", seed=number * case.turns + turn
            )
            tokens += completion.tokens.tolist()
            self._turns += 1
            if case.update_every and self._turns % case.update_every == 0:
                version = self._turns // case.update_every
                await asyncio.wrap_future(self._engine.update("memory", version))


def measure(case: Case, path: Path) -> dict[str, Any]:
    tensors = read_tensors(path)
    embedded = EmbeddedConfig(max_running=min(case.talks, SLOTS), context_length=case.context)
    engine = build_engine(
        path, GenerationConfig(embedded=embedded), lambda locator, version, loaded=False: Weights(tensors), kv=case.kv
    )
    engine.start()
    server = HttpServer(build_app(engine))
    server.start()
    try:
        talks = Conversations(case, engine, server.url)
        begin, cpu = time.perf_counter(), time.process_time()
        asyncio.run(talks.hold())
        seconds, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
    finally:
        server.close()
        engine.close()
    counters = engine.core.counters
    return {
        "case": case.name,
        "cache": "on" if case.cached else "off",
        "new_tokens": talks.new_tokens,
        "prefilled": counters.prefilled,
        "prefilled_over_new": counters.prefilled / talks.new_tokens,
        "hit_rate": counters.reused / (counters.reused + counters.prefilled),
        "sampled": counters.tokens,
        "seconds": seconds,
        "cpu_s": cpu_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=128)
    args = parser.parse_args()
    on_one_core()
    one = Case("one, 32k tokens", 1, args.turns, 32768 // 128)
    eight = Case("eight, 2k tokens each", SLOTS, args.turns, 16)
    updates = replace(eight, name="eight, an update every 64 turns", update_every=64)
    reuse = replace(updates, name="the same, kv_reuse_versions=1", kv=KvPolicy(keep=True, reuse_versions=1))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        random_qwen2(SIZES, Path(folder), positions=one.context)
        for case in (one, replace(one, cached=False), eight, replace(eight, cached=False), updates, reuse):
            rows.append(measure(case, Path(folder)))
            print(rows[-1], flush=True)
    for name in ("seconds", "cpu_s"):
        off = {row["new_tokens"]: row[name] for row in rows if row["cache"] == "off"}
        for row in rows:
            row[f"{name}_over_off"] = row[name] / off[row["new_tokens"]]
    report("prefix_cache", rows, {"turns": args.turns, "slots": SLOTS, "threads": 1})


if __name__ == "__main__":
    main()
