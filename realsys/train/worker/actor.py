"""Training of the actor by policy optimisation, one optimizer step per minibatch, and the calls that infer."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import msgspec
import numpy as np
import torch

from realsys.algorithm.loss import actor_loss, interpolated_prox, loss_denominator, should_stop
from realsys.algorithm.loss_tokens import Segments
from realsys.algorithm.losses import ConfiguredLoss, load_loss
from realsys.algorithm.minibatches import counts_in_loss
from realsys.config.dataflow import KV_VERSIONS, TEACHER_LOGPROBS, TEACHER_TOKENS
from realsys.config.schema_train import PPOConfig
from realsys.model_calls import SNAPSHOT, MfcRequest, SnapshotPlan
from realsys.train.megatron.heads import Outputs
from realsys.train.megatron.train_engine import LossFunction, Stats
from realsys.train.worker.advantages import episode_advantages, skipped_samples
from realsys.train.worker.call_handlers import CallOutcome, Role, sequences_per_rank
from realsys.train.worker.data_manager import Array
from realsys.train.worker.optimizer_steps import (
    OptimizerSteps,
    all_reduce,
    call_argument,
    reduce_stats,
    token_means,
)
from realsys.train.worker.packing import MicroBatch, split_rows
from realsys.types import SequenceRef

#: arrays that the loss may read; the dataflow decides which of them the call gets
_READ = ("behav_logprobs", "prox_logprobs", "advantages", "ref_logprobs", TEACHER_TOKENS, TEACHER_LOGPROBS)
#: (micro-batch, log-probs theta of its loss tokens [t]) -> proximal log-probs [t], no gradient
Proximal = Callable[[MicroBatch, torch.Tensor], torch.Tensor]


class ActorTrain:
    """Handler of ``actor_train``: the policy loss of the configuration, one optimizer step per
    minibatch.

    If the call reads ``advantages``, they are stored arrays with one value per token. Otherwise
    each episode has one advantage, computed from the metadata of the whole batch.
    """

    def run(self, role: Role, request: MfcRequest) -> CallOutcome:
        config, ppo = role.config, role.config.train.ppo
        # Without the inference pass of the decoupled loss, this is where engine and trainer are compared.
        compared = score_with_snapshot(role, request) if SNAPSHOT in request.args else None
        role.engine.use_optimizer("train", role.settings.optimizer)
        policy_loss = load_loss(ppo)
        steps = OptimizerSteps(role, call_argument(request, "lr"))
        inputs = role.call(request).inputs
        keys = [key for key in _READ if key in inputs]
        proximal = _proximal(ppo, request.version, stored="prox_logprobs" in inputs)
        keys += ["versions"] if ppo.use_decoupled_loss == "interpolated" else []
        of_episodes = episode_advantages(request, config) if "advantages" not in inputs else None
        kl_coef = call_argument(request, "kl_coef") if "ref_logprobs" in inputs else 0.0
        skipped = skipped_samples(request, config)
        may_stop = ppo.early_stop_ratio > 0 or ppo.early_stop_kl > 0
        stop = partial(should_stop, cfg=ppo) if may_stop else None
        for minibatch in request.minibatches:
            refs = [ref for part in minibatch for ref in part]
            # The denominator counts the skipped samples too: their loss is 0, and skipping them
            # must not change the mean.
            denominator = loss_denominator(refs, ppo, config.generation.sampling.max_new_tokens)
            computed = [
                [r for r in part if counts_in_loss(r, ppo) and r.sample_id not in skipped] for part in minibatch
            ]
            batches = role.microbatches(computed, keys)
            loss = self._loss(role, policy_loss, of_episodes, denominator, kl_coef, proximal)
            steps.take(minibatch, batches, loss, denominator, stop)
            if steps.stopped:
                break
        stats = {**steps.finish(), "early_stopped": float(steps.stopped)}
        if compared is not None and role.groups.last_stage:
            stats |= measure_agreement(compared, role)
        return CallOutcome(stats)

    def _loss(
        self,
        role: Role,
        policy_loss: ConfiguredLoss,
        of_episodes: Mapping[str, float] | None,
        denominator: float,
        kl_coef: float,
        proximal: Proximal,
    ) -> LossFunction:
        ppo = role.config.train.ppo

        def loss(batch: MicroBatch, outputs: Outputs) -> tuple[torch.Tensor, Stats]:
            theta = outputs.logprobs
            assert theta is not None
            behav = batch.arrays["behav_logprobs"]
            if of_episodes is None:
                advantages = batch.arrays["advantages"]
            else:
                advantages = role.packer.per_loss_token(batch, [of_episodes[ref.sample_id] for ref in batch.refs])
            return actor_loss(
                theta,
                proximal(batch, theta),
                behav,
                advantages,
                torch.ones_like(theta, dtype=torch.bool),
                denominator,
                ppo,
                loss=policy_loss,
                segments=segments_of(batch.refs),
                entropy=outputs.entropy,
                ref=batch.arrays.get("ref_logprobs"),
                kl_coef=kl_coef,
                top=None if outputs.top is None else (outputs.top, batch.arrays[TEACHER_LOGPROBS]),
            )

        return loss


def _proximal(ppo: PPOConfig, version: int, *, stored: bool) -> Proximal:
    """Return how the loss gets the proximal log-probs of a micro-batch.

    version    version of the weights before the step
    stored     a call of the dataflow computed them
    """
    if stored:
        return lambda batch, theta: batch.arrays["prox_logprobs"]
    if ppo.use_decoupled_loss == "interpolated":
        return lambda batch, theta: interpolated_prox(
            theta, batch.arrays["behav_logprobs"], batch.arrays["versions"], version
        )
    if ppo.use_decoupled_loss and ppo.minibatches == 1:
        return lambda batch, theta: theta.detach()  # the pass of the only update has the weights before it
    return lambda batch, theta: batch.arrays["behav_logprobs"]


def segments_of(refs: Sequence[SequenceRef]) -> Segments:
    """Return the rows of a micro-batch and the episodes that they belong to."""
    lengths = torch.tensor([ref.loss_tokens for ref in refs], dtype=torch.int64)
    episodes = [ref.episode for ref in refs]
    # Without this shortcut every micro-batch of single-turn samples would sort its episodes for
    # nothing.
    several = len(set(episodes)) < len(episodes)
    return Segments(
        lengths,
        torch.tensor(episodes, dtype=torch.int64) if several else None,
        torch.tensor([ref.episode_tokens for ref in refs], dtype=torch.float64),
    )


# ---- forward passes: log-probs of actor and reference, values of the critic, scores of a reward model
#
#     actor_inf    tokens  -> prox_logprobs
#     ref_inf      tokens  -> ref_logprobs; teacher_tokens and teacher_logprobs, if a loss reads them
#     critic_inf   tokens  -> values
#     reward_inf   tokens  -> scores, in the reply
#
# The ranks of the last pipeline stage store the arrays, each for the sequences of its data rank.


class ActorInference:
    """Handler of ``actor_inf``: log-probs of the loss tokens under the weights before the step's
    first update.

    Its statistics compare them with the recorded log-probs. Over all tokens the difference contains
    staleness; over the tokens that are scored with the weights that sampled them (``agreement/...``)
    only numerics differ.
    """

    def run(self, role: Role, request: MfcRequest) -> CallOutcome:
        skipped = skipped_samples(request, role.config)
        per_rank = [[ref for ref in refs if ref.sample_id not in skipped] for refs in sequences_per_rank(request)]
        computed = store_logprobs(role, per_rank, "prox_logprobs")
        older = score_with_snapshot(role, request)
        if not role.groups.last_stage:
            return CallOutcome()
        for ref in role.own_sequences(request):
            # No loss reads them, but the master may plan transfers of this array for every
            # sequence.
            if ref.sample_id in skipped:
                role.data.put(ref.sample_id, {"prox_logprobs": np.zeros(ref.loss_tokens, np.float32)})
        constrained = {ref.sample_id for refs in per_rank for ref in refs if ref.constrained}
        differences, current = compare_logprobs(role, request.version, computed, constrained)
        absolute = differences.abs()
        stats = {
            "tokens": torch.tensor(float(len(absolute))),
            "logprob_difference_sum": absolute.sum(),
            "logprob_difference_max": absolute.amax() if len(absolute) else torch.zeros(()),
        }
        return CallOutcome(token_means(stats, role) | measure_agreement(torch.cat([differences[current], older]), role))


def compare_logprobs(
    role: Role, version: int, computed: Mapping[str, Array], constrained: Collection[str] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return computed minus recorded log-probs, float32 [tokens], and which tokens ``version``
    sampled, on keys of its own and without a grammar, bool [tokens].

    A recorded -inf has no difference and is left out, as in the loss. ``constrained``: samples with a grammar.
    """
    differences, current = [np.zeros(0, np.float32)], [np.zeros(0, np.bool_)]
    for sample_id, logprobs in computed.items():
        if role.data.has(sample_id, "behav_logprobs"):
            recorded = role.data.get(sample_id, "behav_logprobs")
            sampled = np.zeros(len(logprobs), bool)
            if role.data.has(sample_id, "versions") and sample_id not in constrained:
                sampled = role.data.get(sample_id, "versions") == version
            if role.data.has(sample_id, KV_VERSIONS):
                # Keys of other weights are in the engine's number and not in the trainer's: no numerical error.
                sampled = sampled & (role.data.get(sample_id, KV_VERSIONS) == version)
            possible = ~np.isneginf(recorded)
            differences.append((logprobs - recorded)[possible])
            current.append(sampled[possible])
    return torch.from_numpy(np.concatenate(differences)), torch.from_numpy(np.concatenate(current))


