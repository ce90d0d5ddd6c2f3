"""From rewards to advantages. Pure numpy functions.

    reward --shape_rewards--> shaped reward --normalise--> advantage of the answer          (no critic)
    token rewards, values --gae--> token advantages --normalise--> normalised               (critic)

The paper's batch normalisation, GRPO, Dr.GRPO and RLOO are settings of one normaliser (docs/algorithms.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from realsys.config.schema import NormalisationConfig, PPOConfig
from realsys.errors import ConfigError
from realsys.types import F32, SequenceRef

F64 = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]


def outcome_advantages(refs: Sequence[SequenceRef], cfg: PPOConfig) -> F32:
    """Advantage of each answer of a batch, float32 ``[len(refs)]``; every token of an answer has the answer's.

    With gamma = lambda = 1 and no critic, as in the paper, the return of each token is the reward of its answer.
    Batch mean and std are over answer tokens, so an answer counts as often as it has tokens; group mean and std are
    over the answers to one prompt. The batch must be the whole train step's: a part has other means.

    Raises ConfigError when gamma * lam is not 1: discounting needs one advantage per token (``gae``).
    """
    if cfg.gamma != 1.0 or cfg.lam != 1.0:
        field, value = ("gamma", cfg.gamma) if cfg.gamma != 1.0 else ("lam", cfg.lam)
        raise ConfigError(f"train.ppo.{field}", value, "must be 1: without a critic a whole answer has one advantage")
    shaped = shape_rewards(
        np.array([r.reward for r in refs], np.float64), np.array([r.truncated for r in refs], bool), cfg
    )
    groups = np.array([r.group for r in refs], np.int64)
    tokens = np.array([r.answer_len for r in refs], np.float64)
    return normalise(shaped, groups, tokens, cfg.advantage).astype(np.float32)


def shape_rewards(rewards: npt.ArrayLike, truncated: npt.ArrayLike, cfg: PPOConfig) -> F64:
    """``clip(reward * scale + bias, -clip, clip)``; with ``mask_no_eos_with_zero`` truncated answers then get 0.

    rewards [n], truncated bool [n] -> float64 [n]
    """
    shaped = np.asarray(rewards, np.float64) * cfg.reward_scale + cfg.reward_bias
    shaped = np.clip(shaped, -cfg.reward_clip, cfg.reward_clip)
    if cfg.mask_no_eos_with_zero:
        shaped = np.where(np.asarray(truncated, bool), 0.0, shaped)
    return shaped


def normalise(values: npt.ArrayLike, groups: npt.ArrayLike, weights: npt.ArrayLike, cfg: NormalisationConfig) -> F64:
    """``(values - mean) / (std + eps)``, mean and std each over nothing, the group or the batch.

    values  [n]  shaped rewards of answers, or advantages of tokens
    groups  int [n]  which prompt each belongs to
    weights [n]  how often each counts in batch mean and std (answer tokens); in a group all count the same

    The std is the population's, about the plain mean of the same level, of ``values`` as they come in. With
    ``leave_one_out`` the mean leaves the value itself out. Where all values of a level are equal, the result is
    exactly 0, not rounding noise divided by eps; so is a value that is alone in its level.
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
    if cfg.std != "none":
        centred = centred / (_level_std(x, *levels[cfg.std]) + cfg.eps)
    return centred


def gae(
    rewards: npt.ArrayLike,
    values: npt.ArrayLike,
    lengths: npt.ArrayLike,
    bootstrap: npt.ArrayLike,
    gamma: float,
    lam: float,
) -> tuple[F32, F32]:
    """Generalised advantage estimation over packed sequences (Schulman et al., arXiv 1506.02438).

        delta_k = r_k + gamma * V_{k+1} - V_k        A_k = delta_k + gamma * lam * A_{k+1}

    rewards, values [t]  packed: the tokens of sequence 0, then of sequence 1, ...
    lengths   int [n]  answer tokens of each sequence, sum t
    bootstrap [n]  V behind the last token: the critic's value where the answer was truncated, 0 where it ended (EOS)

    Returns advantages and value targets (A + V), float32 [t]. Raises ValueError when the sizes do not agree.
    """
    r, v = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    n_tokens, tail = np.asarray(lengths, np.int64), np.asarray(bootstrap, np.float64)
    if not (len(r) == len(v) == n_tokens.sum()) or len(tail) != len(n_tokens) or (n_tokens < 0).any():
        raise ValueError(f"gae: {len(r)} rewards, {len(v)} values, {len(tail)} bootstraps for lengths {n_tokens}")
    advantages = np.empty_like(r)
    # Longest first: at k tokens before the end the sequences still running are a prefix, so a step of the scan
    # touches exactly one token of each, and nothing is padded.
    order = np.argsort(-n_tokens, kind="stable")
    last = (np.cumsum(n_tokens) - 1)[order]
    running = np.searchsorted(-n_tokens[order], -np.arange(n_tokens.max(initial=0)), side="left")
    next_value, next_advantage = tail[order], np.zeros(len(order))
    for k, m in enumerate(running):
        at = last[:m] - k
        delta = r[at] + gamma * next_value[:m] - v[at]
        next_advantage = delta + gamma * lam * next_advantage[:m]
        next_value = v[at]
        advantages[at] = next_advantage
    return advantages.astype(np.float32), (advantages + v).astype(np.float32)


def _level_mean(x: F64, members: Indices, weights: F64, *, leave_one_out: bool) -> F64:
    """For each value the weighted mean of its level, exact where the level is constant. [n] -> [n]"""
    total, weight = _totals(x * weights, members), _totals(weights, members)
    if leave_one_out:
        total, weight = total - x * weights, weight - weights
    mean = np.divide(total, weight, out=x.copy(), where=weight > 0)
    return np.where(_constant(x, members), x, mean)


def _level_std(x: F64, members: Indices, weights: F64) -> F64:
    """For each value the weighted population std of its level. [n] -> [n]"""
    deviation = x - _level_mean(x, members, weights, leave_one_out=False)
    variance = _totals(weights * deviation**2, members)
    return np.sqrt(np.divide(variance, _totals(weights, members), out=np.zeros_like(x), where=variance > 0))


def _totals(x: F64, members: Indices) -> F64:
    """For each value the sum over its level."""
    return np.asarray(np.bincount(members, weights=x)[members], np.float64)


def _constant(x: F64, members: Indices) -> npt.NDArray[np.bool_]:
    """For each value whether its level holds no other value."""
    low, high = np.full(members.max() + 1, np.inf), np.full(members.max() + 1, -np.inf)
    np.minimum.at(low, members, x)
    np.maximum.at(high, members, x)
    return np.asarray((low == high)[members])
