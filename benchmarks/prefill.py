"""The longest a running answer waits for its next token while a long prompt arrives, by the budget of a step.

One prompt of 3,900 tokens arrives while 32 answers decode. Without chunks (a budget that holds all of it) every running
answer waits until it is computed; with them a step computes at most ``prefill_tokens`` of it. The time to the long
prompt's own first token is the price. CPU time of the engine, all budgets in turn.

    python -m benchmarks.prefill [--repeats 3] [--budgets 4096 1024 512 128]
"""

from __future__ import annotations

import argparse
import tempfile
import time
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

RUNNING, LONG, CONTEXT = 32, 3900, 4096


def request(rid: str, length: int, new_tokens: int) -> Request:
    prompt = np.random.default_rng(len(rid)).integers(0, VOCAB, length).astype(np.int32)
    return Request(rid, prompt, SamplingParams(max_new_tokens=new_tokens), 0, (), Future())


def measure(core: EngineCore) -> tuple[float, float]:
    """Longest gap between two steps of the running answers, and the long prompt's time to its first token, in s."""
    core.rows.forget()  # of the turn before
    for index in range(RUNNING):
        core.submit(request(f"{index:02}", 16 + index, 150))
    for _ in range(20):
        core.step()
    core.submit(request("long", LONG, 2))
    gaps: list[float] = []
    while core.scheduler.find("long") is not None:
        begin = time.process_time()
        core.step()
        gaps.append(time.process_time() - begin)
    while not core.idle:
        core.step()
    return max(gaps), sum(gaps[:-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budgets", type=int, nargs="+", default=[4096, 1024, 512, 128])
    args = parser.parse_args()
    on_one_core()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        random_qwen2(SIZES, path, positions=CONTEXT)
        arch = read_model(path)
        weights = fuse(arch, read_tensors(path), dtype=torch.float32, device=torch.device("cpu"))
    cores = {
        budget: EngineCore(
            arch,
            weights,
            CoreSizes(max_running=RUNNING + 1, max_queued=64, context=CONTEXT, prefill_tokens=budget),
        )
        for budget in args.budgets
    }
    best: dict[int, tuple[float, float]] = {}
    for turn in range(args.repeats + 1):
        for budget, core in cores.items():
            result = measure(core)
            if turn:  # the first is for warming up
                best[budget] = min(best.get(budget, result), result)
    rows: list[dict[str, Any]] = [
        {"prefill_tokens": budget, "longest_gap_ms": 1000 * gap, "first_token_ms": 1000 * first}
        for budget, (gap, first) in best.items()
    ]
    report("prefill", rows, {"running": RUNNING, "prompt": LONG, "repeats": args.repeats, "threads": 1})


if __name__ == "__main__":
    main()
