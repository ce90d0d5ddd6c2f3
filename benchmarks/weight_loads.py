"""A weight version on its way into SGLang by each transport: seconds until it is served, and of the pause.

One rank in a process of its own, one bf16 model of a Qwen2 shape, and for each transport an SGLang of its own on the
same CPUs. In each round every transport hands over one version, all of it new:

    write    written by the rank and committed
    stage    read and verified by the server while SGLang could sample; nothing with ``group``
    pause    SGLang samples nothing: it loads a file from memory, or receives and checks what the rank sends

``ratio``: sum over that of disk in the same round, median over the rounds. It needs `make sglang-cpu`.

    python -m benchmarks.weight_loads [--rounds 5] [--scale 0.5] [--folder /tmp]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks._table import report
from benchmarks.weight_transports import TOKEN, Sides, transport
from benchmarks.weights import make_model
from realsys.config.compose import compose
from realsys.generation.child.engine import ChildEngine
from realsys.generation.sglang.backend import build_sglang_engine
from realsys.generation.weight_folder import FolderWriter
from realsys.weights.contract import ReaderParts

TRANSPORTS = ("disk", "memory", "group")
_LIMIT_S = 300.0


def engine(name: str, trial: Path, model: Path, stack: ExitStack) -> ChildEngine:
    """Start SGLang with the reader of a transport."""
    settings = [f"weights.transport={name}", "generation=sglang", "model.dtype=bfloat16", "rollout.max_concurrent=1"]
    reader = transport(name).reader(ReaderParts(0, model, trial, TOKEN))
    stack.callback(reader.close)
    config = compose(["experiment=arith", *settings])
    made = build_sglang_engine(model, config, FolderWriter(reader, model).write, lambda change: None)
    made.start()
    stack.callback(made.close)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=0.5, help="of the model; 1: 0.5 GB")
    parser.add_argument("--folder", default=tempfile.gettempdir())
    options = parser.parse_args()
    torch.set_num_threads(1)
    seconds: dict[str, list[tuple[float, float, float]]] = {name: [] for name in TRANSPORTS}
    size = 0
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, ExitStack() as stack:
        root = Path(folder)
        tensors = make_model(root / "model", options.scale)
        save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, root / "model" / "model.safetensors")
        sides = {name: stack.enter_context(closing(Sides(name, root, options.scale))) for name in TRANSPORTS}
        engines = {name: engine(name, root / name, root / "model", stack) for name in TRANSPORTS}
        for version in range(options.rounds + 1):
            for name in TRANSPORTS:
                start = time.perf_counter()
                locator, size = sides[name].write(version)
                written = time.perf_counter()
                result = engines[name].update(locator, version).result(_LIMIT_S)
                assert result.success, result.message
                pause = result.timings["pause_s"]
                seconds[name].append((written - start, time.perf_counter() - written - pause, pause))
    rows = []
    for name, rounds in seconds.items():
        later = rounds[1:]  # the first round allocates memory
        ratios = [sum(own) / sum(base) for own, base in zip(later, seconds["disk"][1:], strict=True)]
        values = (statistics.median(each) for each in zip(*later, strict=True))
        row = {"transport": name, **dict(zip(("write_s", "stage_s", "pause_s"), values, strict=True))}
        rows.append(row | {"ratio": statistics.median(ratios)})
    report("weight_loads", rows, {"GB": size / 1e9, "rounds": options.rounds, "threads": 1})


if __name__ == "__main__":
    main()
