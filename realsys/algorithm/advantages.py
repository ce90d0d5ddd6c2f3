"""Computation of advantages from rewards. Pure numpy functions.

An episode has one outcome, and its advantage applies to all its rows and loss tokens. Without critic, KL in the reward
and rewards of turns, metadata is enough, and every rank computes the same:

    reward --shape_rewards--> shaped --normalise--> outcome_advantages

Otherwise each rank computes one advantage per token of its own rows, with batch statistics over all ranks:

    reward --shape_rewards--> shaped --normalise, group level--> outcome_rewards
           --token_rewards, rewards of turns, KL--> rewards of tokens --token_advantages, values--> advantages, returns
           --moments, summed over ranks--> normalise_tokens, batch level

The paper's batch normalisation, GRPO, Dr.GRPO and RLOO are settings of one normaliser (docs/algorithms.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from realsys.config.schema_train import NormalisationConfig, PPOConfig
from realsys.errors import ConfigError
from realsys.types import F32, SequenceRef

EPS = 1e-6  # added to a standard deviation: rewards are about 1, and a level without spread is 0 in any case
F64 = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]


class Moments(NamedTuple):
    """Number, sum and sum of squares. Moments of disjoint parts add up: ``Moments(*sums)`` after a reduction."""

    number: float
    total: float
    total_of_squares: float

    @property
    def mean(self) -> float:
        return self.total / self.number if self.number else 0.0

    @property
    def std(self) -> float:
        """Standard deviation of the population.

        Its error is about 1e-8 of the mean: squares of float32 are exact in float64, and sums nearly.
        """
        return math.sqrt(max(self.total_of_squares / self.number - self.mean**2, 0.0)) if self.number else 0.0

    @property
    def has_spread(self) -> bool:
        """True if the std is more than its own rounding error."""
        return self.std > 1e-7 * abs(self.mean)


def outcome_advantages(refs: Sequence[SequenceRef], cfg: PPOConfig, max_new_tokens: int) -> F32:
    """Compute the advantage of each row of a batch, float32 ``[len(refs)]``, for every loss token of the row.

    With gamma = lambda = 1 and no critic, as in the paper, the return of each token is the reward of its
    episode, so all its rows have the same advantage. Batch mean and std are over loss tokens: the weight
    of an episode is its number of loss tokens. Group mean and std are over the episodes of one prompt.
    ``refs`` must be the whole batch of the train step: a part has other means.

    Truncated episodes under ``truncated_answers=mask`` count like all others. DAPO's overlong filtering
    masks the loss, not the statistics: the baseline of a group does not depend on the limit of length.

    Raises ConfigError if gamma or lam is not 1: discounting needs one advantage per token
    (``token_advantages``).
    """
    if cfg.gamma != 1.0 or cfg.lam != 1.0:
        field, value = ("gamma", cfg.gamma) if cfg.gamma != 1.0 else ("lam", cfg.lam)
        raise ConfigError(f"train.ppo.{field}", value, "must be 1: without a critic an episode has one advantage")
    first, of_row = _episodes(refs)
    tokens = np.array([r.episode_tokens for r in first], np.float64)
    shaped = shape_rewards(first, cfg, max_new_tokens)
    return normalise(shaped, _groups(first), tokens, cfg.advantage).astype(np.float32)[of_row]


def advantages_by_id(refs: Sequence[SequenceRef], cfg: PPOConfig, max_new_tokens: int) -> dict[str, float]:
    """Compute ``outcome_advantages`` of all rows of the train step, by sample id.

    The order of summation is fixed, so the results are equal to the last bit on every rank and for every
    order of ``refs``.
    """
    ordered = sorted(refs, key=lambda ref: ref.sample_id)
    advantages = outcome_advantages(ordered, cfg, max_new_tokens)
    return dict(zip((ref.sample_id for ref in ordered), advantages.tolist(), strict=True))


def outcome_rewards(refs: Sequence[SequenceRef], cfg: PPOConfig, max_new_tokens: int) -> F64:
    """Compute the outcome of each row's episode, float64 ``[len(refs)]``; the row's last loss token earns it.

    It is the shaped reward, normalised at group level as in ``outcome_advantages`` if ``cfg.advantage`` has
    such a mean or std. The batch level is applied to advantages of tokens later (``normalise_tokens``).
    ``refs``: all rows of the train step.
    """
    update: dict[str, Any] = {name: "none" for name in ("mean", "std") if getattr(cfg.advantage, name) == "batch"}
    level = cfg.advantage.model_copy(update=update | {"recentre": False})
    first, of_row = _episodes(refs)
    return normalise(shape_rewards(first, cfg, max_new_tokens), _groups(first), np.ones(len(first)), level)[of_row]


def shape_rewards(episodes: Sequence[SequenceRef], cfg: PPOConfig, max_new_tokens: int) -> F64:
    """Shape the rewards for the algorithm, float64 ``[len(episodes)]``; ``episodes``: one row of each.

        shaped = clip(reward * scale + bias, -clip, clip)          0 if truncated and truncated_answers=zero_reward
               - penalty * clip((tokens - (max_new_tokens - buffer)) / buffer, 0, 1)          with overlong.buffer

    The second line is DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), in units of the shaped
    reward; ``tokens`` are the sampled tokens of the episode. It also applies to truncated episodes: reaching the
    limit must not be better than stopping before it.
    """
    shaped = np.array([r.reward for r in episodes], np.float64) * cfg.reward_scale + cfg.reward_bias
    shaped = np.clip(shaped, -cfg.reward_clip, cfg.reward_clip)
    if cfg.truncated_answers == "zero_reward":
        shaped = np.where(np.array([r.truncated for r in episodes], bool), 0.0, shaped)
    if cfg.overlong.buffer:
        lengths = np.array([r.sampled_tokens or r.episode_tokens for r in episodes], np.float64)
        beyond = (lengths - (max_new_tokens - cfg.overlong.buffer)) / cfg.overlong.buffer
        shaped = shaped - cfg.overlong.penalty * np.clip(beyond, 0.0, 1.0)
    return shaped


def token_rewards(
    outcomes: npt.ArrayLike, lengths: npt.ArrayLike, kl: npt.ArrayLike | None = None, kl_coef: float = 0.0
) -> F64:
    """Compute the reward of each loss token: the outcome at the last one of its row, minus ``kl_coef * kl`` at each.

    outcomes [n]      outcomes of the rows' episodes (``outcome_rewards``)
    lengths  int [n]  loss tokens of each row; their sum is t
    kl       [t]      estimate of KL(policy || reference) at each token, if it is a part of the reward

    Returns float64 [t]. Raises ValueError if the sizes do not agree.
    """
    n_tokens = np.asarray(lengths, np.int64)
    rewards = np.zeros(int(n_tokens.sum()), np.float64)
    if kl is not None:
        divergence = np.asarray(kl, np.float64)
        if divergence.shape != rewards.shape:
            raise ValueError(
                f"token_rewards: kl has {len(divergence)} tokens: it must have {len(rewards)}, as the rows"
            )
        rewards -= kl_coef * divergence
    not_empty = n_tokens > 0
    rewards[(np.cumsum(n_tokens) - 1)[not_empty]] += np.asarray(outcomes, np.float64)[not_empty]
    return rewards


def turn_discounts(mask: npt.NDArray[np.bool_], gamma: float, turn_gamma: float) -> F64:
    """Return the discount after each loss token of a row, float64 ``[L]``.

    mask bool [T]  loss_mask of the row; a turn is a run of loss tokens

    The discount is gamma, and gamma * turn_gamma after the last token of a turn. After the last turn it is
    gamma, because only the final state of the row follows.
    """
    positions = np.flatnonzero(mask)
    discounts = np.full(len(positions), gamma, np.float64)
    discounts[:-1][np.diff(positions) > 1] *= turn_gamma
    return discounts


def token_advantages(
    rewards: npt.ArrayLike,
    lengths: npt.ArrayLike,
    truncated: npt.ArrayLike,
    cfg: PPOConfig,
    values: npt.ArrayLike | None = None,
    discounts: npt.ArrayLike | None = None,
) -> tuple[F32, F32]:
    """Compute advantages and returns of tokens, before batch normalisation, float32 ``[t]`` each.

    rewards   [t]       rewards of tokens (``token_rewards``), packed
    lengths   int [n]   loss tokens of each row; their sum is t
    truncated bool [n]  True if the episode was cut off at the end of the row: V after its last token is then
                        the critic's value, otherwise 0
    values    [t + n]   values of the critic, in units of the reward: L + 1 per row, for the state before
                        each loss token and the state after the last
    discounts [t]       discount after each token (``turn_discounts``); None: gamma everywhere

    With values, this is GAE, and the returns are the targets of the critic (A + V). Without values, V is 0
    everywhere: both results are the sum of the rewards from the token on, discounted by gamma * lam per
    token (the reward to go of REINFORCE++) and by turn_gamma per turn. Raises ValueError if the sizes do not
    agree.
    """
    n_tokens = np.asarray(lengths, np.int64)
    gamma = cfg.gamma if discounts is None else discounts
    if values is None:
        return gae(rewards, np.zeros(int(n_tokens.sum())), n_tokens, np.zeros(len(n_tokens)), gamma, cfg.lam)
    flat = np.asarray(values, np.float64)
    if len(flat) != n_tokens.sum() + len(n_tokens):
        raise ValueError(f"token_advantages: {len(flat)} values for lengths {n_tokens}: each row needs one more")
    ends = np.cumsum(n_tokens + 1) - 1
    bootstrap = np.where(np.asarray(truncated, bool), flat[ends], 0.0)
    return gae(rewards, np.delete(flat, ends), n_tokens, bootstrap, gamma, cfg.lam)


def moments(x: npt.ArrayLike) -> Moments:
    """Compute the moments of this rank's tokens; summed over ranks they are the moments of the batch."""
    values = np.asarray(x, np.float64)
    return Moments(float(values.size), float(values.sum()), float(np.square(values).sum()))


