"""Sums over the counted entries of flat tensors ``[t]``, one entry per loss token.

``mask`` is bool ``[t]``. Entries of the other tensors at a False position may be anything, NaN included: they reach
neither loss, gradient nor statistics.
"""

from __future__ import annotations

import torch
from torch import Tensor


def check_shapes(mask: Tensor, **tensors: Tensor) -> None:
    """Check that all tensors are ``[t]``. Raises ValueError.

    A tensor of another shape would broadcast silently and give a wrong loss, not an error.
    """
    if mask.dtype is not torch.bool or mask.dim() != 1:
        raise ValueError(f"mask is {mask.dtype} {list(mask.shape)}: it must be bool [t]")
    for name, tensor in tensors.items():
        if tensor.shape != mask.shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}: it must be that of mask, {list(mask.shape)}")


def blank(x: Tensor, mask: Tensor) -> Tensor:
    """Return ``x`` as float32, 0 at masked positions. Call it before exp: 0 * NaN in a gradient is NaN."""
    return torch.where(mask, x.float(), 0.0)


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum the counted entries, without gradient; a scalar of x's dtype."""
    return torch.where(mask, x, 0.0).detach().sum()


def masked_max(x: Tensor, mask: Tensor) -> Tensor:
    """Return the maximum of the counted entries of non-negative ``x``, without gradient; 0 if none counts."""
    kept = torch.where(mask, x, 0.0).detach()
    return kept.amax() if kept.numel() else kept.sum()


def count(mask: Tensor) -> Tensor:
    """Count the True entries, as a float32 scalar."""
    return mask.sum().float()
