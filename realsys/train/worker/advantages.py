"""Advantages of whole episodes, computed on every rank from metadata, and of tokens, computed by a
call.

rewards of all episodes ──group level──> own outcomes ──rewards of turns, KL, values──> own token advantages
                        ──batch level, sums over data ranks──> stored
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
from realsys.algorithm.minibatches import rows_left_out
from realsys.config.dataflow import TOKEN_REWARDS, advantages_by_token
from realsys.config.schema import Config
from realsys.model_calls import MfcRequest
from realsys.train.worker.call_handlers import CallOutcome, Role
from realsys.train.worker.data_manager import Array
from realsys.train.worker.optimizer_steps import all_reduce, call_argument
from realsys.types import F32, SequenceRef


class Advantages:
    """Handler of ``advantages``: advantages of tokens, and with a critic their returns, stored for
    this rank's own rows.

    Group statistics are computed from the metadata of all episodes of the batch; batch statistics
    are over all loss tokens of all data ranks.
    """

    def run(self, role: Role, request: MfcRequest) -> CallOutcome:
        # earlier stages hold no arrays, and no collective here crosses stages
        if not role.groups.last_stage:
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
            turn_gamma = 1.0 if ppo.turn_gamma is None else ppo.turn_gamma  # a dataflow of the user may read them, too
            rewards += ppo.reward_scale * _stored(role, own, TOKEN_REWARDS)
            masks = (role.data.get(ref.sample_id, "loss_mask") for ref in own)
            parts = [turn_discounts(mask, ppo.gamma, turn_gamma) for mask in masks]
            discounts = np.concatenate([np.zeros(0), *parts])
        values = _stored(role, own, "values") if "values" in call.inputs else None
        advantages, returns = token_advantages(rewards, lengths, truncated, ppo, values, discounts)
        # A NaN stays in its own row, whose minibatch is skipped. In the means it would reach all
        # other rows.
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
        """Return KL(policy || reference) of each token, a part of its reward, for the policy before
        the step's updates.
        """
        ppo = role.config.train.ppo
        policy = _stored(role, own, "prox_logprobs" if ppo.use_decoupled_loss is True else "behav_logprobs")
        reference = _stored(role, own, "ref_logprobs")
        divergence: F32 = kl_estimate(torch.from_numpy(policy), torch.from_numpy(reference), ppo.kl.estimator).numpy()
        return divergence


def episode_advantages(request: MfcRequest, config: Config) -> dict[str, float]:
    """Return sample id -> advantage for the whole batch; the same on every rank without
    communication.
    """
    return advantages_by_id(_in_order(request), config.train.ppo, config.generation.sampling.max_new_tokens)


def skipped_samples(request: MfcRequest, config: Config) -> set[str]:
    """Return the samples of the batch that the actor does not compute; the same on every rank."""
    max_new_tokens = config.generation.sampling.max_new_tokens
    return rows_left_out(_in_order(request), config.train.ppo, max_new_tokens, by_token=advantages_by_token(config))


def _outcomes(request: MfcRequest, config: Config) -> dict[str, float]:
    """Return sample id -> the reward of the row's last loss token, for the whole batch."""
    refs = _in_order(request)
    outcomes = outcome_rewards(refs, config.train.ppo, config.generation.sampling.max_new_tokens)
    return dict(zip((ref.sample_id for ref in refs), outcomes.tolist(), strict=True))


def _in_order(request: MfcRequest) -> list[SequenceRef]:
    """Return all sequences in one order.

    Sums in another order differ in their last bits, so layouts would diverge.
    """
    refs = (ref for minibatch in request.minibatches for part in minibatch for ref in part)
    return sorted(refs, key=lambda ref: ref.sample_id)


def _stored(role: Role, refs: Sequence[SequenceRef], key: str) -> Array:
    """Return the arrays ``key`` of these sequences, concatenated."""
    return np.concatenate([np.zeros(0, np.float32), *(role.data.get(ref.sample_id, key) for ref in refs)])