def normalise_tokens(advantages: npt.ArrayLike, batch: Moments, cfg: NormalisationConfig, eps: float = EPS) -> F32:
    """Apply the batch level of ``cfg`` to advantages of tokens, float32 of the same shape.

    Mean and std are over all loss tokens of the batch (``batch``), masked episodes included. The group
    level was applied to the outcomes before (``outcome_rewards``). With a std, a batch without spread
    becomes 0: it must not be divided by eps.
    """
    x = np.asarray(advantages, np.float64)
    if cfg.mean == "batch" or cfg.recentre:
        x = x - batch.mean
    if cfg.std == "batch":
        x = x / (batch.std + eps) if batch.has_spread else np.zeros_like(x)
    return x.astype(np.float32)


def normalise(
    values: npt.ArrayLike, groups: npt.ArrayLike, weights: npt.ArrayLike, cfg: NormalisationConfig, eps: float = EPS
) -> F64:
    """Compute ``(values - mean) / (std + eps)``, mean and std each over nothing, the group or the batch.

    values  [n]      shaped rewards of episodes, or advantages of tokens
    groups  int [n]  number of the prompt of each
    weights [n]      weight of each in batch mean and std (loss tokens); within a group all weigh the same

    The std is that of the population about the plain mean of its level. It is that of the centred values if
    the mean is subtracted per group and the std is over the batch, as in REINFORCE++-baseline, and that of
    the unchanged ``values`` otherwise. With ``leave_one_out``, the mean of a value excludes the value itself.
    With ``recentre``, the mean of the group-centred values over the batch is subtracted too: an episode
    weighs as its tokens do in it, so it is not 0.

    If all values of a level are equal, the result is exactly 0, for the level of the mean and for that of the
    std: rounding noise, or a reward, must not be divided by eps. This includes a level of one value.
    """
    x = np.asarray(values, np.float64)
    if x.size == 0:
        return x
    one, everything = np.ones_like(x), np.zeros(x.shape, np.int64)
    levels = {
        "group": (np.unique(np.asarray(groups), return_inverse=True)[1], one),
        "batch": (everything, np.asarray(weights, np.float64)),
    }
    centred = x
    if cfg.mean != "none":
        centred = x - _level_mean(x, *levels[cfg.mean], leave_one_out=cfg.leave_one_out)
    if cfg.recentre:
        centred = centred - _level_mean(centred, *levels["batch"], leave_one_out=False)
    if cfg.std == "none":
        return centred
    members, of_level = levels[cfg.std]
    spread = centred if (cfg.mean, cfg.std) == ("group", "batch") else x
    scaled = centred / (_level_std(spread, members, of_level) + eps)
    return np.where(_constant(spread, members), 0.0, scaled)


