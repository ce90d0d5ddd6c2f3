"""Sums over the counted entries of flat tensors ``[t]``, one entry per answer token.

``mask`` is bool ``[t]``. Where it is False the other tensors may hold anything, NaN included: it reaches neither loss,
gradient nor statistics.
"""

from __future__ import annotations

import torch
from torch import Tensor


def check_shapes(mask: Tensor, **tensors: Tensor) -> None:
    """A tensor that broadcasts silently would give a wrong loss, not an error. Raises ValueError."""
    if mask.dtype is not torch.bool or mask.dim() != 1:
        raise ValueError(f"mask must be bool [t], got {mask.dtype} {list(mask.shape)}")
    for name, tensor in tensors.items():
        if tensor.shape != mask.shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, mask has {list(mask.shape)}")


def blank(x: Tensor, mask: Tensor) -> Tensor:
    """float32 ``x`` with zeros where it does not count (before exp, so that no NaN meets a zero gradient)."""
    return torch.where(mask, x.float(), 0.0)


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Without gradient, scalar of x's dtype."""
    return torch.where(mask, x, 0.0).detach().sum()


def masked_max(x: Tensor, mask: Tensor) -> Tensor:
    """Of non-negative ``x``, without gradient; 0 when nothing counts."""
    kept = torch.where(mask, x, 0.0).detach()
    return kept.amax() if kept.numel() else kept.sum()


def count(mask: Tensor) -> Tensor:
    """float32 scalar."""
    return mask.sum().float()
