"""Forward passes: log-probs of actor and reference, values of the critic, scores of a reward model.

    actor_inf    tokens  -> prox_logprobs
    ref_inf      tokens  -> ref_logprobs
    critic_inf   tokens  -> values
    reward_inf   tokens  -> scores, in the reply

Arrays are stored on the ranks of the last pipeline stage, each for the sequences of its data rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from realsys.train.calls.handlers import CallOutcome
from realsys.train.calls.reductions import all_reduce, reduce_stats, token_means
from realsys.train.calls.role import Role, sequences_per_rank
from realsys.train.calls.token_advantages import left_out
from realsys.train.data_manager import Array
from realsys.train.packing import split_rows
from realsys.types import MfcRequest, SequenceRef


class ActorInference:
    """Proximal log-probs: of the answer tokens under the weights before the step's first update.

    Its statistics compare them with the recorded ones: over all tokens, where off-policyness comes on top, and over
    those that were sampled with these very weights (``agreement/...``), where only numerics differ.
    """

    def run(self, role: Role, request: MfcRequest) -> CallOutcome:
        skipped = left_out(request, role.config)
        per_rank = [[ref for ref in refs if ref.sample_id not in skipped] for refs in sequences_per_rank(request)]
        found = store_logprobs(role, per_rank, "prox_logprobs")
        if not role.groups.last_stage:
            return CallOutcome()
        for ref in role.own_sequences(request):
            # Nobody will look at them, but the master may plan with every sequence having its array.
            if ref.sample_id in skipped:
                role.data.put(ref.sample_id, {"prox_logprobs": np.zeros(ref.loss_tokens, np.float32)})
        differences, current = self._compare(role, request.version, found)
        absolute = differences.abs()
        stats = {
            "tokens": torch.tensor(float(len(absolute))),
            "logprob_difference_sum": absolute.sum(),
            "logprob_difference_max": absolute.amax() if len(absolute) else torch.zeros(()),
        }
        return CallOutcome(token_means(stats, role) | agreement(differences[current], role))

    @staticmethod
    def _compare(role: Role, version: int, found: Mapping[str, Array]) -> tuple[torch.Tensor, torch.Tensor]:
        """Proximal minus recorded log-probs, float32 [tokens], and which tokens ``version`` sampled, bool [tokens]."""
        differences, current = [np.zeros(0, np.float32)], [np.zeros(0, np.bool_)]
        for sample_id, proximal in found.items():
            if role.data.has(sample_id, "behav_logprobs"):
                differences.append(proximal - role.data.get(sample_id, "behav_logprobs"))
                known = role.data.has(sample_id, "versions")
                current.append(
                    role.data.get(sample_id, "versions") == version if known else np.zeros(len(proximal), np.bool_)
                )
        return torch.from_numpy(np.concatenate(differences)), torch.from_numpy(np.concatenate(current))


def agreement(differences: torch.Tensor, role: Role) -> dict[str, float]:
    """How trainer and generation engine agree on tokens that the weights of this step sampled, over the data ranks.

    ``differences``: trainer minus engine, float32 [tokens], natural logarithms. An answer whose weights changed on the
    way has such tokens, too, and they compare exactly: the engine recomputed everything before them with the new
    weights, so either side's number is log p(token | all tokens before it) under the same weights. Without any
    token there are no means, only ``agreement/tokens`` 0.
    """
    stats = {
        "tokens": torch.tensor(float(len(differences))),
        "signed_sum": differences.double().sum(),
        "absolute_sum": differences.double().abs().sum(),
        "absolute_max": differences.abs().amax() if len(differences) else torch.zeros(()),
    }
    total = reduce_stats(stats, role)
    if not total["tokens"]:
        return {"agreement/tokens": 0.0}
    return {
        "agreement/tokens": total["tokens"],
        "agreement/difference_mean": total["absolute_sum"] / total["tokens"],
        "agreement/difference_max": total["absolute_max"],
        "agreement/ratio": math.exp(total["signed_sum"] / total["tokens"]),
    }


class ReferenceInference:
    """Log-probs of the answer tokens under a frozen model, at the sampling temperature as the actor's."""

    def run(self, role: Role, request: MfcRequest) -> CallOutcome:
        found = store_logprobs(role, sequences_per_rank(request), "ref_logprobs")
        flat = torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *found.values()]))
        stats = {"tokens": torch.tensor(float(len(flat))), "ref_logprob_sum": flat.sum()}
        return CallOutcome(token_means(stats, role))


def store_logprobs(role: Role, per_rank: Sequence[Sequence[SequenceRef]], key: str) -> dict[str, Array]:
    """Log-probs of the answers under the role's model, stored as ``key``; {} before the last stage."""
    batches = role.microbatches(per_rank)
    found: dict[str, Array] = {}
    for batch, logprobs in zip(batches, role.engine.logprobs(batches), strict=role.groups.last_stage):
        found |= split_rows(batch, logprobs)
    for sample_id, values in found.items():
        role.data.put(sample_id, {key: values})
    return found


class CriticInference:
    """Values of the state before each loss token and after the last of each row, in units of the rewards.

    With value normalisation the model predicts in units of the running statistics; what is stored is not normalised.
    """

    def run(self, role: Role, request: MfcRequest) -> CallOutcome:
        batches = role.microbatches(sequences_per_rank(request))
        flat = [torch.zeros(0)]
        for batch, predicted in zip(batches, role.engine.values(batches), strict=role.groups.last_stage):
            for sample_id, prediction in split_rows(batch, predicted, end=True).items():
                values = role.running_values.denormalise(prediction)
                role.data.put(sample_id, {"values": values})
                flat.append(torch.from_numpy(values[:-1]))
        found = torch.cat(flat)
        stats = {"tokens": torch.tensor(float(len(found))), "value_sum": found.sum()}
        return CallOutcome(token_means(stats, role))


class RewardInference:
    """The score of each row: the output of the value head at its last token. That of the last row is the episode's."""

    def run(self, role: Role, request: MfcRequest) -> CallOutcome:
        batches = role.microbatches(sequences_per_rank(request))
        scores: dict[str, float] = {}
        for batch, found in zip(batches, role.engine.scores(batches), strict=role.groups.last_stage):
            scores |= dict(zip((ref.sample_id for ref in batch.refs), found.tolist(), strict=True))
        if not role.groups.last_stage:
            return CallOutcome()
        own = torch.tensor([*scores.values()], dtype=torch.float64)
        count, total, squares = all_reduce(
            [float(len(own)), own.sum().item(), own.square().sum().item()], role.groups.data, role
        )
        mean = total / max(1.0, count)
        deviation = math.sqrt(max(0.0, squares / max(1.0, count) - mean**2))
        return CallOutcome({"score_mean": mean, "score_std": deviation}, scores)
