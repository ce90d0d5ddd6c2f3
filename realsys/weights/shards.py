"""One rank's file of a weight version."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
import xxhash
from safetensors.torch import save

from realsys.errors import WeightsError
from realsys.types import ShardInfo


def write_shard(path: Path, tensors: Mapping[str, torch.Tensor]) -> ShardInfo:
    """Write ``tensors`` (HF names, any dtype, any device) as one fsynced safetensors file.

    The checksum is of the bytes handed to the file system, so that what a reader verifies is what the trainer had.
    Raises WeightsError naming path and cause (a full disk above all).
    """
    blob = save(
        {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}, metadata={"format": "pt"}
    )
    try:
        with path.open("wb") as file:
            file.write(blob)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise WeightsError(f"cannot write {path} ({len(blob)} bytes): {error.strerror}") from error
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    return ShardInfo(path.name, len(blob), xxhash.xxh3_64_hexdigest(blob), sizes)
