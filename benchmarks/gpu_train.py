"""Train steps of one rank on a GPU: tokens/s, MFU, peak memory, host synchronisations, by model and setting.

    python -m benchmarks.gpu_train [--models 0.5b 1.5b 7b] [--tokens 32768] [--repeats 3] [--profile]

A step is actor_inf (log-probs) and actor_train (loss, backward pass, clipping, AdamW) of random bfloat16 models over
two full micro-batches, as large as --tokens and the GPU's memory allow. 7b runs actor_inf only: its optimizer state
does not fit on one GPU. ``mfu_%`` is model FLOPs over the peak of the device's name (realsys.cluster.gpu_devices).
``predicted_GiB`` is what realsys.config.device_memory expects of the peak, without libraries. ``syncs/microbatch`` is
how often the host waits for the device in one more micro-batch.

It fails if a row has a problem (``problem_of``). Running out of memory is one only where the prediction is below what
the device has.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks._gpu import SIZES, STAND_IN, default_models, fail, random_model, require_gpu, write_rows
from benchmarks._training import RAW_ADVANTAGES, make_batch, request, single_rank, timed
from realsys.algorithm.balance import model_flops
from realsys.cluster.gpu_devices import peak_flops
from realsys.config.allocation import parse_allocation
from realsys.config.dataflow import dataflow_of
from realsys.config.device_memory import rank_uses
from realsys.config.schema import Config
from realsys.train.megatron.device import Device, prepare_device
from realsys.train.worker.call_handlers import Role, find_handler
from realsys.types import SequenceRef

TOKENS = 512 if STAND_IN else 32768  # of a micro-batch
SEQUENCES = 4  # of a micro-batch
SYNCHRONISATIONS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
#: limits of ``problem_of``
MEMORY_ERROR = 0.1
MOST_SYNCHRONISATIONS = 2.0


@dataclass(frozen=True, slots=True)
class Case:
    """Settings of one row."""

    name: str
    train: dict[str, Any]
    fused: bool = True
    inference_only: bool = False


#: share of a GPU that the predicted peak may take
MEMORY_SHARE = 0.9
BASE = {"head_chunk_tokens": 1024}
CASES = {
    "0.5b": (Case("base", BASE), Case("foreach AdamW", BASE, fused=False)),
    "1.5b": (
        Case("recompute", BASE | {"recompute": True}),
        Case("base", BASE),
        Case("chunk 4096", {"head_chunk_tokens": 4096}),
        Case("whole head", {}),
    ),
    "7b": (Case("actor_inf", BASE, inference_only=True),),
    "arith": (
        Case("base", BASE),
        Case("foreach AdamW", BASE, fused=False),
        Case("actor_inf", BASE, inference_only=True),
    ),
}


def step(role: Role, refs: list[SequenceRef], case: Case) -> dict[str, float]:
    """Return the statistics of the last call."""
    stats = find_handler("actor_inf").run(role, request("actor_inf", [refs])).stats
    if not case.inference_only:
        stats = find_handler("actor_train").run(role, request("actor_train", [refs], lr=1e-9)).stats
    return stats


def measure(model: str, folder: Path, case: Case, options: argparse.Namespace, device: Device) -> dict[str, Any]:
    sizes = SIZES[model]
    tokens = fitting_tokens(folder, case, options.tokens)
    config = config_of(folder, case, tokens)
    refs, samples = make_batch([tokens // SEQUENCES] * 2 * SEQUENCES, sizes.outputs, 1)
    with single_rank(config, folder, device, trainable=not case.inference_only) as role:
        for name, arrays in samples.items():
            role.data.put(name, arrays)
        stats = step(role, refs, case)  # warms up, and makes the optimizer
        if not case.fused:
            unfuse(role)
        torch.cuda.reset_peak_memory_stats()
        seconds = statistics.median(
            timed(partial(step, role, refs, case), time.perf_counter)[0] for _ in range(options.repeats)
        )
        peak_bytes = torch.cuda.max_memory_allocated()
        both, one = (profiled(role, refs[:count], case, options) for count in (2 * SEQUENCES, SEQUENCES))
    lengths, scored = [ref.length for ref in refs], sum(ref.loss_tokens for ref in refs)
    flops = model_flops(sizes, lengths, scored) * (1 / 3 + (0 if case.inference_only else 1))
    peak = peak_flops(torch.cuda.get_device_name())
    row = {
        "model": model,
        "setting": case.name,
        "tokens": tokens,
        "tokens/s": round(sum(lengths) / seconds),
        "s/step": round(seconds, 3),
        "mfu_%": round(100 * flops / seconds / peak, 1) if peak else "",
        "peak_GiB": round(peak_bytes / 2**30, 2),
        "predicted_GiB": "" if case.inference_only else round(predicted_bytes(config) / 2**30, 2),
        "syncs/microbatch": both - one,
    }
    return row | {"problem": problem_of(row, case, stats)}


def problem_of(row: dict[str, Any], case: Case, stats: dict[str, float]) -> str:
    """Return the faults in the numbers of a row; "" if there are none."""
    problems = []
    if not all(math.isfinite(value) for value in stats.values()):
        problems.append(f"not finite: {', '.join(name for name, value in stats.items() if not math.isfinite(value))}")
    measured, predicted = row["peak_GiB"], row["predicted_GiB"]
    # The prediction is that of the fused optimizer.
    if measured and predicted and case.fused and abs(predicted - measured) > MEMORY_ERROR * measured:
        problems.append(f"{predicted} GiB were predicted, {measured} GiB are the peak")
    if row["syncs/microbatch"] > MOST_SYNCHRONISATIONS:
        problems.append(f"the host waits {row['syncs/microbatch']} times per micro-batch")
    if row["mfu_%"] == "":
        problems.append("the peak rate of this GPU is not known")
    return "; ".join(problems)


def out_of_memory(model: str, folder: Path, case: Case, tokens: int) -> dict[str, Any]:
    """Return the row of a setting that does not fit. It is a problem if it was predicted to fit."""
    predicted = predicted_bytes(config_of(folder, case, tokens))
    there = torch.cuda.get_device_properties(0).total_memory
    row = {"model": model, "setting": case.name, "predicted_GiB": round(predicted / 2**30, 2)}
    row["problem"] = "out of memory, and predicted to fit" if 1.1 * predicted < there else ""
    return row | {"note": f"out of memory: the GPU has {there / 2**30:.1f} GiB"}


def fitting_tokens(folder: Path, case: Case, most: int) -> int:
    """Return the tokens of a micro-batch: ``most``, halved until the predicted peak fits on this GPU."""
    if STAND_IN or case.inference_only:
        return most
    room = MEMORY_SHARE * torch.cuda.get_device_properties(0).total_memory
    while most > 1024 and predicted_bytes(config_of(folder, case, most)) > room:
        most //= 2
    return most


def config_of(folder: Path, case: Case, tokens: int) -> Config:
    train = {"microbatch_tokens": tokens, "ppo": {"advantage": RAW_ADVANTAGES, "minibatches": 2}, **case.train}
    return Config.model_validate({"model": {"dtype": "bfloat16", "path": str(folder)}, "train": train})


def predicted_bytes(config: Config) -> int:
    """Return the predicted peak of the rank. The libraries are not in what torch counts."""
    one = config.model_copy(update={"allocation": "serve.d1+d1"})
    [(use, _)] = rank_uses(one, parse_allocation(one.allocation), dataflow_of(one), on_gpu=True)
    return use.total - use.libraries


def unfuse(role: Role) -> None:
    """Step as torch's AdamW does without ``fused``; the count of steps moves to where that reads it."""
    for part in role.engine.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            group["fused"], group["foreach"] = False, True
        for state in part.optimizer.state.values():
            state["step"] = state["step"].cpu()


def profiled(role: Role, refs: list[SequenceRef], case: Case, options: argparse.Namespace) -> int:
    """Return how often the host waited for the device in one step."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        step(role, refs, case)
    averages = found.key_averages()
    if options.profile:
        print(averages.table(sort_by="self_device_time_total", row_limit=15, max_name_column_width=60))
    return sum(event.count for event in averages if event.key in SYNCHRONISATIONS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=default_models("0.5b", "1.5b", "7b"))
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a micro-batch, at most")
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
                except torch.OutOfMemoryError:
                    dist.destroy_process_group()  # single_rank leaves it as it is after an error
                    tokens = fitting_tokens(Path(folder), case, options.tokens)
                    rows.append(out_of_memory(model, Path(folder), case, tokens))
                gc.collect()
                torch.cuda.empty_cache()
                write_rows("train", rows)  # after each case: the time limit may end this process
    fail(rows)


if __name__ == "__main__":
    main()
