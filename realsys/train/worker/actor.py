"""Training of the actor: policy optimisation, and the supervised warm-up. One optimizer step per minibatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from realsys.algorithm.loss import actor_loss, interpolated_prox, loss_denominator, sft_loss, should_stop
from realsys.algorithm.loss_tokens import Segments
from realsys.algorithm.losses import ConfiguredLoss, load_loss
from realsys.algorithm.minibatches import counts_in_loss
from realsys.config.schema_train import PPOConfig
from realsys.model_calls import SNAPSHOT, MfcRequest
from realsys.train.megatron.heads import Outputs
from realsys.train.megatron.train_engine import LossFunction, Stats
from realsys.train.worker.advantages import episode_advantages, skipped_samples
from realsys.train.worker.call_handlers import CallOutcome, Role
from realsys.train.worker.inference import measure_agreement, score_with_snapshot
from realsys.train.worker.optimizer_steps import OptimizerSteps, call_argument, count_loss_tokens
from realsys.train.worker.packing import MicroBatch
from realsys.types import SequenceRef

#: arrays that the loss may read; the dataflow decides which of them the call gets
_READ = ("behav_logprobs", "prox_logprobs", "advantages", "ref_logprobs")
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


# ---- supervised warm-up


class Sft:
    """Handler of ``sft``: the negative log-likelihood of the demonstrated completions, with the
    warm-up's optimizer.
    """

    def run(self, role: Role, request: MfcRequest) -> CallOutcome:
        role.engine.use_optimizer("warmup", role.config.warmup.optimizer)
        # Demonstrations are samples of the data, not of the policy: at the sampling temperature T the
        # model would learn a distribution that is flatter than theirs by 1 / T.
        steps = OptimizerSteps(role, call_argument(request, "lr"), temperature=1.0)
        for minibatch in request.minibatches:
            denominator = float(max(1, count_loss_tokens(minibatch)))

            def loss(
                batch: MicroBatch, outputs: Outputs, denominator: float = denominator
            ) -> tuple[torch.Tensor, Stats]:
                theta, entropy = outputs.logprobs, outputs.entropy
                assert theta is not None and entropy is not None
                share, stats = sft_loss(theta, torch.ones_like(theta, dtype=torch.bool), denominator)
                return share, stats | {"entropy_sum": entropy.detach().sum()}

            steps.take(minibatch, role.microbatches(minibatch), loss, denominator)
        return CallOutcome(steps.finish())