def score_with_snapshot(role: Role, request: MfcRequest) -> torch.Tensor:
    """Score samples with the version that sampled some of their tokens, and take the next snapshot, if
    the master asks for it (``SnapshotPlan``).

    Returns computed minus recorded log-probs of the tokens of that version, float32 [tokens]; empty
    before the last stage and on other data ranks than 0, which have no snapshot.
    """
    asked = request.args.get(SNAPSHOT)
    none = torch.zeros(0)
    if asked is None or role.groups.data_rank:
        return none
    plan, older, snapshot = msgspec.convert(asked, SnapshotPlan), none, role.engine.snapshot
    is_own = plan.version == request.version
    # After a restart the master may know of a snapshot that is gone: then nothing is compared.
    if plan.samples and (is_own or (snapshot is not None and snapshot.version == plan.version)):
        refs = {ref.sample_id: ref for ref in role.own_sequences(request)}
        with nullcontext() if is_own or snapshot is None else role.engine.weights_of(snapshot):
            computed = compute_logprobs(role, [[refs[sample_id] for sample_id in plan.samples]])
        differences, current = compare_logprobs(role, plan.version, computed)
        older = differences[current]
    if plan.take:
        role.engine.take_snapshot(request.version)
    return older


def measure_agreement(differences: torch.Tensor, role: Role) -> dict[str, float]:
    """Return how trainer and generation engine agree on tokens that were scored with the weights that
    sampled them, over all data ranks.

    ``differences``: trainer minus engine, float32 [tokens], natural logarithms. A completion whose
    weights changed while it was sampled also has such tokens. They compare exactly, because the
    engine recomputed the prefix with the new weights: both numbers are log p(token | all tokens
    before it) under the same weights. Tokens on kept keys are not among them. Without such tokens
    there are no means, only ``agreement/tokens`` 0.
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
    """Handler of ``ref_inf``: log-probs of the loss tokens under a frozen model, at the sampling
    temperature; at 1 in a supervised run. If a loss reads a teacher's top k, the model is the teacher.
    """

    def run(self, role: Role, request: MfcRequest) -> CallOutcome:
        per_rank = sequences_per_rank(request)
        computed = _store_top(role, per_rank) if role.data.top_k else store_logprobs(role, per_rank, "ref_logprobs")
        flat = torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *computed.values()]))
        stats = {"tokens": torch.tensor(float(len(flat))), "ref_logprob_sum": flat.sum()}
        return CallOutcome(token_means(stats, role))


def store_logprobs(role: Role, per_rank: Sequence[Sequence[SequenceRef]], key: str) -> dict[str, Array]:
    """Compute the log-probs of the loss tokens under the role's model; store them as ``key`` and
    return them by sample id.

    Returns {} before the last stage.
    """
    computed = compute_logprobs(role, per_rank)
    for sample_id, values in computed.items():
        role.data.put(sample_id, {key: values})
    return computed


def _store_top(role: Role, per_rank: Sequence[Sequence[SequenceRef]]) -> dict[str, Array]:
    """Store the log-probs of the loss tokens, and the most probable tokens at each with theirs; return the first."""
    batches = role.microbatches(per_rank, gradients=False)
    found = role.engine.top_logprobs(batches, role.data.top_k)
    computed: dict[str, Array] = {}
    for batch, (tokens, logprobs) in zip(batches, found, strict=role.groups.last_stage):
        own = split_rows(batch, logprobs)
        for sample_id, top in split_rows(batch, tokens).items():
            computed[sample_id] = own[sample_id][:, 0]
            arrays = {TEACHER_TOKENS: top.ravel(), TEACHER_LOGPROBS: own[sample_id][:, 1:].ravel()}
            role.data.put(sample_id, {"ref_logprobs": computed[sample_id], **arrays})
    return computed


def compute_logprobs(role: Role, per_rank: Sequence[Sequence[SequenceRef]]) -> dict[str, Array]:
    """Return the log-probs of this data rank's loss tokens by sample id; {} before the last stage."""
    batches = role.microbatches(per_rank, gradients=False)
    computed: dict[str, Array] = {}
    for batch, logprobs in zip(batches, role.engine.logprobs(batches), strict=role.groups.last_stage):
        computed |= split_rows(batch, logprobs)
    return computed


