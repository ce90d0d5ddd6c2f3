"""Train step on rows that begin alike, packed as trees, over the same rows packed one by one.

    python -m benchmarks.shared_prefixes [--models arith 135m] [--repeats 5]

One CPU rank, random weights, random tokens. Both sides alternate in one process, in CPU seconds.

    group         8 completions of one prompt, which has ``shared`` of the tokens of a row
    conversation  episodes of 8 turns; each turn is a row, which begins with the history before it, as with agents that
                  hide their reasoning
    alone         rows that share nothing

``inference`` and ``train`` are actor_inf and actor_train, ``tokens`` those of the rows, whether computed or shared.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from benchmarks._table import report
from benchmarks._training import PRESETS, RAW_ADVANTAGES, Samples, clock_of, make_model, request, single_rank, timed
from realsys.algorithm.prefix_tree import row_tree, shared_beginnings
from realsys.config.schema import Config
from realsys.train.megatron.device import Device, prepare_device
from realsys.train.worker.call_handlers import find_handler
from realsys.types import SequenceRef
from tests.support.training.sample_records import make_ref

GROUP, TURNS = 8, 8
CALLS = {"inference": ("actor_inf", {}), "train": ("actor_train", {"lr": 1e-6})}


def rows_of(kind: str, shared: float, completion: int, rng: np.random.Generator, vocab: int) -> list[tuple[Any, int]]:
    """Return the rows of one group: tokens, and how many of them are context."""

    def drawn(count: int) -> Any:
        return rng.integers(2, vocab, count).astype(np.int32)

    prompt = drawn(round(shared / (1 - shared) * completion)) if shared else drawn(completion)
    if kind == "group":
        return [(np.concatenate([prompt, drawn(completion)]), len(prompt)) for _ in range(GROUP)]
    if kind == "alone":
        return [(np.concatenate([drawn(len(prompt)), drawn(completion)]), len(prompt)) for _ in range(GROUP)]
    rows, history = [], prompt
    for _ in range(TURNS):
        rows.append((np.concatenate([history, drawn(completion)]), len(history)))
        history = np.concatenate([history, drawn(completion)])
    return rows


def batch(kind: str, shared: float, completion: int, groups: int, vocab: int) -> tuple[list[SequenceRef], Samples]:
    rng = np.random.default_rng(1)
    refs: list[SequenceRef] = []
    samples: Samples = {}
    for group in range(groups):
        rows = rows_of(kind, shared, completion, rng, vocab)
        beginnings = shared_beginnings([tokens for tokens, _ in rows])
        for k, ((tokens, context), own) in enumerate(zip(rows, beginnings, strict=True)):
            name = f"t{group:04d}/{k}"
            reward = 5.0 if rng.random() < 0.6 else -5.0
            refs.append(replace(make_ref(name, len(tokens), context, reward, group=group), shared=own))
            samples[name] = {
                "tokens": tokens,
                "loss_mask": np.arange(len(tokens)) >= context,
                "behav_logprobs": np.full(len(tokens) - context, -np.log(vocab), np.float32),
            }
    return refs, samples


def cases() -> Iterator[tuple[str, float]]:
    yield "alone", 0.0
    yield from (("group", shared) for shared in (0.25, 0.5, 0.75, 0.85))
    yield "conversation", 0.5


def measure(model: str, folder: Path, options: argparse.Namespace, device: Device) -> Iterator[dict[str, Any]]:
    train = {"microbatch_tokens": options.microbatch, "ppo": {"advantage": RAW_ADVANTAGES, "minibatches": 2}}
    dtype = "bfloat16" if model == "135m" else "float32"
    config = Config.model_validate({"model": {"dtype": dtype}, "train": train})
    _, clock = clock_of(device)
    with single_rank(config, folder, device) as role:
        for kind, shared in cases():
            refs, samples = batch(kind, shared, options.completion, options.groups, PRESETS[model].outputs)
            for name, arrays in samples.items():
                role.data.put(name, arrays)
            sides = {"shared": refs, "plain": [replace(ref, shared=[]) for ref in refs]}
            seconds: dict[tuple[str, str], list[float]] = {}
            for _ in range(1 + options.repeats):
                for side, rows in sides.items():
                    for part, (call, args) in CALLS.items():
                        work = request(call, [rows], **args)
                        spent, _result = timed(lambda call=call, work=work: find_handler(call).run(role, work), clock)
                        seconds.setdefault((side, part), []).append(spent)
            tokens = sum(ref.length for ref in refs)
            row: dict[str, Any] = {"model": model, "rows": kind, "shared": shared, "tokens": tokens}
            row["saved"] = 1 - row_tree(refs).tokens / tokens
            for part in CALLS:
                plain, own = (statistics.median(seconds[side, part][1:]) for side in ("plain", "shared"))
                row |= {f"{part}_tokens_per_s": tokens / own, f"{part}_speedup": plain / own}
            role.data.clear(samples)
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(PRESETS), default=["arith", "135m"])
    parser.add_argument("--completion", type=int, default=12, help="tokens of a completion")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--microbatch", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    device = prepare_device(0, 1)
    rows: list[dict[str, Any]] = []
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            dtype = "bfloat16" if model == "135m" else "float32"
            make_model(PRESETS[model], Path(folder), positions=2048, dtype=dtype, tied=True)
            rows += measure(model, Path(folder), options, device)
    report("shared_prefixes", rows, vars(options))


if __name__ == "__main__":
    main()
