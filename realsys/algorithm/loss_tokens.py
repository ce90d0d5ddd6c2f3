"""Rows and episodes of the loss tokens of a micro-batch.

    tokens    a a a b b c c c c     [t]  loss tokens, row after row
    lengths   3     2   4           [n]  tokens of each row
    episodes  0     1   0           [n]  rows a and c belong to one episode

A row is one training sequence. An episode has one row or more, also in several micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from realsys.cluster.gpu_devices import on_device


@dataclass(frozen=True, slots=True)
class Segments:
    """The rows of one micro-batch. Keep the tensors on the host: then nothing here waits for a device.

    lengths         int64 [n]  loss tokens of each row, in order; their sum is t
    episodes        int64 [n]  equal numbers mark rows of one episode; None: every row is an episode
    episode_tokens  float [n]  counted loss tokens of the row's whole episode, with its rows in
                               other micro-batches; None: counted from the mask, so every episode
                               must be whole in this micro-batch

    Methods raise ValueError if the lengths do not agree.
    """

    lengths: Tensor
    episodes: Tensor | None = None
    episode_tokens: Tensor | None = None

    def counted(self, mask: Tensor) -> Tensor:
        """Return for each token the counted tokens of its whole episode, float64 ``[t]``."""
        if self.episode_tokens is None:
            return self._spread(self._sums(mask.double()), mask)
        self._check("episode_tokens", self.episode_tokens)
        self._check_tokens(mask)
        return self._spread(on_device(self.episode_tokens.double(), mask.device), mask)

    def means(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return for each token the mean of ``x`` over its episode, float32 ``[t]``, no gradient.

        Only the counted tokens in this micro-batch are in the mean; without any it is 0.
        """
        # float64: the mean of 30,000 log ratios is compared with clip ranges of 3e-4
        sums = self._sums(torch.where(mask, x.detach(), 0.0).double())
        counts = self._sums(mask.double())
        return self._spread(sums / counts.clamp(min=1.0), mask).float()

    def _sums(self, x: Tensor) -> Tensor:
        """Return for each row the sum of ``x`` over all rows of its episode, ``[n]``."""
        self._check_tokens(x)
        if not len(x):
            # A rank with fewer rows than others has an empty micro-batch: launch no kernel for it.
            return x.new_zeros(len(self.lengths))
        sums = row_sums(x, self.lengths)
        if self.episodes is None:
            return sums
        self._check("episodes", self.episodes)
        _, episode, rows = torch.unique(self.episodes, return_inverse=True, return_counts=True)
        order = episode.argsort(stable=True)
        return row_sums(sums[on_device(order, x.device)], rows)[on_device(episode, x.device)]

    def _spread(self, per_row: Tensor, like: Tensor) -> Tensor:
        return per_row.repeat_interleave(on_device(self.lengths, like.device), output_size=len(like))

    def _check(self, name: str, tensor: Tensor) -> None:
        if tensor.shape != self.lengths.shape:
            shapes = f"shape {list(tensor.shape)}, lengths has {list(self.lengths.shape)}"
            raise ValueError(f"{name} has {shapes}: they must agree")

    def _check_tokens(self, x: Tensor) -> None:
        if (total := int(self.lengths.sum())) != len(x):
            raise ValueError(f"lengths sum up to {total}, but there are {len(x)} tokens: they must agree")


def row_sums(x: Tensor, lengths: Tensor) -> Tensor:
    """Sum consecutive parts of ``x`` ``[t]``, with gradient; ``lengths`` int64 ``[n]`` on the host, their sum is t.

    The order is fixed; index_add_ on a GPU has none, so results would vary.
    """
    if not len(x):
        return x.new_zeros(len(lengths)) + x.sum()  # of nothing; it keeps the gradient
    return torch.segment_reduce(x, "sum", lengths=on_device(lengths, x.device), unsafe=True)


# ---- sums over the counted entries
#
# ``mask`` is bool ``[t]``. Entries of the other tensors at a False position may be anything, NaN included: they reach
# neither loss, gradient nor statistics.


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
