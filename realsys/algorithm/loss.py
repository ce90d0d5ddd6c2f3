"""The part that all policy losses share: ratios, behaviour weight, penalties, mask, aggregation, statistics.

    theta, prox, behav --ratios--> u, w --losses/*.py--> token loss [t] --combine--> share of the step's mean

All tensors are float32 ``[t]``, one entry per loss token; ``mask`` is bool ``[t]`` and marks the tokens that count.
Entries at a False position may be anything, NaN included. Pure tensor functions.

``denominator`` is a number of the whole optimizer step, over all micro-batches and ranks (``loss_denominator``). The
loss of a micro-batch is therefore its share of one global mean, and shares add up for every layout.

Statistics are sums, counts and maxima, so that they can be reduced over micro-batches and ranks in any order:
``*_max`` by maximum, the others by sum (``merge_stats``). ``finish_stats`` divides them at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from realsys.algorithm.kl import MAX_LOG_RATIO, kl_estimate
from realsys.algorithm.loss_tokens import Segments, blank, check_shapes, count, masked_max, masked_sum
from realsys.algorithm.losses import ConfiguredLoss, LossInputs, Surrogate, load_loss
from realsys.algorithm.minibatches import counts_in_loss
from realsys.config.doors import LOSS
from realsys.config.schema_train import PPOConfig
from realsys.errors import ConfigError
from realsys.types import SequenceRef

Stats = dict[str, Tensor]


def loss_denominator(refs: Iterable[SequenceRef], cfg: PPOConfig, max_new_tokens: int) -> float:
    """Return the divisor of the actor's loss; ``refs``: all rows of one optimizer step, on all ranks.

    It depends on ``cfg.aggregation`` and counts the rows that ``counts_in_loss``:

        token     their loss tokens                   every token of the step has the same weight
        sequence  their episodes                      every episode has the same weight
        constant  their episodes * max_new_tokens     a sum over tokens, independent of lengths

    Rows that skip the forward pass because their advantage is 0 are in ``refs``: they contribute 0 to the
    mean. The result is at least 1, so that a step without any row has loss 0 and not NaN.
    """
    counted = [ref for ref in refs if counts_in_loss(ref, cfg)]
    if cfg.aggregation == "token":
        return float(max(1, sum(ref.loss_tokens for ref in counted)))
    episodes = len({ref.episode for ref in counted})
    return float(max(1, episodes) * (max_new_tokens if cfg.aggregation == "constant" else 1))


def actor_loss(
    theta: Tensor,
    prox: Tensor,
    behav: Tensor,
    advantages: Tensor,
    mask: Tensor,
    denominator: float | Tensor,
    cfg: PPOConfig,
    *,
    loss: ConfiguredLoss | None = None,
    segments: Segments | None = None,
    entropy: Tensor | None = None,
    ref: Tensor | None = None,
    kl_coef: float = 0.0,
    top: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Stats]:
    """Return the share of the policy loss, and statistics (docs/algorithms.md has every formula with its source).

        u = exp(theta - prox)        w = exp(prox - behav), no gradient
        w * loss(u, advantages, ...) + kl_coef * KL(theta, ref) - cfg.entropy_coef * entropy, per token

    theta       log-probs under the weights being trained; only it and ``entropy`` have a gradient
    prox        log-probs under the weights before the step's first update; not read without
                ``use_decoupled_loss``
    behav       log-probs recorded when the tokens were sampled
    loss        token losses (``load_loss``); None: loaded here. A caller with many micro-batches passes it
    entropy     entropy of the distribution at each token; with a gradient if there is a bonus
    ref         log-probs under the reference model; reported if given, a term of the loss if kl_coef > 0
    segments    needed for an episode-level loss (gspo) and for aggregation=sequence
    top         log-probs of the teacher's k most probable tokens, float32 [t, k]: under the weights being trained,
                with a gradient, and under the teacher

    A token with ``w > behav_imp_weight_cap`` adds nothing to the policy term but stays in the denominator
    (mode mask), or its w is set to the cap (truncate). A token whose ``behav`` is -inf counts as masked: the
    engine says that it could not sample it, so it has no ratio. Raises ValueError for shapes that do not
    agree and for a missing input.

    Statistics over the counted tokens: tokens, loss_sum (share * denominator), u_sum, u_max, w_sum, w_max,
    w_squared_sum (before the cap), clip_count, dual_clip_count, capped_count, kl_behav_prox_sum and kl_prox_theta_sum
    (k3 estimators of KL(behav || prox) and KL(prox || theta)); entropy_sum, kl_ref_sum and
    teacher_mass_sum (probability of the teacher's k tokens) if given.
    """
    optional = {name: x for name, x in (("entropy", entropy), ("ref", ref)) if x is not None}
    check_shapes(mask, theta=theta, prox=prox, behav=behav, advantages=advantages, **optional)
    loss = loss or load_loss(cfg)
    mask = mask & ~torch.isneginf(behav)
    theta, prox, behav, advantages = (blank(x, mask) for x in (theta, prox.detach(), behav.detach(), advantages))
    if not cfg.use_decoupled_loss:
        prox = behav
    episodes = _needed(segments, f"loss={cfg.loss}") if loss.episode_level else None
    u, w, stats = _ratios(theta, prox, behav, mask, episodes)
    top_theta, top_teacher = (blank(x, mask[:, None]) for x in top) if top is not None else (None, None)
    if top_teacher is not None:
        stats["teacher_mass_sum"] = masked_sum(top_teacher.exp().sum(-1), mask)
    surrogate = loss(LossInputs(theta, prox, behav, u, w, advantages, mask, segments, cfg, top_theta, top_teacher))
    penalties, reported = _penalties(theta, mask, cfg, entropy, ref, kl_coef)
    loss_sum, counts = _combine(surrogate, w, penalties, mask, cfg, segments)
    return loss_sum / denominator, stats | reported | counts | {"loss_sum": loss_sum.detach()}


def interpolated_prox(theta: Tensor, behav: Tensor, versions: Tensor, version: int) -> Tensor:
    """Return proximal log-probs [t] without a forward pass: A-3PO, arXiv 2512.06547, section 3.

        prox = behav + a * (theta - behav)        a = d / (d + 1)        d = version - versions

    The nearer the weights that sampled a token are to ``version``, whose update makes theta, the nearer is prox to
    behav; for d = 0 they are equal. Float32, no gradient.
    """
    staleness = (version - versions).clamp(min=0).float()
    return behav + staleness / (staleness + 1.0) * (theta.detach() - behav)


def _ratios(
    theta: Tensor, prox: Tensor, behav: Tensor, mask: Tensor, episodes: Segments | None
) -> tuple[Tensor, Tensor, Stats]:
    """Return u (with the gradient of theta), w (without one), each float32 [t], and their statistics.

    With ``episodes`` the ratios are those of whole episodes; None: each token has its own.
    """
    log_u = theta - prox
    log_w = prox - behav
    stats = {
        "tokens": count(mask),
        "kl_behav_prox_sum": _k3_sum(log_w, mask),
        "kl_prox_theta_sum": _k3_sum(log_u, mask),
    }
    if episodes is not None:
        # The value is that of the episode, the gradient that of the token (GSPO-token, section 4.3 of the
        # paper). Summed over an episode with one advantage, this is the gradient of the mean; advantages
        # per token keep their meaning.
        log_u = episodes.means(log_u, mask) + theta - theta.detach()
        log_w = episodes.means(log_w, mask)
    u, w = (log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() for log_ratio in (log_u, log_w))
    stats |= {"u_sum": masked_sum(u, mask), "u_max": masked_max(u, mask)}
    stats |= {"w_sum": masked_sum(w, mask), "w_max": masked_max(w, mask)}
    stats |= {"w_squared_sum": masked_sum(w.square(), mask)}
    return u, w, stats


def _combine(
    surrogate: Surrogate, w: Tensor, penalties: Tensor, mask: Tensor, cfg: PPOConfig, segments: Segments | None
) -> tuple[Tensor, Stats]:
    """Weigh, mask and aggregate the token losses. Returns their sum, and the number of tokens at each bound."""
    none = torch.zeros_like(mask)
    capped = none
    if cfg.use_decoupled_loss and cfg.behav_imp_weight_cap > 0:
        capped = w > cfg.behav_imp_weight_cap
        w = torch.where(capped, 0.0 if cfg.behav_imp_weight_mode == "mask" else cfg.behav_imp_weight_cap, w)
    token_loss = torch.where(mask, w * surrogate.loss + penalties, 0.0)
    if cfg.aggregation == "sequence":
        token_loss = token_loss / _needed(segments, "aggregation=sequence").counted(mask).clamp(min=1.0).float()
    flags = {"clip_count": surrogate.clipped, "dual_clip_count": surrogate.dual_clipped, "capped_count": capped}
    counts = {name: count((none if flag is None else flag) & mask) for name, flag in flags.items()}
    return token_loss.sum(), counts


def _penalties(
    theta: Tensor, mask: Tensor, cfg: PPOConfig, entropy: Tensor | None, ref: Tensor | None, kl_coef: float
) -> tuple[Tensor, Stats]:
    """Return KL to the reference minus the entropy bonus, per token [t], and statistics of both."""
    total, stats = torch.zeros_like(theta), {}
    if ref is not None:
        kl = kl_estimate(theta, blank(ref.detach(), mask), cfg.kl.estimator)
        stats["kl_ref_sum"] = masked_sum(kl, mask)
        if kl_coef > 0:
            total = total + kl_coef * kl
    elif kl_coef > 0:
        raise ValueError(f"kl_coef is {kl_coef}: pass the log-probs of the reference model (ref)")
    if entropy is not None:
        stats["entropy_sum"] = masked_sum(entropy.float(), mask)
        if cfg.entropy_coef > 0:
            total = total - cfg.entropy_coef * blank(entropy, mask)
    elif cfg.entropy_coef > 0:
        raise ValueError(f"entropy_coef is {cfg.entropy_coef}: pass the entropy")
    return total, stats


def should_stop(means: Mapping[str, float], cfg: PPOConfig) -> str | None:
    """Return the reason to skip the rest of the step, or None, from this minibatch's ``finish_stats`` over all ranks.

    Call it between gradient and update: the update that would move the policy too far must not happen.
    """
    for field, limit, name in (
        ("early_stop_ratio", cfg.early_stop_ratio, "u_mean"),
        ("early_stop_kl", cfg.early_stop_kl, "kl_prox_theta_mean"),
    ):
        if 0 < limit < means[name]:
            return f"{name} {means[name]:.4g} is above train.ppo.{field}={limit:g}"
    return None


def merge_stats(parts: Iterable[Mapping[str, Tensor]]) -> Stats:
    """Merge the statistics of several micro-batches: maxima of ``*_max``, sums of the others."""
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
    """Return True if the statistic ``name`` is reduced by maximum; all others are reduced by sum."""
    return name.endswith("_max")


def finish_stats(totals: Mapping[str, float]) -> dict[str, float]:
    """Divide fully reduced statistics by ``pairs`` if there are any in them, else by ``tokens``.

    ``x_sum`` becomes ``x_mean`` (``loss_sum`` becomes ``loss``, ``accuracy_sum`` ``accuracy``), and ``x_count`` becomes
    ``x_fraction``. Maxima, ``pairs`` and ``tokens`` stay. Without tokens the means are NaN, which the step log
    writes as null. ``w_ess`` is the effective sample size of w over
    the number of tokens: E[w]^2 / E[w^2]. If the loss is not a token mean (see
    aggregation), the caller divides ``loss_sum`` by the denominator instead.
    """
    counted = totals["pairs"] if "pairs" in totals else totals["tokens"]
    scale = 1.0 / counted if counted else math.nan
    finished: dict[str, float] = {}
    for name, value in totals.items():
        if name in ("loss_sum", "accuracy_sum"):
            finished[name.removesuffix("_sum")] = value * scale
        elif name.endswith("_sum"):
            finished[name.removesuffix("_sum") + "_mean"] = value * scale
        elif name.endswith("_count"):
            finished[name.removesuffix("_count") + "_fraction"] = value * scale
        else:
            finished[name] = value
    if counted and (squares := finished.get("w_squared_mean")):
        finished["w_ess"] = finished["w_mean"] ** 2 / squares
    return finished


def _k3_sum(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Sum r - 1 - log r. Its mean over samples of p is KL(p || q) if log r = log q - log p."""
    return masked_sum(kl_estimate(-log_ratio.detach(), torch.zeros_like(log_ratio), "k3"), mask)


def _needed(segments: Segments | None, what: str) -> Segments:
    if segments is None:
        raise ValueError(f"{what} needs the episode of each token: pass segments")
    return segments


# ---- trial of a user's loss, before the run


def try_loss(cfg: PPOConfig) -> None:
    """Compute loss and gradient of six tokens, one of them masked, and of none. Raises ConfigError.

    A data rank without rows computes the loss of an empty micro-batch.
    """
    loss = load_loss(cfg)
    # The entropy is a term of the shared code, which the trial does not test.
    cfg = cfg.model_copy(update={"entropy_coef": 0.0})
    for tokens in (6, 0):
        where = "a trial batch" if tokens else "an empty micro-batch"
        with LOSS.guard(cfg.loss, f"fails on {where}"):
            theta = torch.tensor([-1.0, -2.0, -0.5, -1.5, -0.7, -3.0])[:tokens].requires_grad_()
            prox = torch.tensor([-1.2, -1.5, -0.5, -1.7, -0.9, -2.0])[:tokens]
            behav = torch.tensor([-1.1, -1.6, -0.6, -1.6, -0.8, -2.1])[:tokens]
            advantages = torch.tensor([1.0, 1.0, -0.5, -0.5, 0.0, 2.0])[:tokens]
            mask = torch.tensor([True, True, True, False, True, True])[:tokens]
            rows = 3 if tokens else 0
            segments = Segments(torch.tensor([2, 3, 1])[:rows], torch.tensor([0, 1, 1])[:rows])
            columns = (theta, prox, behav, advantages)
            shares = torch.arange(cfg.top_k + 1.0).log_softmax(0)[: cfg.top_k]
            top = (theta[:, None] + shares, prox[:, None] + shares) if cfg.top_k else None
            total, _ = actor_loss(*columns, mask, 5.0, cfg, loss=loss, segments=segments, top=top)
            if not total.requires_grad:
                raise ValueError("the result has no gradient: compute it from inputs.theta or inputs.u")
            [gradient] = torch.autograd.grad(total, theta)
            result = total, gradient
        if not all(tensor.isfinite().all() for tensor in result):
            problem = f"loss or gradient is not finite on {where}: check its divisions and logs"
            raise ConfigError(LOSS.field, cfg.loss, problem)
