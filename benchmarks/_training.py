"""Common parts of the training benchmarks: random models, heavy-tailed batches, one real rank in this process."""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from benchmarks._models import random_qwen2
from realsys.cluster.network import take_address
from realsys.cluster.topology import whole_mesh
from realsys.config.allocation import ACTOR, ParallelLayout
from realsys.config.schema import Config
from realsys.model_calls import MfcRequest
from realsys.model_files.architecture import ModelSizes
from realsys.train.megatron.device import Device
from realsys.train.megatron.mesh import form_meshes
from realsys.train.megatron.rendezvous import process_groups
from realsys.train.worker.call_handlers import Role
from realsys.train.worker.call_service import make_role
from realsys.train.worker.data_manager import Array, DataManager
from realsys.types import SequenceRef
from tests.support.training.packers import PROMPT
from tests.support.training.sample_records import make_ref

PRESETS = {
    "arith": ModelSizes(hidden=128, layers=2, heads=4, kv_heads=2, head_dim=32, ffn=256, outputs=44),
    "1m": ModelSizes(hidden=128, layers=4, heads=4, kv_heads=2, head_dim=32, ffn=512, outputs=512),
    "10m": ModelSizes(hidden=384, layers=6, heads=6, kv_heads=2, head_dim=64, ffn=1024, outputs=1024),
    "135m": ModelSizes(hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64, ffn=1536, outputs=49_152),
    "0.5b": ModelSizes(hidden=896, layers=24, heads=14, kv_heads=2, head_dim=64, ffn=4864, outputs=151_936),
    "1.5b": ModelSizes(hidden=1536, layers=28, heads=12, kv_heads=2, head_dim=128, ffn=8960, outputs=151_936),
}
#: Advantages that are the rewards themselves: normalised ones give a loss near 0, which is hard to compare.
RAW_ADVANTAGES = {"mean": "none", "std": "none"}
Samples = dict[str, dict[str, Array]]


def add_size_options(parser: argparse.ArgumentParser) -> None:
    """Add an option per size of the model; the preset is the default."""
    for field in fields(ModelSizes):
        name = "vocab" if field.name == "outputs" else field.name.replace("_", "-")
        parser.add_argument(f"--{name}", type=int, dest=field.name, help="instead of the preset's")


def chosen_sizes(preset: str, options: argparse.Namespace) -> ModelSizes:
    given = {field.name: getattr(options, field.name) for field in fields(ModelSizes)}
    shape = {field.name: getattr(PRESETS[preset], field.name) for field in fields(ModelSizes)}
    return ModelSizes(**shape | {name: value for name, value in given.items() if value is not None})


def make_model(
    sizes: ModelSizes, directory: Path, *, positions: int, dtype: str = "float32", tied: bool = False
) -> int:
    """A random Qwen2 as an HF directory; returns its number of parameters."""
    model = random_qwen2(sizes, directory, positions=positions, end_of_text=1, dtype=dtype, tied=tied)
    return sum(parameter.numel() for parameter in model.parameters())


def make_batch(lengths: Sequence[int], vocab: int, seed: int) -> tuple[list[SequenceRef], Samples]:
    """Random tokens, six in ten rewarded; recorded log-probs near those of a random model, 0.1 off."""
    rng = np.random.default_rng(seed)
    refs: list[SequenceRef] = []
    samples: Samples = {}
    for i, length in enumerate(int(n) for n in lengths):
        name, answer = f"t{i:06d}/0", length - PROMPT
        refs.append(make_ref(name, length, PROMPT, 5.0 if rng.random() < 0.6 else -5.0, group=i))
        samples[name] = {
            "tokens": rng.integers(2, vocab, length).astype(np.int32),
            "loss_mask": np.arange(length) >= PROMPT,
            "behav_logprobs": (-math.log(vocab) + rng.normal(0, 0.1, answer)).astype(np.float32),
        }
    return refs, samples


def request(interface: str, minibatches: Sequence[Sequence[SequenceRef]], **args: float) -> MfcRequest:
    """A call of one data rank."""
    parts = [[list(part)] for part in minibatches]
    return MfcRequest(interface, ACTOR, interface, 0, 0, parts, args=dict(args))


@contextlib.contextmanager
def single_rank(config: Config, model: Path, device: Device, *, trainable: bool = True) -> Iterator[Role]:
    """The actor of a mesh of one rank, in this process, as a ModelWorker builds it."""
    take_address(config)
    with process_groups(HashStore(), 0, 1, config.cluster, device):
        groups = form_meshes({ACTOR: whole_mesh(ParallelLayout())}, 0, config.cluster, device)[ACTOR]
        yield make_role(config, ACTOR, model, groups, DataManager(0), device, trainable=trainable)


def clock_of(device: Device) -> tuple[str, Callable[[], float]]:
    """On CPU the process's own CPU time: all work is in one thread, and what else the machine does disturbs it less."""
    return ("wall", time.perf_counter) if device.is_cuda else ("cpu", time.process_time)


def timed(call: Callable[[], Any], clock: Callable[[], float]) -> tuple[float, Any]:
    """Return the seconds until the device has finished ``call``, and its result."""
    torch.cuda.synchronize()  # stood in for on CPU by prepare_device
    start = clock()
    result = call()
    torch.cuda.synchronize()
    return clock() - start, result


def matmul_peak(device: Device, dtype: str, clock: Callable[[], float]) -> float:
    """FLOPs per second of the fastest of twenty square matrix products: what this device reaches at best."""
    n = 8192 if device.is_cuda else 1024
    a, b = (torch.randn(n, n, device=device.device, dtype=getattr(torch, dtype)) for _ in range(2))
    return 2.0 * n**3 / min(timed(lambda: a @ b, clock)[0] for _ in range(20))
