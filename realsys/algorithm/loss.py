"""Losses on the flat answer tokens of packed sequences. Pure tensor functions.

All tensors are float32 ``[t]``, one entry per answer token; ``mask`` is bool ``[t]`` and marks the tokens that count.
Where it is False the other tensors may hold anything, NaN included: it reaches neither loss, gradient nor statistics.

``denominator`` is the number of answer tokens of the whole optimizer step, over all micro-batches and ranks, so the
loss of a micro-batch is its share of the global token mean and shares add up, whatever the layout.

Statistics come as sums, counts and maxima, so that they can be reduced over micro-batches and ranks in any order:
``*_max`` by maximum, the rest by sum (``merge_stats``); ``finish_stats`` divides them at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from realsys.config.schema import PPOConfig

#: Bound on |log ratio| before exp: float32 overflows at 88, and an infinite ratio times the zero gradient of its
#: clipped branch is NaN. Nothing that still trains is anywhere near e^20.
MAX_LOG_RATIO = 20.0

Stats = dict[str, Tensor]


def ppo_actor_loss(
    theta: Tensor,
    prox: Tensor,
    behav: Tensor,
    advantages: Tensor,
    mask: Tensor,
    denominator: float | Tensor,
    cfg: PPOConfig,
) -> tuple[Tensor, Stats]:
    """Decoupled PPO (AReaL, arXiv 2505.24298): its share of the global token mean, and statistics.

        u      = exp(theta - prox)       w = exp(prox - behav), no gradient
        loss_t = -w * min(u*A, clip(u, 1-eps, 1+eps_higher)*A)

    ``theta`` log-probs under the weights being trained (the only input with a gradient), ``prox`` under the weights
    before the step's first update, ``behav`` as recorded when the tokens were sampled.

    A token with ``w > behav_imp_weight_cap`` contributes 0 and stays in the denominator. With ``c_clip`` the
    surrogate of a token with A < 0 is at most ``-c_clip * A``; w multiplies that, too. Without
    ``use_decoupled_loss`` this is plain PPO: prox = behav, w = 1 (``prox`` is not looked at).

    Statistics over the counted tokens: tokens, loss_sum, u_sum, u_max, w_sum, w_max (before the cap), clip_count,
    dual_clip_count, capped_count, kl_behav_prox_sum (k3 estimator of KL(behav || prox)).
    """
    _check_shapes(mask, theta=theta, prox=prox, behav=behav, advantages=advantages)
    theta, prox, behav, advantages = (_blank(x, mask) for x in (theta, prox.detach(), behav.detach(), advantages))
    if not cfg.use_decoupled_loss:
        prox = behav
    log_w = (prox - behav).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    w = log_w.exp()
    u = (theta - prox).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()

    loose = -u * advantages
    tight = -u.clamp(1 - cfg.eps_clip, 1 + (cfg.eps_clip_higher or cfg.eps_clip)) * advantages
    clipped = tight.detach() > loose.detach()
    surrogate = torch.maximum(loose, tight)
    dual_clipped = torch.zeros_like(mask)
    if cfg.c_clip > 0:
        bound = cfg.c_clip * advantages.abs()  # for A >= 0 the surrogate is never positive, so only A < 0 meets it
        dual_clipped = surrogate.detach() > bound
        surrogate = torch.minimum(surrogate, bound)
    capped = torch.zeros_like(mask)
    if cfg.use_decoupled_loss and cfg.behav_imp_weight_cap > 0:
        capped = mask & (w > cfg.behav_imp_weight_cap)

    token_loss = torch.where(mask & ~capped, w * surrogate, 0.0)
    loss_sum = token_loss.sum()
    stats = {
        "tokens": _count(mask),
        "loss_sum": loss_sum.detach(),
        "u_sum": _sum(u, mask),
        "u_max": _max(u, mask),
        "w_sum": _sum(w, mask),
        "w_max": _max(w, mask),
        "clip_count": _count(clipped & mask),
        "dual_clip_count": _count(dual_clipped & mask),
        "capped_count": _count(capped),
        "kl_behav_prox_sum": _sum(w - 1 - log_w, mask),
    }
    return loss_sum / denominator, stats


def sft_loss(theta: Tensor, mask: Tensor, denominator: float | Tensor) -> tuple[Tensor, Stats]:
    """Negative log-likelihood of the counted tokens: the share of the token mean, and ``tokens``, ``loss_sum``."""
    _check_shapes(mask, theta=theta)
    loss_sum = -_blank(theta, mask).sum()
    return loss_sum / denominator, {"tokens": _count(mask), "loss_sum": loss_sum.detach()}


def merge_stats(parts: Iterable[Mapping[str, Tensor]]) -> Stats:
    """Statistics of several micro-batches as of one: maxima of ``*_max``, sums of the rest."""
    merged: Stats = {}
    for part in parts:
        for name, value in part.items():
            if name not in merged:
                merged[name] = value
            elif is_maximum(name):
                merged[name] = torch.maximum(merged[name], value)
            else:
                merged[name] = merged[name] + value
    return merged


def is_maximum(name: str) -> bool:
    """Whether the statistic ``name`` is reduced by maximum; all others are reduced by sum."""
    return name.endswith("_max")


def finish_stats(totals: Mapping[str, float]) -> dict[str, float]:
    """Divide fully reduced statistics by ``tokens``: ``x_sum`` -> ``x_mean`` (``loss_sum`` -> ``loss``),
    ``x_count`` -> ``x_fraction``. Maxima and ``tokens`` stay. With no tokens the means are 0.
    """
    tokens = totals["tokens"]
    scale = 1.0 / tokens if tokens else 0.0
    finished: dict[str, float] = {}
    for name, value in totals.items():
        if name == "loss_sum":
            finished["loss"] = value * scale
        elif name.endswith("_sum"):
            finished[name.removesuffix("_sum") + "_mean"] = value * scale
        elif name.endswith("_count"):
            finished[name.removesuffix("_count") + "_fraction"] = value * scale
        else:
            finished[name] = value
    return finished


def _check_shapes(mask: Tensor, **tensors: Tensor) -> None:
    """A tensor that broadcasts silently would give a wrong loss, not an error."""
    if mask.dtype is not torch.bool or mask.dim() != 1:
        raise ValueError(f"mask must be bool [t], got {mask.dtype} {list(mask.shape)}")
    for name, tensor in tensors.items():
        if tensor.shape != mask.shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, mask has {list(mask.shape)}")


def _blank(x: Tensor, mask: Tensor) -> Tensor:
    """float32 ``x`` with zeros where it does not count (before exp, so that no NaN meets a zero gradient)."""
    return torch.where(mask, x.float(), 0.0)


def _sum(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, x, 0.0).detach().sum()


def _max(x: Tensor, mask: Tensor) -> Tensor:
    kept = torch.where(mask, x, 0.0).detach()
    return kept.amax() if kept.numel() else kept.sum()


def _count(mask: Tensor) -> Tensor:
    return mask.sum().float()
