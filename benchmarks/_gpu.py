"""Common parts of the benchmarks on GPUs: the result of an item, random models made on the device."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks._table import format_table
from benchmarks._training import PRESETS
from realsys.model_files.architecture import ModelSizes
from realsys.model_files.config_json import read_model

SKIPPED = 77  # exit code of an item that found no GPU
#: run on the CPU with tiny models: it tests the benchmarks
STAND_IN = os.environ.get("REALSYS_GPU_STAND_IN") == "1"
NO_GPU = "no CUDA device"
#: file to which an item writes its rows; gpu_all sets it
ROWS = "REALSYS_BENCHMARK_ROWS"
SIZES = PRESETS | {
    "7b": ModelSizes(hidden=3584, layers=28, heads=28, kv_heads=4, head_dim=128, ffn=18944, outputs=152_064)
}
_SCALE = 0.02


def require_gpu() -> None:
    """End this process with the exit code SKIPPED if there is no GPU. With STAND_IN, prepare for the CPU."""
    if STAND_IN:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch.cuda.max_memory_allocated = lambda *_: 0
        torch.cuda.reset_peak_memory_stats = lambda *_: None
        torch.cuda.get_device_name = lambda *_: "H100 of the stand-in"
    elif not torch.cuda.is_available():
        print(NO_GPU)
        sys.exit(SKIPPED)


def default_models(*names: str) -> list[str]:
    """Return the models of a benchmark that the command line does not name."""
    return ["arith"] if STAND_IN else list(names)


def fail(rows: Sequence[Mapping[str, Any]]) -> None:
    """End this process with an error if a row has a ``problem``. Its last line names them."""
    problems = [f"{row['model']} {row['setting']}: {row['problem']}" for row in rows if row.get("problem")]
    if problems:
        print("; ".join(problems))
        sys.exit(1)


def write_rows(name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print ``rows`` as a table, and hand them to ``gpu_all`` if it runs this item."""
    print(name)
    print(format_table(rows))
    if path := os.environ.get(ROWS):
        Path(path).write_text(json.dumps([dict(row) for row in rows], default=str))


def write_config(sizes: ModelSizes, folder: Path, *, positions: int = 32768) -> None:
    """Write the config.json of a Qwen2 of these sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.ffn,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "vocab_size": sizes.outputs,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))


def random_model(sizes: ModelSizes, folder: Path) -> dict[str, torch.Tensor]:
    """Write a random bfloat16 Qwen2 as an HF directory and return its tensors, which are made on the device."""
    write_config(sizes, folder)
    device = "cpu" if STAND_IN else "cuda"
    generator = torch.Generator(device).manual_seed(1)
    tensors = {}
    for name, shape in read_model(folder).tensor_shapes().items():
        tensor = torch.ones(shape, device=device)
        if len(shape) > 1:
            tensor.normal_(0.0, _SCALE, generator=generator)
        tensors[name] = tensor.bfloat16()
    save_file({name: tensor.cpu() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return tensors
