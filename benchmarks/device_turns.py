"""A device that changes hands between a rank and a server: seconds of each part, over a copy of the same bytes.

    python -m benchmarks.device_turns [--models 10m 135m] [--repeats 5]

One trained role and one embedded engine in this process, on a CPU. There a rank that leaves writes its memory to a file
in TMPDIR, which is in the page cache, so a copy in memory is what it costs at best.

    leave    weights, master weights and moments of the rank leave
    return   they come back, with gradients of zero
    sleep    the engine releases weights and cache
    wake     it takes the memory again
    load     it stages and swaps a version, which is in memory already
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks._table import report
from benchmarks._training import PRESETS, RAW_ADVANTAGES, make_batch, make_model, request, single_rank
from benchmarks.interruption import Weights
from realsys.cluster.process import trim_heap
from realsys.config.schema import Config
from realsys.generation.embedded.decoder import read_tensors
from realsys.generation.embedded.engine import build_engine
from realsys.train.megatron.device import Device, prepare_device
from realsys.train.megatron.offload import storages
from realsys.train.megatron.train_engine import MegatronEngine, optimizer_tensors
from realsys.train.worker.call_handlers import find_handler

BOUND_S = 300.0


def seconds_of(*calls: Any) -> list[float]:
    """Return the wall time of each call. A future is awaited."""
    taken = []
    for call in calls:
        start = time.perf_counter()
        done = call()
        if hasattr(done, "result"):
            done.result(BOUND_S)
        taken.append(time.perf_counter() - start)
    return taken


def kept(engine: MegatronEngine, device: Device) -> list[torch.UntypedStorage]:
    """The storages that leave with a copy."""
    assert engine.module is not None and engine.optimizer is not None
    return list(storages([*engine.module.parameters(), *optimizer_tensors(engine.optimizer)], device).values())


def leave(engine: MegatronEngine) -> None:
    engine.offload()
    trim_heap(0)


def measure(model: str, folder: Path, options: argparse.Namespace, device: Device) -> Iterator[dict[str, Any]]:
    dtype = "bfloat16" if model == "135m" else "float32"
    train = {"ppo": {"advantage": RAW_ADVANTAGES, "minibatches": 1}}
    turns = {"model": {"dtype": dtype}, "train": train, "allocation": "serve.d1|d1"}
    config = Config.model_validate(turns)
    refs, samples = make_batch([64] * 4, PRESETS[model].outputs, 1)
    tensors = read_tensors(folder)
    server = build_engine(
        folder, config.generation, lambda *_, **__: Weights(tensors), context=512, dtype=getattr(torch, dtype)
    )
    server.start()
    rows: dict[str, list[float]] = {}
    with single_rank(config, folder, device) as role:
        for name, arrays in samples.items():
            role.data.put(name, arrays)
        find_handler("actor_train").run(role, request("actor_train", [refs], lr=1e-6))  # makes the optimizer's state
        sizes = kept(role.engine, device)
        size, held = sum(each.nbytes() for each in sizes), server.core._tensors()
        held_bytes, weights = sum(each.nbytes for each in held), sum(each.nbytes for each in tensors.values())
        for number in range(1 + options.repeats):
            taken = seconds_of(
                lambda: [torch.empty(each.nbytes(), dtype=torch.uint8).untyped_storage().copy_(each) for each in sizes],
                lambda: leave(role.engine),
                server.wake,
                lambda number=number: server.update("", number),
                server.sleep,
                role.engine.onload,
                lambda: [each.clone() for each in tensors.values()],
                lambda: [torch.empty(held_bytes, dtype=torch.uint8).copy_(torch.empty(held_bytes, dtype=torch.uint8))],
            )
            parts = ("copy", "leave", "wake", "load", "sleep", "return", "weights", "held")
            for part, seconds in zip(parts, taken, strict=True):
                rows.setdefault(part, []).append(seconds)
    server.close()
    found = {part: statistics.median(seconds[1:]) for part, seconds in rows.items()}
    of = {"leave": "copy", "return": "copy", "sleep": "held", "wake": "held", "load": "weights"}
    bytes_of = {"copy": size, "held": held_bytes, "weights": weights}
    for part, copy in of.items():
        sizes_mb, over = bytes_of[copy] / 1e6, found[part] / found[copy]
        yield {"model": model, "part": part, "mb": sizes_mb, "ms": 1e3 * found[part], "over": over}
    moved, copied = (sum(found[part] for part in parts) for parts in (of, of.values()))
    mb = sum(bytes_of[copy] for copy in of.values()) / 1e6
    yield {"model": model, "part": "both ways", "mb": mb, "ms": 1e3 * moved, "over": moved / copied}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(PRESETS), default=["10m", "135m"])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    device = prepare_device(0, 1)
    rows: list[dict[str, Any]] = []
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            make_model(PRESETS[model], Path(folder), positions=2048, dtype="bfloat16" if model == "135m" else "float32")
            rows += measure(model, Path(folder), options, device)
    report("device_turns", rows, vars(options))


if __name__ == "__main__":
    main()
