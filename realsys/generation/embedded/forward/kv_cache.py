"""Preallocated key-value cache: one row of ``context`` positions per running completion, and some for ended ones.

Running completions always occupy rows 0..n-1, so that a decode step works on plain slices. The scheduler plans the
moves that keep it so. Positions beyond a completion's length are stale: attention masks them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from realsys.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Shape of a KVCache."""

    layers: int
    rows: int
    kv_heads: int
    context: int
    head_dim: int


class KVCache:
    """Keys and values, each [layers, rows * kv_heads, context, head_dim]."""

    def __init__(self, shape: CacheShape, dtype: torch.dtype, device: torch.device) -> None:
        self.rows = shape.rows
        self.kv_heads = shape.kv_heads
        self.context = shape.context
        self.head_dim = shape.head_dim
        dimensions = (shape.layers, shape.rows * shape.kv_heads, shape.context, shape.head_dim)
        try:
            # Zeros, because a NaN in fresh memory would survive the mask: NaN - inf and 0 * NaN are NaN.
            self.keys = torch.zeros(dimensions, dtype=dtype, device=device)
            self.values = torch.zeros(dimensions, dtype=dtype, device=device)
        except RuntimeError as error:  # torch's out-of-memory errors, on CPU and on CUDA
            size = 2 * dtype.itemsize * math.prod(dimensions)
            problem = (
                f"the KV cache of {shape.rows} x {shape.context} tokens needs {size >> 20} MiB, "
                f"which this device does not have"
            )
            raise ConfigError("generation.embedded.max_running", shape.rows, problem) from error

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.keys.element_size()

    def read(self, layer: int, rows: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Copy the first ``length`` positions of ``rows``: keys and values [len(rows), kv_heads, length, D]."""
        keys, values = (self._by_row(store[layer], length).index_select(0, rows) for store in (self.keys, self.values))
        return keys, values

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy (source row, target row, positions) together: a target may be the source of another copy."""
        if not copies:
            return
        # One call for all copies of similar length: a long one must not make the short ones as long.
        alike: dict[int, list[tuple[int, int, int]]] = {}
        for copy in copies:
            alike.setdefault(copy[2].bit_length(), []).append(copy)
        calls = []
        for group in alike.values():
            sources, targets, lengths = zip(*group, strict=True)
            rows = (torch.tensor(rows, device=self.keys.device) for rows in (sources, targets))
            calls.append((max(lengths), *rows))
        for store in (self.keys, self.values):
            # Layer by layer: the temporary copy of all layers could be as large as the cache.
            for layer in store:
                # All sources are read before a target is written, which may be a source.
                read = [self._by_row(layer, length).index_select(0, source) for length, source, _ in calls]
                for (length, _, target), values in zip(calls, read, strict=True):
                    self._by_row(layer, length).index_copy_(0, target, values)

    def _by_row(self, layer: Tensor, length: int) -> Tensor:
        return layer.view(self.rows, self.kv_heads, self.context, -1)[:, :, :length]
