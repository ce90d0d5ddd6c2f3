"""Tokens per second with weight updates in the middle of answers, against waiting for running answers to finish.

Two embedded engines of the same model decode the same endless stream of answers with heavy-tailed lengths. New weights
come each time when ``batches`` times as many answers have finished as run at a time: about once in the experiments that
are shipped and in the paper, where a batch of answers is in flight. One engine interrupts (recomputes the KV cache of
running answers and continues), the other drains (admits no request, lets running answers finish, then swaps). They take
turns, one update each, so both see the same machine; the clock is the CPU time of the engine's thread, where all of
this happens, so what else the machine does disturbs little.

An update costs the one the prefill of what runs, the other the steps that it decodes with few answers. So what is
gained grows with the longest answer, and with how little faster a nearly empty step is than a full one.

    python -m benchmarks.interruption [--turns 4] [--running 8 64] [--longest 200 1000] [--batches 1 8]
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks._models import on_one_core, random_qwen2
from benchmarks._table import report
from realsys.config.schema import EmbeddedConfig, GenerationConfig
from realsys.generation.embedded.core import EngineCore
from realsys.generation.embedded.decoder import read_tensors
from realsys.generation.embedded.engine import build_engine
from realsys.generation.protocol import SamplingParams, UpdateResult
from realsys.model_files.architecture import ModelSizes

VOCAB, PROMPT, SHORTEST, GROUP = 64, 32, 16, 8
#: of the arith experiment
SIZES = ModelSizes(hidden=128, layers=2, heads=4, kv_heads=2, head_dim=32, ffn=256, outputs=VOCAB)
BOUND_S = 300.0


def answer_length(index: int, longest: int) -> int:
    """P(length) ~ length^-1.5 between SHORTEST and ``longest``, by inverse CDF."""
    u = np.random.default_rng(index).random()
    low, high = SHORTEST**-0.5, longest**-0.5
    return int((low - u * (low - high)) ** -2)


@dataclass
class Weights:
    """Loaded weights, as a loader returns them."""

    tensors: dict[str, torch.Tensor]
    timings: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    unchanged: bool = False
    release: Callable[[], None] = lambda: None


class Contestant:
    """An engine under full load. ``turn`` lets it run for some CPU time, then it rests."""

    def __init__(self, path: Path, running: int, longest: int, batches: int, *, interruptible: bool) -> None:
        self._longest, self._batch = longest, batches * running
        self._indices, self._versions = itertools.count(), itertools.count(1)
        self._begun: tuple[float, int, int] | None = None
        self._over = threading.Event()
        self._answers = 0  # finished in this turn
        self.cpu_s, self.tokens, self.prefilled = 0.0, 0, 0
        self.updates: list[dict[str, float]] = []
        tensors = read_tensors(path)
        config = GenerationConfig(
            embedded=EmbeddedConfig(max_running=running, max_queued=running, context_length=PROMPT + longest)
        )
        self._engine = build_engine(
            path,
            config,
            lambda path, version, *, loaded=False: Weights(tensors),
            interruptible=interruptible,
            on_step=self._on_step,
        )
        self._engine.start()
        self._engine.pause("in_place").result(BOUND_S)
        for _ in range(2 * running):
            self._request()

    def turn(self, *, measured: bool = True) -> None:
        """From the middle of one batch of answers to the middle of the next, with an update between them."""
        before = self.cpu_s, self.tokens, self.prefilled, list(self.updates)
        self._begun, self._answers = None, 0
        self._over.clear()
        self._engine.resume().result(BOUND_S)
        if not self._over.wait(BOUND_S):
            raise TimeoutError(f"a turn of {self._batch} answers was not over after {BOUND_S:g} s")
        self._engine.pause("in_place").result(BOUND_S)
        if not measured:
            self.cpu_s, self.tokens, self.prefilled, self.updates = before

    def close(self) -> None:
        self._engine.close()

    def _request(self) -> None:
        """GROUP requests in a row share their prompt."""
        index = next(self._indices)
        prompt = np.random.default_rng(index // GROUP).integers(0, VOCAB, PROMPT).tolist()
        params = SamplingParams(max_new_tokens=answer_length(index, self._longest), sampling_seed=index)
        self._engine.generate(str(index), prompt, params).add_done_callback(self._on_answer)

    def _on_answer(self, future: Future[Any]) -> None:
        if future.exception() is None:
            self._answers += 1
            if self._answers == self._batch // 2:
                self._engine.update("memory", next(self._versions)).add_done_callback(self._on_update)
            self._request()

    def _on_update(self, future: Future[UpdateResult]) -> None:
        if future.exception() is None:
            self.updates.append(future.result().timings)

    def _on_step(self, core: EngineCore) -> None:
        """In the engine's thread, after each step."""
        now, tokens, prefilled = time.thread_time(), core.counters.tokens, core.counters.prefilled
        if self._begun is None:
            self._begun = now, tokens, prefilled
        if self._answers >= self._batch and not self._over.is_set():
            self.cpu_s += now - self._begun[0]
            self.tokens += tokens - self._begun[1]
            self.prefilled += prefilled - self._begun[2]
            self._over.set()

    def row(self) -> dict[str, Any]:
        def mean_ms(name: str) -> float:
            values = [timings[name] for timings in self.updates if name in timings]
            return 1000 * float(np.mean(values)) if values else 0.0

        return {
            "tokens_per_s": self.tokens / self.cpu_s,
            "updates": len(self.updates),
            "prefilled_per_token": self.prefilled / self.tokens,
            "drain_ms": mean_ms("drain_s"),
            "pause_ms": mean_ms("pause_s"),
            "first_token_ms": mean_ms("first_token_s"),
        }


def compare(path: Path, running: int, longest: int, batches: int, turns: int) -> list[dict[str, Any]]:
    random_qwen2(SIZES, path, positions=PROMPT + longest)
    contestants = {
        "interrupt": Contestant(path, running, longest, batches, interruptible=True),
        "drain": Contestant(path, running, longest, batches, interruptible=False),
    }
    for turn in range(turns + 1):
        for contestant in contestants.values():
            contestant.turn(measured=turn > 0)  # the first only reaches the steady state
    load = {"running": running, "longest": longest, "batches": batches}
    rows = [{**load, "mode": name, **contestant.row()} for name, contestant in contestants.items()]
    for contestant in contestants.values():
        contestant.close()
    rows[0]["gain_percent"] = 100 * (rows[0]["tokens_per_s"] / rows[1]["tokens_per_s"] - 1)
    print(*rows, sep="\n", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--running", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--longest", type=int, nargs="+", default=[200, 1000])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    args = parser.parse_args()
    on_one_core()
    rows = []
    for running, longest, batches in itertools.product(args.running, args.longest, args.batches):
        with tempfile.TemporaryDirectory() as folder:
            rows += compare(Path(folder), running, longest, batches, args.turns)
    meta = {"unit": "tokens per CPU second", "group": GROUP, "answers_per_update": "batches x running"}
    report("interruption", rows, {**meta, "turns": args.turns, "threads": 1})


if __name__ == "__main__":
    main()
