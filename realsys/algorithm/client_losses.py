"""Losses of the Tinker protocol, which a client of the training service names (`realsys serve`).

    r = exp(theta - old)        A: advantage, or weight of cross_entropy        loss: the sum over the tokens of a call

    cross_entropy         -A theta
    importance_sampling   -r A
    ppo                   -min(r A, clip(r) A)                    clip between the two thresholds
    cispo                 -sg(clip(r)) A theta                    sg: no gradient
    dro                   -(A theta - beta / 2 (theta - old)^2)
    gspo                  ppo with r = sg(s) theta / sg(theta)    s = exp(mean of theta - old over the tokens of a row)

docs/algorithms.md names the sources. The sums are not divided by anything. A token whose ``old`` is -inf has no loss,
and is not in the mean of gspo.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from realsys.algorithm.client_loss_settings import CONFIGS, HIGH, LOW, problem_of
from realsys.algorithm.kl import MAX_LOG_RATIO
from realsys.algorithm.loss_tokens import Segments


def client_loss(
    name: str, theta: Tensor, old: Tensor, advantages: Tensor, segments: Segments, config: Mapping[str, float]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss ``name``, summed over the tokens, and its statistics.

    theta       float32 [t]  log-probs under the weights being trained; only it has a gradient
    old         float32 [t]  log-probs when the tokens were sampled, which the client sent
    advantages  float32 [t]
    segments    the rows of the tokens; gspo needs whole rows
    config      settings of the loss that are not their defaults

    Statistics: ``loss_sum``; of the tokens with an advantage their number ``tokens``, kl_sum (old - theta, the estimate
    k1 of KL(old || theta)) and, if the loss has ratios, ratio_sum and clip_count (ratios beyond a threshold). Raises
    ValueError for an unknown loss or setting.
    """
    if problem := problem_of(name, config):
        raise ValueError(problem)
    settings = {**CONFIGS[name], **config}
    mask = ~old.isneginf()
    theta, old, advantages = theta.where(mask, 0.0), old.where(mask, 0.0), advantages.where(mask, 0.0)
    counted = mask & (advantages != 0)
    stats = {"tokens": counted.sum().float()}
    difference = theta - old
    if name == "cross_entropy":
        loss = -(advantages * theta).sum()
    elif name == "dro":
        loss = -(advantages * theta - 0.5 * settings["beta"] * difference.square()).sum()
    else:
        if name == "gspo":
            difference = segments.means(difference, mask) + theta - theta.detach()
        ratio = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        bounded = ratio.clamp(settings.get(LOW), settings.get(HIGH)) if settings else ratio
        if name == "cispo":
            loss = -(bounded.detach() * advantages * theta).sum()
        else:
            loss = -(ratio * advantages).minimum(bounded * advantages).sum()
        stats["clip_count"] = (counted & (bounded != ratio)).sum().float()
        stats["ratio_sum"] = (ratio.detach() * counted).sum()
    if name != "cross_entropy":
        stats["kl_sum"] = ((old - theta.detach()) * counted).sum()
    return loss, stats | {"loss_sum": loss.detach()}
