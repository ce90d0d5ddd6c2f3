"""Train steps of one rank on a GPU: tokens/s, MFU, peak memory, host synchronisations, by model and setting.

    python -m benchmarks.gpu_train [--models 0.5b 1.5b 7b] [--tokens 32768] [--repeats 3] [--profile]

A step is actor_inf (log-probs) and actor_train (loss, backward pass, clipping, AdamW) of random bfloat16 models over
two full micro-batches. 7b runs actor_inf only: its optimizer state does not fit on one GPU. ``mfu_%`` is model FLOPs
over the peak of the device's name (realsys.gpu.peak). ``predicted_GiB`` is what realsys.config.memory expects of the
peak, without libraries. A setting that runs out of memory is a row, too.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks._gpu import SIZES, random_model, require_gpu, write_rows
from benchmarks._training import RAW_ADVANTAGES, make_batch, request, single_rank, timed
from realsys.buffer.balance import model_flops
from realsys.config.allocation import parse_allocation
from realsys.config.dataflow import dataflow_of
from realsys.config.memory.device_memory import rank_uses
from realsys.config.schema import Config
from realsys.gpu.peak import peak_flops
from realsys.train.calls import Role, find_handler
from realsys.train.megatron.device import Device, prepare_device
from realsys.types import SequenceRef

SEQUENCE = 8192  # tokens
SYNCHRONISATIONS = ("cudaStreamSynchronize", "cudaDeviceSynchronize")


@dataclass(frozen=True, slots=True)
class Case:
    """Settings of one row."""

    name: str
    train: dict[str, Any]
    fused: bool = True
    inference_only: bool = False


BASE = {"head_chunk_tokens": 1024}
CASES = {
    "0.5b": (Case("base", BASE), Case("foreach AdamW", BASE, fused=False)),
    "1.5b": (
        Case("base", BASE),
        Case("recompute", BASE | {"recompute": True}),
        Case("chunk 4096", {"head_chunk_tokens": 4096}),
        Case("whole head", {}),
    ),
    "7b": (Case("actor_inf", BASE, inference_only=True),),
}


def step(role: Role, refs: list[SequenceRef], case: Case) -> None:
    find_handler("actor_inf").run(role, request("actor_inf", [refs]))
    if not case.inference_only:
        find_handler("actor_train").run(role, request("actor_train", [refs], lr=1e-9))


def measure(model: str, folder: Path, case: Case, options: argparse.Namespace, device: Device) -> dict[str, Any]:
    sizes = SIZES[model]
    train = {"microbatch_tokens": options.tokens, "ppo": {"advantage": RAW_ADVANTAGES, "minibatches": 1}, **case.train}
    config = Config.model_validate({"model": {"dtype": "bfloat16", "path": str(folder)}, "train": train})
    refs, samples = make_batch([SEQUENCE] * (2 * options.tokens // SEQUENCE), sizes.outputs, 1)
    with single_rank(config, folder, device, trainable=not case.inference_only) as role:
        for name, arrays in samples.items():
            role.data.put(name, arrays)
        step(role, refs, case)  # warms up, and makes the optimizer
        if not case.fused:
            unfuse(role)
        torch.cuda.reset_peak_memory_stats()
        seconds = statistics.median(
            timed(partial(step, role, refs, case), time.perf_counter)[0] for _ in range(options.repeats)
        )
        peak_bytes = torch.cuda.max_memory_allocated()
        synchronisations = profiled(role, refs, case, print_table=options.profile)
    lengths, scored = [ref.length for ref in refs], sum(ref.loss_tokens for ref in refs)
    flops = model_flops(sizes, lengths, scored) * (1 / 3 + (0 if case.inference_only else 1))
    peak = peak_flops(torch.cuda.get_device_name())
    return {
        "model": model,
        "setting": case.name,
        "tokens/s": round(sum(lengths) / seconds),
        "s/step": round(seconds, 3),
        "mfu_%": round(100 * flops / seconds / peak, 1) if peak else "",
        "peak_GiB": round(peak_bytes / 2**30, 1),
        "predicted_GiB": "" if case.inference_only else round(predicted_bytes(config) / 2**30, 1),
        "syncs/microbatch": round(synchronisations / 2, 1),
    }


def predicted_bytes(config: Config) -> int:
    """Return the predicted peak of the rank. The libraries are not in what torch counts."""
    one = config.model_copy(update={"allocation": "serve.d1+d1"})
    [(use, _)] = rank_uses(one, parse_allocation(one.allocation), dataflow_of(one), on_gpu=True)
    return use.total - use.libraries


def unfuse(role: Role) -> None:
    """Step as torch's AdamW does without ``fused``; the count of steps moves to where that reads it."""
    for part in role.engine.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            group["fused"] = False
        for state in part.optimizer.state.values():
            state["step"] = state["step"].cpu()


def profiled(role: Role, refs: list[SequenceRef], case: Case, *, print_table: bool) -> int:
    """Return how often the host waited for the device in one step."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        step(role, refs, case)
    averages = found.key_averages()
    if print_table:
        print(averages.table(sort_by="self_cuda_time_total", row_limit=15, max_name_column_width=60))
    return sum(event.count for event in averages if event.key in SYNCHRONISATIONS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--tokens", type=int, default=32768, help="of a micro-batch")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="print where the time of each step goes")
    options = parser.parse_args()
    require_gpu()
    device = prepare_device(0, 1)
    rows: list[dict[str, Any]] = []
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            random_model(SIZES[model], Path(folder))
            for case in CASES[model]:
                try:
                    rows.append(measure(model, Path(folder), case, options, device))
                except torch.OutOfMemoryError as error:
                    rows.append({"model": model, "setting": case.name, "problem": str(error).split(". ")[0]})
                gc.collect()
                torch.cuda.empty_cache()
                write_rows("train", rows)  # after each case: the time limit may end this process


if __name__ == "__main__":
    main()
