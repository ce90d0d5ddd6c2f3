"""The way of the weights on a GPU machine: device to host, to disk, to a server, and the pause of the swap.

python -m benchmarks.gpu_weights [--models 1.5b 7b] [--rounds 2] [--folder /tmp]
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks._gpu import SIZES, STAND_IN, default_models, random_model, require_gpu, write_rows
from benchmarks._training import timed
from benchmarks.weights import Publisher, Tensors, pausing, staging
from realsys.train.megatron.device import prepare_device
from realsys.weights.disk.writer import ShardWriter


def to_pinned(tensors: Tensors, host: Tensors) -> None:
    for name, tensor in tensors.items():
        host[name].copy_(tensor, non_blocking=True)


def copies(tensors: Tensors) -> Iterator[dict[str, Any]]:
    """Yield the rates from the device to pageable and to pinned memory."""
    size = sum(tensor.nbytes for tensor in tensors.values()) / 1e9
    pinned = {name: torch.empty_like(tensor, device="cpu", pin_memory=not STAND_IN) for name, tensor in tensors.items()}
    ways: dict[str, Callable[[], Any]] = {
        "device to pageable": lambda: [tensor.cpu() for tensor in tensors.values()],
        "device to pinned": lambda: to_pinned(tensors, pinned),
    }
    for what, copy in ways.items():
        seconds = min(timed(copy, time.perf_counter)[0] for _ in range(3))
        yield {"what": what, "seconds": seconds, "GB/s": size / seconds}


def measure(model: str, root: Path, rounds: int) -> Iterator[dict[str, Any]]:
    tensors = random_model(SIZES[model], root / "model")
    yield from copies(tensors)
    published = Publisher(root / "versions", root / "model", ShardWriter())
    seconds, size = published.publish(tensors)
    yield {"what": "write a version", "seconds": seconds, "GB/s": size / 1e9 / seconds}
    tensors.clear()
    yield from staging(published, rounds)
    yield from pausing(published, rounds)
    yield {"what": "/dev/shm in use, GB", "seconds": shutil.disk_usage("/dev/shm").used / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SIZES), default=default_models("1.5b", "7b"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    options = parser.parse_args()
    require_gpu()
    prepare_device(0, 1)
    rows: list[dict[str, Any]] = []
    for model in options.models:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            for row in measure(model, Path(folder), options.rounds):
                rows.append({"model": model, **row})
                write_rows("weights", rows)  # after each row: the time limit may end this process


if __name__ == "__main__":
    main()
