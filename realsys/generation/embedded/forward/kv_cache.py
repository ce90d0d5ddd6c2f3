"""Preallocated key-value cache: one row of ``context`` positions per running answer.

Running answers always occupy rows 0..n-1, so that a decode step works on plain slices; the scheduler plans the moves
that keep it so. What lies beyond an answer's length is stale and masked in attention, never read as data.
"""

from __future__ import annotations

import torch
from torch import Tensor

from realsys.errors import ConfigError


class KVCache:
    """Keys and values, each [layers, rows * kv_heads, context, head_dim]."""

    def __init__(
        self,
        *,
        layers: int,
        rows: int,
        kv_heads: int,
        context: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.rows, self.kv_heads, self.context, self.head_dim = rows, kv_heads, context, head_dim
        shape = (layers, rows * kv_heads, context, head_dim)
        try:
            self.keys = torch.zeros(shape, dtype=dtype, device=device)
            self.values = torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError as error:  # torch's out-of-memory errors, on CPU and on CUDA
            size = 2 * dtype.itemsize * layers * rows * kv_heads * context * head_dim
            problem = (
                f"the KV cache of {rows} x {context} tokens needs {size >> 20} MiB, which this device does not have"
            )
            raise ConfigError("generation.embedded.max_running", rows, problem) from error

    @property
    def bytes_per_token(self) -> int:
        """Of one layer."""
        return 2 * self.kv_heads * self.head_dim * self.keys.element_size()

    def read(self, layer: int, rows: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Copies of the first ``length`` positions of ``rows``: keys and values [len(rows), kv_heads, length, D]."""
        keys, values = (self._by_row(store[layer], length).index_select(0, rows) for store in (self.keys, self.values))
        return keys, values

    def copy(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first ``length`` positions of row source[i] to row target[i]; the two may overlap."""
        for store in (self.keys, self.values):
            for layer in store:
                by_row = self._by_row(layer, length)
                by_row.index_copy_(0, target, by_row.index_select(0, source))

    def _by_row(self, layer: Tensor, length: int) -> Tensor:
        return layer.view(self.rows, self.kv_heads, self.context, -1)[:, :, :length]
