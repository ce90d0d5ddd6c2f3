"""Value regression: one optimizer step per minibatch."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import numpy as np
import torch

from realsys.algorithm.advantages import moments
from realsys.algorithm.value import RunningMoments, critic_loss, explained_variance
from realsys.cluster.gpu_devices import on_device
from realsys.model_calls import MfcRequest
from realsys.train.megatron.heads import Outputs
from realsys.train.megatron.train_engine import Stats
from realsys.train.step_gate import StepAbandoned
from realsys.train.worker.call_handlers import CallOutcome, Role
from realsys.train.worker.optimizer_steps import OptimizerSteps, all_reduce, call_argument, count_loss_tokens
from realsys.train.worker.packing import MicroBatch
from realsys.types import F32, SequenceRef

#: means that only the explained variance is computed from
_MOMENTS = ("return_square_mean", "error_mean", "error_square_mean")


class CriticTrain:
    """Handler of ``critic_train``: the clipped value loss towards the stored returns, in the units
    that the critic predicts.

    First the returns of the whole batch enter the running statistics, once. The old predictions
    keep the units in which they were made, so the clip is around the numbers that the model
    predicted: before the first update, value and old value are equal.
    """

    def run(self, role: Role, request: MfcRequest) -> CallOutcome:
        role.engine.use_optimizer("train", role.settings.optimizer)
        steps = OptimizerSteps(role, call_argument(request, "lr"))
        before = copy.copy(role.running_values)
        self._update_moments(role, request)
        try:
            self._take_steps(role, request, steps, before)
        except StepAbandoned:
            # The step will be trained again: its returns would enter the statistics twice.
            role.running_values = before
            raise
        return CallOutcome(self._finish_stats(role, steps))

    def _take_steps(self, role: Role, request: MfcRequest, steps: OptimizerSteps, before: RunningMoments) -> None:
        for minibatch in request.minibatches:
            denominator = float(max(1, count_loss_tokens(minibatch)))

            def loss(
                batch: MicroBatch, outputs: Outputs, denominator: float = denominator
            ) -> tuple[torch.Tensor, Stats]:
                assert outputs.values is not None
                mask = torch.ones_like(outputs.values, dtype=torch.bool)
                old, returns = batch.arrays["values"], batch.arrays["returns"]
                return critic_loss(outputs.values, old, returns, mask, denominator, role.config.train.ppo.critic)

            steps.take(minibatch, self._pack(role, minibatch, before), loss, denominator)

    def _update_moments(self, role: Role, request: MfcRequest) -> None:
        """Update the running statistics with the returns of all ranks, on every rank: any of them
        may write the checkpoint.
        """
        sums = [0.0, 0.0, 0.0]
        if role.groups.last_stage and role.groups.tensor_rank == 0:
            own = _concatenate([role.data.get(ref.sample_id, "returns") for ref in role.own_sequences(request)])
            sums = [*moments(own)]
        count, total, squares = all_reduce(sums, role.groups.whole, role)
        # A NaN would stay in the statistics for ever; the step with the NaN is skipped.
        if math.isfinite(total) and math.isfinite(squares):
            role.running_values.update(count, total, squares)

    def _pack(self, role: Role, per_rank: Sequence[Sequence[SequenceRef]], before: RunningMoments) -> list[MicroBatch]:
        """Return micro-batches with old values and returns, [a] each in the critic's units."""
        batches = role.microbatches(per_rank)
        for batch in batches if role.groups.last_stage else ():
            old = _concatenate([role.data.get(ref.sample_id, "values")[:-1] for ref in batch.refs])
            returns = _concatenate([role.data.get(ref.sample_id, "returns") for ref in batch.refs])
            for key, array in (("values", before.normalise(old)), ("returns", role.running_values.normalise(returns))):
                batch.arrays[key] = on_device(torch.from_numpy(array), role.device.device)
        return batches

    def _finish_stats(self, role: Role, steps: OptimizerSteps) -> dict[str, float]:
        """Return the statistics of the call, with values and returns in units of the reward."""
        stats = steps.finish()
        if "tokens" not in stats:
            return stats
        stats["explained_variance"] = explained_variance(stats)
        for name in ("value_mean", "return_mean"):
            stats[name] = float(role.running_values.denormalise(stats[name]))
        return {name: value for name, value in stats.items() if name not in _MOMENTS}


def _concatenate(arrays: Sequence[F32]) -> F32:
    return np.concatenate([np.zeros(0, np.float32), *arrays])
