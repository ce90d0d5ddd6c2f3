"""The critic: its loss on flat loss tokens (conventions of loss.py), and normalisation of its targets."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from realsys.algorithm.loss import Stats
from realsys.algorithm.loss_tokens import blank, check_shapes, count, masked_sum
from realsys.config.schema_train import CriticConfig
from realsys.types import F32


def critic_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    denominator: float | Tensor,
    cfg: CriticConfig,
) -> tuple[Tensor, Stats]:
    """Return the share of the clipped value loss, and statistics (Schulman et al., arXiv 1707.06347).

        l(v)   = (v - R)^2 / 2        huber: delta * (|v - R| - delta / 2) if |v - R| > delta
        loss_t = max(l(v), l(old + clip(v - old, -eps, eps)))         eps_clip = 0: l(v)

    values       float32 [t]  under the weights being trained, of the state before each loss token; the
                              only input with a gradient
    old_values   float32 [t]  under the weights before the step's first update
    returns      float32 [t]  targets R of the values
    mask         bool [t]     True if the token counts
    denominator               loss tokens of the whole step, over all micro-batches and ranks

    Values and returns are in the units of the critic's predictions. Statistics: tokens,
    loss_sum, value_sum, return_sum, return_square_sum, error_sum, error_square_sum (error R - v) and
    clip_count (tokens whose loss is the clipped one).
    """
    check_shapes(mask, values=values, old_values=old_values, returns=returns)
    values, old, returns = (blank(x, mask) for x in (values, old_values.detach(), returns.detach()))
    losses = _distance(values - returns, cfg)
    clipped = torch.zeros_like(mask)
    if cfg.eps_clip > 0:
        near = _distance(old + (values - old).clamp(-cfg.eps_clip, cfg.eps_clip) - returns, cfg)
        clipped = (near > losses).detach()
        losses = torch.maximum(losses, near)
    loss_sum = torch.where(mask, losses, 0.0).sum()
    error = returns - values
    stats = {
        "tokens": count(mask),
        "loss_sum": loss_sum.detach(),
        "value_sum": masked_sum(values, mask),
        "return_sum": masked_sum(returns.double(), mask),
        "return_square_sum": masked_sum(returns.double().square(), mask),
        "error_sum": masked_sum(error.double(), mask),
        "error_square_sum": masked_sum(error.double().square(), mask),
        "clip_count": count(clipped & mask),
    }
    return loss_sum / denominator, stats


def explained_variance(means: Mapping[str, float]) -> float:
    """Compute ``1 - Var(R - v) / Var(R)`` from the finished statistics of ``critic_loss``.

    1 is perfect, 0 no better than a constant. The result is 0 if all returns are equal.
    """
    spread = means["return_square_mean"] - means["return_mean"] ** 2
    left = means["error_square_mean"] - means["error_mean"] ** 2
    # In float64 the difference of two equal squares is within rounding of 0, on either side.
    if spread <= 1e-12 * means["return_square_mean"]:
        return 0.0
    return 1.0 - max(0.0, left) / spread


def _distance(error: Tensor, cfg: CriticConfig) -> Tensor:
    square = 0.5 * error.square()
    if not cfg.huber_delta:
        return square
    far = cfg.huber_delta * (error.abs() - 0.5 * cfg.huber_delta)
    return torch.where(error.abs() <= cfg.huber_delta, square, far)


# ---- normalisation of the targets


#: Lower bound of the variance: after a first batch of equal returns, the next differences would be infinite.
MIN_VARIANCE = 1e-5
BETA = 0.995  # decay of the exponential statistics at each update: about the last 200 steps count


class RunningMoments:
    """Mean and std of the returns so far (Yu et al., arXiv 2103.01955; the statistics of PopArt, 1602.07714).

        none         mean 0, std 1: the critic predicts the returns themselves
        moving       over all returns so far, all with the same weight
        exponential  over batch means, the newest with the largest weight: m = beta*m + (1-beta)*batch,
                     divided by 1 - beta^k

    Each kind is one weight with two weighted sums; dividing by the weight corrects the bias of the start.
    Before the first update, normalising is the identity. Unlike PopArt, the critic's output layer is not
    rescaled when the statistics change: its predictions shift, and it learns the difference.
    """

    def __init__(self, cfg: CriticConfig, beta: float = BETA) -> None:
        self._kind = cfg.value_norm
        self._beta = beta
        self._weight = 0.0
        self._total = 0.0
        self._total_of_squares = 0.0

    @property
    def mean(self) -> float:
        return self._total / self._weight if self._weight else 0.0

    @property
    def std(self) -> float:
        if not self._weight:
            return 1.0
        return math.sqrt(max(self._total_of_squares / self._weight - self.mean**2, MIN_VARIANCE))

    def update(self, count: float, total: float, total_of_squares: float) -> None:
        """Add the returns of a batch: their number, sum and sum of squares over all ranks."""
        if self._kind == "none" or count == 0:
            return
        keep, weight = 1.0, 1.0
        if self._kind == "exponential":
            keep, weight = self._beta, (1.0 - self._beta) / count
        self._weight = keep * self._weight + weight * count
        self._total = keep * self._total + weight * total
        self._total_of_squares = keep * self._total_of_squares + weight * total_of_squares

    def normalise(self, returns: npt.ArrayLike) -> F32:
        """Convert returns to targets of the critic, float32 of the same shape."""
        return ((np.asarray(returns, np.float64) - self.mean) / self.std).astype(np.float32)

    def denormalise(self, predictions: npt.ArrayLike) -> F32:
        """Convert predictions of the critic to values in units of the reward, float32 of the same shape."""
        return (np.asarray(predictions, np.float64) * self.std + self.mean).astype(np.float32)

    def state_dict(self) -> dict[str, float]:
        return {"weight": self._weight, "total": self._total, "total_of_squares": self._total_of_squares}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the statistics. Raises KeyError if ``state`` lacks an entry."""
        self._weight = state["weight"]
        self._total = state["total"]
        self._total_of_squares = state["total_of_squares"]
