"""Tokens/s of the embedded engine on a GPU, by the number of sequences that it decodes together.

    python -m benchmarks.gpu_generation [--models 0.5b 1.5b] [--concurrent 1 8 64 256]

Prompts of 128 tokens and completions of 128, without HTTP. It decides whether the engine should run on GPUs at all.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks._gpu import SIZES, default_models, random_model, require_gpu, write_rows
from benchmarks._training import timed
from realsys.generation.embedded.core import CoreSizes, EngineCore
from realsys.generation.embedded.decoder import fuse, read_tensors
from realsys.model_files.config_json import read_model
from realsys.train.megatron.device import Device, prepare_device
from tests.support.serving.generation_models import make_request, run

PROMPT, COMPLETION = 128, 128


def generate(core: EngineCore, count: int, vocabulary: int) -> int:
    """Return the number of sampled tokens."""
    prompts = np.random.default_rng(count).integers(1, vocabulary, (count, PROMPT)).tolist()
    core.rows.forget()  # of the turn that warms up
    requests = [make_request(str(i), prompt, max_new_tokens=COMPLETION) for i, prompt in enumerate(prompts)]
    return sum(len(completion.tokens) for completions in run(core, *requests) for completion in completions)


def measure(model: str, folder: Path, counts: list[int], device: Device) -> list[dict[str, Any]]:
    sizes = SIZES[model]
    random_model(sizes, folder)
    arch = read_model(folder)
    weights = fuse(arch, read_tensors(folder), dtype=torch.bfloat16, device=device.device)
    rows = []
    for count in counts:
        core = EngineCore(arch, weights, CoreSizes(count, 2 * count, PROMPT + COMPLETION), None)
        generate(core, count, sizes.outputs)  # warms up
        seconds, tokens = timed(lambda core=core, count=count: generate(core, count, sizes.outputs), time.perf_counter)
        rows.append({"model": model, "concurrent": count, "tokens/s": round(tokens / seconds)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SIZES), default=default_models("0.5b", "1.5b"))
    parser.add_argument("--concurrent", type=int, nargs="+", default=[1, 8, 64, 256])
    options = parser.parse_args()
    require_gpu()
    device = prepare_device(0, 1)
    rows: list[dict[str, Any]] = []
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            rows += measure(model, Path(folder), options.concurrent, device)
            write_rows("generation", rows)


if __name__ == "__main__":
    main()
