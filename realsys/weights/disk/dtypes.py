"""Conversion of tensors to bytes and back, without a copy, and safetensors' names of their types."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from realsys.errors import WeightsError
from realsys.weights.disk.delta import Bytes

_TYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}


def dtype_name(name: str, tensor: torch.Tensor) -> str:
    """Return the name of the tensor's type. Raises WeightsError for a type that a file of weights cannot hold."""
    if tensor.dtype not in _NAMES:
        raise WeightsError(f"tensor {name} is of type {tensor.dtype}, which a weight version cannot hold: convert it")
    return _NAMES[tensor.dtype]


def torch_name(dtype: str) -> str:
    """Return torch's name of a type."""
    return str(_TYPES[dtype]).removeprefix("torch.")


def as_bytes(tensor: torch.Tensor) -> Bytes:
    """Return uint8 [bytes of the tensor] in host memory: the tensor's own memory if that is possible."""
    # tensor.numpy() would fix the size of the memory for good, and the parameter could no longer be offloaded.
    flat = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return np.from_dlpack(flat).view(np.uint8)


def as_tensor(data: Bytes, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """Return the tensor whose bytes are ``data``; it shares the memory."""
    if not data.size:  # numpy gives an empty array a stride that torch cannot view
        return torch.empty(list(shape), dtype=_TYPES[dtype])
    return torch.from_numpy(data).view(_TYPES[dtype]).reshape(list(shape))