def gae(
    rewards: npt.ArrayLike,
    values: npt.ArrayLike,
    lengths: npt.ArrayLike,
    bootstrap: npt.ArrayLike,
    gamma: npt.ArrayLike,
    lam: float,
) -> tuple[F32, F32]:
    """Compute generalised advantage estimates over packed sequences (Schulman et al., arXiv 1506.02438).

        delta_k = r_k + gamma_k * V_{k+1} - V_k        A_k = delta_k + gamma_k * lam * A_{k+1}

    rewards, values [t]  packed: the tokens of sequence 0, then of sequence 1, ...
    lengths   int [n]    loss tokens of each sequence; their sum is t
    bootstrap [n]        V after the last token: the critic's value if the episode was cut off, 0 if it ended
    gamma     [t] or []  discount from each token to the next

    Returns advantages and value targets (A + V), float32 [t]. Raises ValueError if the sizes do not agree.
    """
    r, v = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    n_tokens, tail = np.asarray(lengths, np.int64), np.asarray(bootstrap, np.float64)
    discount = np.broadcast_to(np.asarray(gamma, np.float64), r.shape)
    if not (len(r) == len(v) == n_tokens.sum()) or len(tail) != len(n_tokens) or (n_tokens < 0).any():
        raise ValueError(f"gae: {len(r)} rewards, {len(v)} values, {len(tail)} bootstraps for lengths {n_tokens}")
    advantages = np.empty_like(r)
    # Sorted, longest first: the sequences that have a token k places before their end are a prefix. A step
    # of the scan then handles exactly one token of each, without padding.
    order = np.argsort(-n_tokens, kind="stable")
    last = (np.cumsum(n_tokens) - 1)[order]
    running = np.searchsorted(-n_tokens[order], -np.arange(n_tokens.max(initial=0)), side="left")
    next_value, next_advantage = tail[order], np.zeros(len(order))
    for k, m in enumerate(running):
        at = last[:m] - k
        delta = r[at] + discount[at] * next_value[:m] - v[at]
        next_advantage = delta + discount[at] * lam * next_advantage[:m]
        next_value = v[at]
        advantages[at] = next_advantage
    return advantages.astype(np.float32), (advantages + v).astype(np.float32)


