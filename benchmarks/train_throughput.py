"""Training tokens per second with dynamic micro-batches against a fixed number of sequences in each.

    python -m benchmarks.train_throughput [--presets arith 1m] [--tokens 2048 8192] [--limit 896] [--sequences 128]
    python -m benchmarks.train_throughput --presets 0.5b 1.5b --dtype bfloat16 --tokens 8192 --limit 3584  # on a GPU

One rank takes the actor_train step of one minibatch of heavy-tailed lengths (log-probs, loss, backward, clipping,
Adam) through the product's interface, and only how sequences are put into micro-batches differs:

    fixed         in order of arrival, as many in each as fit into --tokens if all were as long as the longest
    algorithm_1   Algorithm 1 of the paper, at most --tokens in each
    dynamic       the product's packing, at most --tokens in each

None pads, so memory has the same bound, and the loss is the same (checked). The defaults are a sixteenth of
benchmarks/microbatch.py (32,768 tokens, sequences of up to 14,336, so 2 in a fixed micro-batch), and the same with four
times the memory (9 in each). The modes take turns in every repetition;
``over_fixed`` is the median over repetitions of the ratio to fixed in the same one, with the least and the greatest.
On CPU speeds are by CPU time (one thread), on a GPU by the clock.

``mfu_%`` is model FLOPs per second over --peak-tflops, or over the fastest matrix product of this device, measured in
the same run. Model FLOPs are 6 * N * tokens + 6 * layers * heads * head_dim * s^2 per sequence of s tokens (causal
attention, forward and backward), N being the weights of the layers' matrix products, and those of the head for answer
tokens only (realsys.algorithm.balance.training_flops). --profile prints where a dynamic step spends its time.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks._table import report
from benchmarks._training import (
    PRESETS,
    RAW_ADVANTAGES,
    add_size_options,
    chosen_sizes,
    clock_of,
    make_batch,
    make_model,
    matmul_peak,
    request,
    single_rank,
    timed,
)
from realsys.algorithm.balance import model_flops
from realsys.algorithm.microbatch import Packer, fewest_sequences, pack
from realsys.config.schema import Config
from realsys.model_files.architecture import ModelSizes
from realsys.train.megatron.device import Device, prepare_device
from realsys.train.worker.call_handlers import Role, find_handler
from realsys.train.worker.packing import MicroBatch
from realsys.types import SequenceRef
from tests.support.training.packers import fixed, heavy_lengths

LR = 1e-9  # so small that the next mode's step starts from nearly the same weights
TOLERANCE = 1e-4  # relative, of the loss
MODES: dict[str, Packer] = {"fixed": fixed, "algorithm_1": fewest_sequences, "dynamic": pack}


@dataclass(slots=True)
class RoleWith(Role):
    """A role that packs its micro-batches by ``split``."""

    split: Packer = pack

    def microbatches(
        self, per_rank: Sequence[Sequence[SequenceRef]], keys: Sequence[str] = (), *, gradients: bool = True
    ) -> list[MicroBatch]:
        [refs] = per_rank
        packed = self.split([ref.length for ref in refs], self.config.train.microbatch_tokens)
        return [self.packer.pack([refs[i] for i in batch], keys) for batch in packed]


def role_with(role: Role, split: Packer) -> Role:
    return RoleWith(**{field.name: getattr(role, field.name) for field in fields(Role) if field.init}, split=split)


def measure(
    preset: str, sizes: ModelSizes, capacity: int, options: argparse.Namespace, device: Device
) -> list[dict[str, Any]]:
    """A row per mode, for micro-batches of at most ``capacity`` tokens."""
    train = {"microbatch_tokens": capacity, "optimizer": {"lr": LR}, "ppo": {"advantage": RAW_ADVANTAGES}}
    config = Config.model_validate({"model": {"dtype": options.dtype}, "train": train})
    _, clock = clock_of(device)
    peak = options.peak_tflops * 1e12 or matmul_peak(device, options.dtype, clock)
    lengths = heavy_lengths(options.sequences, options.limit, options.seed)
    refs, samples = make_batch(lengths.tolist(), sizes.outputs, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        parameters = make_model(sizes, Path(folder), positions=options.limit, dtype=options.dtype)
        with single_rank(config, Path(folder), device) as role:
            for name, arrays in samples.items():
                role.data.put(name, arrays)
            find_handler("actor_inf").run(role, request("actor_inf", [refs]))
            seconds = _take_turns(role, refs, options.repeats, clock)
            if options.profile:
                _print_profile(lambda: _step(role, refs), device)
            counts = {mode: len(role_with(role, split).microbatches([refs])) for mode, split in MODES.items()}
    flops = model_flops(sizes, lengths.tolist(), sum(ref.loss_tokens for ref in refs))
    rows = []
    for mode, times in seconds.items():
        ratios = [theirs / ours for theirs, ours in zip(seconds["fixed"], times, strict=True)]
        middle = statistics.median(times)
        rows.append(
            {
                "model": preset,
                "parameters": parameters,
                "capacity": capacity,
                "mode": mode,
                "microbatches": counts[mode],
                "tokens": int(lengths.sum()),
                "s/step": round(middle, 4),
                "tokens/s": round(float(lengths.sum()) / middle),
                "over_fixed": round(statistics.median(ratios), 3),
                "least": round(min(ratios), 3),
                "greatest": round(max(ratios), 3),
                "peak_gflops": round(peak / 1e9, 1),
                "mfu_%": round(100 * flops / middle / peak, 2),
            }
        )
    return rows


def _step(role: Role, refs: Sequence[SequenceRef]) -> float:
    """One actor_train call; returns its loss."""
    outcome = find_handler("actor_train").run(role, request("actor_train", [refs], lr=LR))
    return outcome.stats["loss"]


def _take_turns(
    role: Role, refs: Sequence[SequenceRef], repeats: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds per mode and repetition; the first repetition warms up and is dropped."""
    roles = {mode: role_with(role, split) for mode, split in MODES.items()}
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    for repetition in range(repeats + 1):
        losses = []
        for mode, own in roles.items():
            elapsed, loss = timed(partial(_step, own, refs), clock)
            losses.append(loss)
            if repetition:
                seconds[mode].append(elapsed)
        if max(losses) - min(losses) > TOLERANCE * abs(losses[0]):
            raise SystemExit(f"the modes disagree about the loss: {losses}")
    return seconds


def _print_profile(step: Callable[[], Any], device: Device) -> None:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.is_cuda else [])]
    with profile(activities=activities) as profiled:
        step()
    key = "self_cuda_time_total" if device.is_cuda else "self_cpu_time_total"
    print(profiled.key_averages().table(sort_by=key, row_limit=15, max_name_column_width=60))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", choices=list(PRESETS), default=["arith", "1m"])
    add_size_options(parser)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192], help="capacities of a micro-batch")
    parser.add_argument("--limit", type=int, default=896, help="tokens of the longest sequence")
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--peak-tflops", type=float, default=0.0, help="of the device; 0: measure")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    device = prepare_device(0, 1)
    rows = [
        row
        for preset in options.presets
        for capacity in options.tokens
        for row in measure(preset, chosen_sizes(preset, options), capacity, options, device)
    ]
    name = torch.cuda.get_device_name() if device.is_cuda else "cpu"
    meta = {key: getattr(options, key) for key in ("limit", "sequences", "dtype", "repeats", "seed")}
    report("train_throughput", rows, {"device": name, "time": clock_of(device)[0], **meta})


if __name__ == "__main__":
    main()
