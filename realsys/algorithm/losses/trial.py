"""Trial of a user's loss on two small batches, so that the launcher refuses a broken loss before the run."""

from __future__ import annotations

import torch
from torch import Tensor

from realsys.algorithm.loss import actor_loss
from realsys.algorithm.losses import load_loss
from realsys.algorithm.losses.base import ConfiguredLoss
from realsys.algorithm.segments import Segments
from realsys.config.doors import LOSS
from realsys.config.sections.schema_train import PPOConfig
from realsys.errors import ConfigError


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
            result = _loss_and_gradient(loss, cfg, tokens)
        if not all(tensor.isfinite().all() for tensor in result):
            problem = f"loss or gradient is not finite on {where}: check its divisions and logs"
            raise ConfigError(LOSS.field, cfg.loss, problem)


def _loss_and_gradient(loss: ConfiguredLoss, cfg: PPOConfig, tokens: int) -> tuple[Tensor, Tensor]:
    """Compute the loss of the first ``tokens`` of three rows in two episodes."""
    theta = torch.tensor([-1.0, -2.0, -0.5, -1.5, -0.7, -3.0])[:tokens].requires_grad_()
    prox = torch.tensor([-1.2, -1.5, -0.5, -1.7, -0.9, -2.0])[:tokens]
    behav = torch.tensor([-1.1, -1.6, -0.6, -1.6, -0.8, -2.1])[:tokens]
    advantages = torch.tensor([1.0, 1.0, -0.5, -0.5, 0.0, 2.0])[:tokens]
    mask = torch.tensor([True, True, True, False, True, True])[:tokens]
    rows = 3 if tokens else 0
    segments = Segments(torch.tensor([2, 3, 1])[:rows], torch.tensor([0, 1, 1])[:rows])
    columns = (theta, prox, behav, advantages)
    total, _ = actor_loss(*columns, mask, 5.0, cfg, loss=loss, segments=segments)
    if not total.requires_grad:
        raise ValueError("the result has no gradient: compute it from inputs.theta or inputs.u")
    [gradient] = torch.autograd.grad(total, theta)
    return total, gradient
