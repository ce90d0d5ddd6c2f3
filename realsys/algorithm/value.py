"""The critic's loss on flat loss tokens (conventions of loss.py), and the explained variance of the returns."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from realsys.algorithm.flat import blank, check_shapes, count, masked_sum
from realsys.algorithm.loss import Stats
from realsys.config.sections.schema_train import CriticConfig


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

    Values and returns are in the units of the critic's predictions (value_norm.py). Statistics: tokens,
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
    if cfg.loss == "mse":
        return square
    far = cfg.huber_delta * (error.abs() - 0.5 * cfg.huber_delta)
    return torch.where(error.abs() <= cfg.huber_delta, square, far)
