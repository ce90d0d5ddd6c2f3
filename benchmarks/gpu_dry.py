"""Predictions for GPUs beside what the real engine does without one, on the meta device: FLOPs, bytes, waits.

    python -m benchmarks.gpu_dry [--models 0.5b 1.5b 7b] [--tokens 32768]

A call is actor_train of random bfloat16 models: two micro-batches, one optimizer step, counted on rank 0. Nothing is
computed, so it takes seconds. Bytes are those that all ranks of a collective have together:

    TFLOP                   products and attention; what is computed again counts (realsys.algorithm.balance)
    gradients, parameters   reduced and gathered by the data ranks, once a step
    activations             reduced and gathered by the tensor ranks
    published               what this rank writes of a version
    waits                   of the host for the device

It fails if a count is more than 2 % off.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks._gpu import SIZES, fail, write_config, write_rows
from benchmarks._training import RAW_ADVANTAGES, make_batch, request
from realsys.algorithm.balance import model_flops
from realsys.config.allocation import parse_allocation
from realsys.config.rank_memory import BYTES, FP32, recomputed_layers, shard_of
from realsys.config.schema import Config
from realsys.model_files.config_json import read_model
from realsys.types import SequenceRef
from tests.support.gpu.meta_rank import Counted, count_call

SEQUENCES = 4  # of a micro-batch
MICRO_BATCHES = 2
MOST_OFF = 0.02
STEP_WAITS = 6  # loss, flag of its ranks, norm; statistics, and their sums and maxima over the data ranks
CASES: dict[str, tuple[str, bool | int]] = {"0.5b": ("d2", False), "1.5b": ("d2", 14), "7b": ("d2m2", True)}
DTYPE = "bfloat16"
OF_TENSOR_RANKS = ("_allgather_base_", "_reduce_scatter_base_", "allreduce_")


def config_of(folder: Path, tokens: int, recompute: bool | int) -> Config:
    train = {
        "microbatch_tokens": tokens,
        "head_chunk_tokens": 2048,
        "recompute": recompute,
        "sequence_parallel": True,
        "distributed_optimizer": True,
        "ppo": {"advantage": RAW_ADVANTAGES},
    }
    return Config.model_validate({"model": {"dtype": DTYPE, "path": str(folder)}, "train": train})


def predict(config: Config, allocation: str, refs: list[SequenceRef]) -> dict[str, float]:
    """Return the quantities by name, for rank 0."""
    layout = parse_allocation(allocation).actor
    model, again = read_model(Path(config.model.path)), config.train.recompute
    parameters = shard_of(model, layout, 0).parameters
    scored, tokens = sum(ref.loss_tokens for ref in refs), sum(ref.length for ref in refs)
    twice = recomputed_layers(again, model.layers)
    flops = model_flops(model.sizes, [ref.length for ref in refs], scored, recomputed=(twice / model.layers, 1.0))
    # A layer gathers before each of its two blocks and reduces after it, in both directions, and gathers each input
    # again for the weight's gradient. Besides there are the embedding and the head: its input, and its gradient.
    moved = (10 * model.layers + 4 * twice + 3) * tokens + scored
    return {
        "TFLOP": flops / layout.tensor / 1e12,
        "gradients, GB": FP32 * parameters / 1e9,
        "parameters, GB": BYTES[DTYPE] * parameters / 1e9,
        "activations, GB": BYTES[DTYPE] * model.hidden * moved / 1e9 if layout.tensor > 1 else 0.0,
        "published, GB": BYTES[DTYPE] * model.parameters / layout.world_size / 1e9,
        "waits of a step": STEP_WAITS,
        "waits of a micro-batch": 0,
    }


def count(config: Config, allocation: str, batches: int, sizes: Any) -> tuple[list[SequenceRef], Counted, int]:
    """Run the call with this number of micro-batches."""
    layout, tokens = parse_allocation(allocation).actor, config.train.microbatch_tokens
    refs, samples = make_batch([tokens // SEQUENCES] * SEQUENCES * batches, sizes.outputs, 1)
    for arrays in samples.values():
        arrays["prox_logprobs"] = arrays["behav_logprobs"]
    call = request("actor_train", [refs], lr=1e-5)
    call.minibatches = [[refs] * layout.data]
    return refs, *count_call(Path(config.model.path), layout, config, call, samples)


def rows_of(model: str, folder: Path, tokens: int) -> Iterator[dict[str, Any]]:
    text, recompute = CASES[model]
    allocation, config = f"serve.d1+{text}", config_of(folder, tokens, recompute)
    _, one, _ = count(config, allocation, 1, SIZES[model])
    refs, counted, published = count(config, allocation, MICRO_BATCHES, SIZES[model])
    sent, waits = counted.sent, sum(counted.waits.values())
    found = {
        "TFLOP": counted.flops / 1e12,
        "gradients, GB": sent["reduce_scatter_tensor_coalesced_"] / 1e9,
        "parameters, GB": sent["allgather_into_tensor_coalesced_"] / 1e9,
        "activations, GB": sum(map(sent.__getitem__, OF_TENSOR_RANKS)) / 1e9,
        "published, GB": published / 1e9,
        "waits of a step": sum(one.waits.values()),
        "waits of a micro-batch": waits - sum(one.waits.values()),
    }
    for what, predicted in predict(config, allocation, refs).items():
        off = abs(found[what] - predicted)
        row = {"model": model, "setting": text, "what": what}
        row |= {"predicted": round(predicted, 3), "counted": round(found[what], 3)}
        yield row | {"problem": f"{what} is off" if off > MOST_OFF * max(predicted, 0.1) else ""}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--tokens", type=int, default=32768, help="of a micro-batch")
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    rows: list[dict[str, Any]] = []
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            write_config(SIZES[model], Path(folder))
            rows += rows_of(model, Path(folder), options.tokens)
    write_rows("dry", rows)
    fail(rows)


if __name__ == "__main__":
    main()