def _level_mean(x: F64, members: Indices, weights: F64, *, leave_one_out: bool) -> F64:
    """Return for each value the weighted mean of its level, exact if the level is constant. [n] -> [n]"""
    total, weight = _totals(x * weights, members), _totals(weights, members)
    if leave_one_out:
        total, weight = total - x * weights, weight - weights
    mean = np.divide(total, weight, out=x.copy(), where=weight > 0)
    return np.where(_constant(x, members), x, mean)


def _level_std(x: F64, members: Indices, weights: F64) -> F64:
    """Return for each value the weighted population std of its level. [n] -> [n]"""
    deviation = x - _level_mean(x, members, weights, leave_one_out=False)
    variance = _totals(weights * deviation**2, members)
    return np.sqrt(np.divide(variance, _totals(weights, members), out=np.zeros_like(x), where=variance > 0))


def _totals(x: F64, members: Indices) -> F64:
    """Return for each value the sum over its level."""
    return np.asarray(np.bincount(members, weights=x)[members], np.float64)


def _constant(x: F64, members: Indices) -> npt.NDArray[np.bool_]:
    """Return for each value True if all values of its level are equal."""
    low, high = np.full(members.max() + 1, np.inf), np.full(members.max() + 1, -np.inf)
    np.minimum.at(low, members, x)
    np.maximum.at(high, members, x)
    return np.asarray((low == high)[members])


def _episodes(refs: Sequence[SequenceRef]) -> tuple[list[SequenceRef], Indices]:
    """Return the first row of each episode, and for each row the index of its episode among them."""
    index_of: dict[int, int] = {}
    first_rows: list[SequenceRef] = []
    for ref in refs:
        if ref.episode not in index_of:
            index_of[ref.episode] = len(first_rows)
            first_rows.append(ref)
    return first_rows, np.array([index_of[ref.episode] for ref in refs], np.int64)


def _groups(refs: Sequence[SequenceRef]) -> Indices:
    return np.array([r.group for r in refs], np.int64)
