"""Objectives of supervised training: demonstrations, and pairs of a chosen and a rejected response.

A pair is a row of ``[n, 2]``, the chosen response first. ``denominator`` counts the whole optimizer step, over all
micro-batches and ranks, so the loss of a micro-batch is its share of one global mean. The statistics are sums and
counts, as in ``realsys.algorithm.loss``; ``finish_stats`` divides those of pairs by ``pairs``. Pure tensor functions.

``train.ppo.loss_args`` are the keyword arguments of these functions (``realsys.config.schema_train.OBJECTIVES``).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from realsys.algorithm.loss import Stats
from realsys.algorithm.loss_tokens import blank, check_shapes, count


def sft_loss(theta: Tensor, mask: Tensor, denominator: float | Tensor) -> tuple[Tensor, Stats]:
    """Return the negative log-likelihood of the counted tokens as a share of the token mean, and statistics.

    ``theta``: log-probs float32 ``[t]``; ``mask`` bool ``[t]``. Statistics: ``tokens``, ``loss_sum``. Raises ValueError
    for shapes that do not agree.
    """
    check_shapes(mask, theta=theta)
    loss_sum = -blank(theta, mask).sum()
    return loss_sum / denominator, {"tokens": count(mask), "loss_sum": loss_sum.detach()}


def dpo_loss(
    logprobs: Tensor,
    reference: Tensor,
    tokens: Tensor,
    denominator: float | Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    loss_type: str = "sigmoid",
) -> tuple[Tensor, Stats]:
    """Return the share of the mean DPO loss of pairs, and statistics.

        r = log-prob - reference, of each response        h = beta * (r_chosen - r_rejected)

        sigmoid   -(1 - s) log sigma(h) - s log sigma(-h)    Rafailov et al. 2023, eq. 7; with s = label_smoothing
                                                             conservative DPO (Mitchell 2023)
        hinge     max(0, 1 - h)                              Liu et al. 2024, the SLiC loss on log ratios
        ipo       (m - 1 / (2 beta))^2                       Azar et al. 2023, eq. 17; m = r_chosen / tokens_chosen
                                                             - r_rejected / tokens_rejected

    logprobs    log-probs of the responses, summed over their tokens, float ``[n, 2]``; only they have a gradient
    reference   the same under the reference model, ``[n, 2]``
    tokens      number of their tokens, ``[n, 2]``; only ipo reads them

    Statistics: pairs, loss_sum, accuracy_sum (pairs with h > 0; h = 0 counts half), margin_sum (h), chosen_reward_sum
    and rejected_reward_sum (beta * r), chosen_logprob_sum, rejected_logprob_sum. Raises ValueError for shapes that do
    not agree and for an unknown ``loss_type``.
    """
    _check_pairs(logprobs=logprobs, reference=reference, tokens=tokens)
    ratios = logprobs - reference.detach()
    margin = beta * (ratios[:, 0] - ratios[:, 1])
    if loss_type == "sigmoid":
        losses = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
    elif loss_type == "hinge":
        losses = (1 - margin).clamp(min=0)
    elif loss_type == "ipo":
        means = ratios / tokens.clamp(min=1)
        losses = (means[:, 0] - means[:, 1] - 1 / (2 * beta)).square()
    else:
        raise ValueError(f"loss_type is {loss_type!r}: it must be sigmoid, hinge or ipo")
    stats = _of_pairs(losses, margin) | _sums(beta * ratios, "reward") | _sums(logprobs, "logprob")
    return losses.sum() / denominator, stats


def reward_loss(scores: Tensor, denominator: float | Tensor, *, center: float = 0.0) -> tuple[Tensor, Stats]:
    """Return the share of the mean loss of a reward model on pairs, and statistics.

        -log sigma(chosen - rejected) + center * (chosen + rejected)^2

    The first term is the Bradley-Terry likelihood (Ouyang et al. 2022, eq. 1). The second one keeps the scores
    around 0 (Eisenstein et al. 2023, eq. 2; TRL's ``center_rewards_coefficient``).

    ``scores``: of the responses, float ``[n, 2]``. Statistics: pairs, loss_sum, accuracy_sum (pairs with chosen >
    rejected; equal scores count half), margin_sum (chosen - rejected), chosen_score_sum, rejected_score_sum. Raises
    ValueError for another shape.
    """
    _check_pairs(scores=scores)
    margin = scores[:, 0] - scores[:, 1]
    losses = -logsigmoid(margin) + center * scores.sum(1).square()
    return losses.sum() / denominator, _of_pairs(losses, margin) | _sums(scores, "score")


def _check_pairs(**tensors: Tensor) -> None:
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    if any(len(shape) != 2 or shape[1] != 2 for shape in shapes.values()) or len({s[0] for s in shapes.values()}) > 1:
        raise ValueError(f"shapes {shapes}: they must be [n, 2]")


def _of_pairs(losses: Tensor, margin: Tensor) -> Stats:
    sums = {"loss_sum": losses, "accuracy_sum": (margin.sign() + 1) / 2, "margin_sum": margin}
    return {"pairs": torch.tensor(float(len(losses)))} | {name: x.detach().sum() for name, x in sums.items()}


def _sums(values: Tensor, name: str) -> Stats:
    """Return the sums of the chosen and of the rejected responses."""
    chosen, rejected = values.detach().sum(0)
    return {f"chosen_{name}_sum": chosen, f"rejected_{name}_sum": rejected}
