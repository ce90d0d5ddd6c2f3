"""Decode attention over the whole batch. SGLang's own for CPUs runs the requests one after the other."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

_TARGET = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_decode"


def install() -> None:
    """Register with SGLang's hooks, where this version has them; it applies them when it has been imported."""
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # type: ignore[import-not-found]
    except ImportError:
        return
    HookRegistry.register(_TARGET, decode, HookType.AROUND)


def decode(
    original: Callable[..., torch.Tensor],
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    encoder_lengths: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """One query token per request.

    query, output [requests, heads, width]; keys, values [slots, kv heads, width]; table [rows, positions] of slots.
    Cross attention and sliding windows are left to ``original``.
    """
    window = kwargs.get("sliding_window_size")
    if encoder_lengths is not None or kwargs.get("is_cross_attn") or (window is not None and window > -1):
        return original(backend, query, output, keys, values, table, rows, lengths, encoder_lengths, **kwargs)
    longest = int(lengths.max())
    beyond = torch.arange(longest) >= lengths.unsqueeze(1)
    slots = table[rows, :longest].long().masked_fill(beyond, 0)

    def gather(cache: torch.Tensor) -> torch.Tensor:
        found = cache.index_select(0, slots.flatten()).view(*slots.shape, *cache.shape[1:])
        return found.transpose(1, 2).to(query.dtype)  # [requests, kv heads, positions, width]

    mask = torch.zeros(beyond.shape, dtype=query.dtype).masked_fill_(beyond, float("-inf"))[:, None, None]
    attended = F.scaled_dot_product_attention(
        query.unsqueeze(2),
        gather(keys),
        gather(values),
        attn_mask=mask,
        scale=kwargs.get("scaling"),
        enable_gqa=bool(kwargs.get("enable_gqa")),
    )
    return output.copy_(attended.squeeze(2))
