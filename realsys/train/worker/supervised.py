"""Training on rows of ``data.demos``: demonstrations, and pairs of a chosen and a rejected response."""

from __future__ import annotations

import torch

from realsys.algorithm.loss import sft_loss
from realsys.model_calls import MfcRequest
from realsys.train.megatron.heads import Outputs
from realsys.train.megatron.train_engine import Stats
from realsys.train.worker.call_handlers import CallOutcome, Role
from realsys.train.worker.optimizer_steps import OptimizerSteps, call_argument, count_loss_tokens
from realsys.train.worker.packing import MicroBatch


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