class CriticInference:
    """Handler of ``critic_inf``: values of the state before each loss token and after the last one,
    per row.

    They are stored in units of the reward. With value normalisation the model predicts in units of
    the running statistics.
    """

    def run(self, role: Role, request: MfcRequest) -> CallOutcome:
        batches = role.microbatches(sequences_per_rank(request), gradients=False)
        flat = [torch.zeros(0)]
        for batch, predicted in zip(batches, role.engine.values(batches), strict=role.groups.last_stage):
            for sample_id, prediction in split_rows(batch, predicted, end=True).items():
                values = role.running_values.denormalise(prediction)
                role.data.put(sample_id, {"values": values})
                flat.append(torch.from_numpy(values[:-1]))
        all_values = torch.cat(flat)
        stats = {"tokens": torch.tensor(float(len(all_values))), "value_sum": all_values.sum()}
        return CallOutcome(token_means(stats, role))


class RewardInference:
    """Handler of ``reward_inf``: the value head's output at the last token of each row.

    The last row scores its episode.
    """

    def run(self, role: Role, request: MfcRequest) -> CallOutcome:
        batches = role.microbatches(sequences_per_rank(request), gradients=False)
        scores: dict[str, float] = {}
        for batch, batch_scores in zip(batches, role.engine.scores(batches), strict=role.groups.last_stage):
            scores |= dict(zip((ref.sample_id for ref in batch.refs), batch_scores.tolist(), strict=True))
        if not role.groups.last_stage:
            return CallOutcome()
        own = torch.tensor([*scores.values()], dtype=torch.float64)
        count, total, squares = all_reduce(
            [float(len(own)), own.sum().item(), own.square().sum().item()], role.groups.data, role
        )
        mean = total / max(1.0, count)
        deviation = math.sqrt(max(0.0, squares / max(1.0, count) - mean**2))
        return CallOutcome({"score_mean": mean, "score_std": deviation}, scores)
