"""Construction of an embedded engine from a model directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from realsys.cluster.gpu_devices import choose_device
from realsys.config.schema import GenerationConfig
from realsys.generation.backend import Load
from realsys.generation.embedded.core import CoreSizes, EngineCore
from realsys.generation.embedded.engine import Engine
from realsys.generation.embedded.forward.weights import fuse, read_tensors
from realsys.generation.embedded.rows import KvPolicy
from realsys.generation.stop_strings import read_tokenizer
from realsys.model_files.config_json import read_model


def build_engine(
    model_path: Path,
    config: GenerationConfig,
    load: Load,
    *,
    context: int = 0,
    dtype: torch.dtype = torch.float32,
    head_dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    interruptible: bool = True,
    kv: KvPolicy | None = None,
    on_step: Callable[[EngineCore], None] | None = None,
) -> Engine:
    """Read the model and allocate everything that the engine needs; the caller starts it.

    The engine begins with version -1 for any directory: only a verified update has a version.
    ``head_dtype`` is that of the logits, if it is not ``dtype``. ``context`` is the longest sequence in
    tokens, used if ``embedded.context_length`` is 0. Raises
    ModelError for a model that it cannot run, ConfigError if the KV cache does not fit, DeviceError if the
    process was given a GPU that it cannot use.
    """
    device = device or choose_device()
    embedded = config.embedded
    arch = read_model(model_path)
    weights = fuse(arch, read_tensors(model_path), dtype=dtype, device=device, head_dtype=head_dtype)
    sizes = CoreSizes(
        max_running=embedded.max_running,
        max_queued=embedded.max_queued,
        context=embedded.context_length or context,
        prefill_tokens=embedded.prefill_tokens,
        cache_rows=embedded.cache_rows,
    )
    core = EngineCore(arch, weights, sizes, read_tokenizer(model_path), kv)
    return Engine(core, load, model_path=str(model_path), interruptible=interruptible, on_step=on_step)
