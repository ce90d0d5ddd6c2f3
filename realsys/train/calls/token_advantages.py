"""Advantages: of whole episodes, from metadata on every rank alike; of tokens, in a call of its own.

rewards of all episodes --group level--> own outcomes --rewards of turns, KL, values--> own token advantages
                       --batch level, sums over data ranks--> stored
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from realsys.algorithm.advantages import (
    Moments,
    advantages_by_id,
    moments,
    normalise_tokens,
    outcome_rewards,
    token_advantages,
    token_rewards,
    turn_discounts,
)
from realsys.algorithm.kl import kl_estimate
from realsys.config.dataflow import TOKEN_REWARDS, dataflow_of
from realsys.config.schema import Config
from realsys.train.calls.handlers import CallOutcome
from realsys.train.calls.reductions import all_reduce
from realsys.train.calls.role import Role
from realsys.train.calls.train_steps import call_argument
from realsys.train.data_manager import Array
from realsys.types import F32, MfcRequest, SequenceRef


class Advantages:
    """Advantages of tokens, and with a critic their returns, stored for this rank's own rows.

    Group statistics come from the metadata, in which all episodes of the batch stand; batch statistics are over all
    loss tokens of all data ranks.
    """

    def run(self, role: Role, request: MfcRequest) -> CallOutcome:
        if not role.groups.last_stage:  # it has no arrays; and nothing here crosses stages
            return CallOutcome()
        ppo, own, call = role.config.train.ppo, role.own_sequences(request), role.call(request)
        outcomes = _outcomes(request, role.config)
        lengths = np.array([ref.loss_tokens for ref in own], np.int64)
        truncated = np.array([ref.row_truncated and ref.last for ref in own], bool)
        kl = self._divergence(role, own) if "ref_logprobs" in call.inputs else None
        kl_coef = call_argument(request, "kl_coef") if kl is not None else 0.0
        rewards = token_rewards([outcomes[ref.sample_id] for ref in own], lengths, kl, kl_coef)
        discounts = None
        if TOKEN_REWARDS in call.inputs:
            rewards += ppo.reward_scale * _stored(role, own, TOKEN_REWARDS)
            masks = (role.data.get(ref.sample_id, "loss_mask") for ref in own)
            parts = [turn_discounts(mask, ppo.gamma, ppo.turn_gamma) for mask in masks]
            discounts = np.concatenate([np.zeros(0), *parts])
        values = _stored(role, own, "values") if "values" in call.inputs else None
        advantages, returns = token_advantages(rewards, lengths, truncated, ppo, values, discounts)
        # A NaN stays with its own row, whose minibatch is skipped, and does not reach the others through the means.
        sums = [
            *moments(advantages[np.isfinite(advantages)]),
            float(len(returns)),
            float(returns.sum(dtype=np.float64)),
        ]
        sums.append(float(kl.sum(dtype=np.float64)) if kl is not None else 0.0)
        count, total, squares, tokens, return_sum, kl_sum = all_reduce(sums, role.groups.data, role)
        batch = Moments(count, total, squares)
        normalised = normalise_tokens(advantages, batch, ppo.advantage)
        ends = np.cumsum(lengths)
        for ref, end in zip(own, ends, strict=True):
            arrays = {"advantages": normalised[end - ref.loss_tokens : end].copy()}
            if "returns" in call.outputs:
                arrays["returns"] = returns[end - ref.loss_tokens : end].copy()
            role.data.put(ref.sample_id, arrays)
        stats = {"tokens": tokens, "advantage_mean": batch.mean, "advantage_std": batch.std}
        stats["return_mean"] = return_sum / max(1.0, tokens)
        if kl is not None:
            stats["kl_ref_mean"] = kl_sum / max(1.0, tokens)
        return CallOutcome(stats)

    def _divergence(self, role: Role, own: Sequence[SequenceRef]) -> F32:
        """KL(policy || reference) of each token, a part of its reward; of the policy before the step's updates."""
        ppo = role.config.train.ppo
        policy = _stored(role, own, "prox_logprobs" if ppo.use_decoupled_loss else "behav_logprobs")
        reference = _stored(role, own, "ref_logprobs")
        found: F32 = kl_estimate(torch.from_numpy(policy), torch.from_numpy(reference), ppo.kl.estimator).numpy()
        return found


def episode_advantages(request: MfcRequest, config: Config) -> dict[str, float]:
    """Sample id -> advantage, over the whole batch; the same on every rank without a message."""
    refs = [ref for minibatch in request.minibatches for part in minibatch for ref in part]
    return advantages_by_id(refs, config.train.ppo, config.generation.sampling.max_new_tokens)


def left_out(request: MfcRequest, config: Config) -> set[str]:
    """Samples of the batch that no forward pass is spent on (``skip_zero_advantage``); the same on every rank.

    None if an episode without advantage still has a loss: an entropy bonus, or a KL to the reference.
    """
    ppo = config.train.ppo
    by_token = any("advantages" in call.outputs for call in dataflow_of(config).calls)
    if not ppo.skip_zero_advantage or ppo.entropy_coef > 0 or ppo.kl.coef > 0 or by_token:
        return set()
    return {sample_id for sample_id, advantage in episode_advantages(request, config).items() if advantage == 0.0}


def _outcomes(request: MfcRequest, config: Config) -> dict[str, float]:
    """Sample id -> the outcome that the row earns on its last loss token, over the whole batch."""
    refs = _in_order(request)
    found = outcome_rewards(refs, config.train.ppo, config.generation.sampling.max_new_tokens)
    return dict(zip((ref.sample_id for ref in refs), found.tolist(), strict=True))


def _in_order(request: MfcRequest) -> list[SequenceRef]:
    """All sequences in one order of summation, whatever the layout."""
    refs = (ref for minibatch in request.minibatches for part in minibatch for ref in part)
    return sorted(refs, key=lambda ref: ref.sample_id)


def _stored(role: Role, refs: Sequence[SequenceRef], key: str) -> Array:
    """The arrays ``key`` of these sequences, one after the other."""
    return np.concatenate([np.zeros(0, np.float32), *(role.data.get(ref.sample_id, key) for ref in refs)])
