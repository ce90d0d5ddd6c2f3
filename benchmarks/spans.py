"""Cost of the timeline: one span, and a server. ``benchmarks.telemetry`` measures whole jobs.

    python -m benchmarks.spans [--blocks 60]

1. The time of one span in one process, with and without recording, and of writing it (``flush``: on the recorder's
   thread).
2. The CPU time of the embedded engine, in pairs of blocks, on and off in turn: a block completes 256 prompts of the
   arith model with 50 tokens each, the shortest completions of a real run. The thread of the recorder is included.

    us             least time of a call in microseconds, over ROUNDS rounds
    cpu_s          of a block; ``ratio``: on over off, median over the pairs and its standard error
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks._models import on_one_core, random_qwen2
from benchmarks._table import report
from benchmarks.generation import SIZES, VOCAB
from realsys.generation.embedded.core import CoreSizes, EngineCore
from realsys.generation.embedded.decoder import fuse, read_tensors
from realsys.generation.embedded.scheduler import Request
from realsys.generation.protocol import SamplingParams
from realsys.model_files.config_json import read_model
from realsys.observe import spans
from realsys.observe.spans import Phases, Recorder, span

ROUNDS, CALLS = 30, 5_000
COMPLETIONS, GROUP, PROMPT, NEW_TOKENS, CONTEXT = 256, 8, 16, 50, 128


def _span() -> None:
    with span("reward", "0000000105.0/3", tokens=17):
        pass


def _add() -> None:
    spans.add("decode", 1, 2, "0000000105.0.3.0.0#1", version=4, tokens=17)


def _completion() -> None:
    """Record the three spans of a completion in a server."""
    phases = Phases("0000000105.0.3.0.0#1", "queue")
    phases.enter("prefill")
    phases.enter("decode", positions=17)
    phases.enter("", end="stop", version=4, tokens=17)


def least_us(call: Callable[[], None], after: Callable[[], None] = lambda: None) -> float:
    """Return the least time of a call over ROUNDS rounds: other processes only add to it. ``after`` ends a round."""
    least = float("inf")
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        least = min(least, time.perf_counter() - begin)
        after()
    return 1e6 * least / CALLS


def flush_us(folder: Path) -> float:
    """Return the time per span of encoding and writing, on the recorder's thread."""
    recorder = Recorder(folder, "worker/0", "1", 1 << 30)
    least = float("inf")
    for _ in range(ROUNDS):
        for number in range(CALLS):
            recorder.record(("decode", number, 5, "0000000105.0.3.0.0#1", {"version": 4, "tokens": 17}))
        begin = time.perf_counter()
        recorder.flush()
        least = min(least, time.perf_counter() - begin)
    recorder.stop()
    return 1e6 * least / CALLS


def measure_calls() -> list[dict[str, Any]]:
    """Return the time of each kind of call, with recording and without."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="spans_") as folder:
        for call in (_span, _add, _completion):
            off = min(least_us(call), least_us(call))  # the first one also warms up
            spans.start(Path(folder) / call.__name__, "worker/0", "1", 1 << 30)
            try:
                on = least_us(call, after=spans.flush)
            finally:
                spans.stop()
            rows.append({"call": call.__name__.strip("_"), "on_us": round(on, 3), "off_us": round(off, 3)})
        rows.append({"call": "flush", "on_us": round(flush_us(Path(folder) / "flush"), 3), "off_us": 0.0})
    return rows


def measure_server(blocks: int) -> list[dict[str, Any]]:
    """Return the CPU seconds of a block of completions with spans and without, and their ratio."""
    on_one_core()
    with tempfile.TemporaryDirectory(prefix="spans_") as folder:
        path = Path(folder) / "model"
        random_qwen2(SIZES, path, positions=CONTEXT)
        arch = read_model(path)
        weights = fuse(arch, read_tensors(path), dtype=torch.float32, device=torch.device("cpu"))
        core = EngineCore(arch, weights, CoreSizes(COMPLETIONS, COMPLETIONS, CONTEXT))
        _block(core)
        pairs = []
        for pair in range(blocks):
            modes = ("on", "off") if pair % 2 else ("off", "on")
            pairs.append({mode: _block_s(core, Path(folder) / "spans", mode) for mode in modes})
    ratios = [pair["on"] / pair["off"] for pair in pairs]
    error = 1.25 * statistics.stdev(ratios) / math.sqrt(blocks)  # of a median
    means = {f"{mode}_cpu_s": statistics.mean(pair[mode] for pair in pairs) for mode in ("on", "off")}
    return [{"part": "server", "pairs": blocks, **means, "ratio": statistics.median(ratios), "error": error}]


def _block_s(core: EngineCore, folder: Path, mode: str) -> float:
    """Return the CPU seconds of a block. The recorder starts before, and writes all spans inside of the time."""
    if mode == "on":
        spans.start(folder, "worker/0", "1", 1 << 30)
    begin = time.process_time()
    _block(core)
    spans.flush()
    seconds = time.process_time() - begin
    spans.stop()
    return seconds


def _block(core: EngineCore) -> None:
    core.rows.forget()  # keys of the block before
    for number in range(COMPLETIONS // GROUP):
        prompt = np.random.default_rng(number).integers(0, VOCAB, PROMPT).astype(np.int32)
        params = SamplingParams(max_new_tokens=NEW_TOKENS, n=GROUP)
        core.submit(Request(f"{number:010}.0.0.0.0", prompt, params, number, (), Future()))
    while not core.idle:
        core.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=60, help="pairs of blocks of completions")
    options = parser.parse_args()
    report("span_calls", measure_calls(), {"rounds": ROUNDS, "calls": CALLS})
    settings = {"completions": COMPLETIONS, "new_tokens": NEW_TOKENS}
    report("span_server", measure_server(options.blocks), settings)


if __name__ == "__main__":
    main()
