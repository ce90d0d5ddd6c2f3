"""Megatron's optimizer for one role: fp32 master weights, global norm, clipping, skipped steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from realsys.config.sections.schema_train import OptimizerConfig, TrainConfig
from realsys.errors import ModelError
from realsys.train.megatron.megatron_core import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    MegatronOptimizerConfig,
    TransformerConfig,
    get_megatron_optimizer,
)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Result of an optimizer step.

    ``applied`` is False if it was not taken, because loss or gradient was not finite, or because the
    gradient was zero.
    """

    grad_norm: float
    applied: bool


def with_gradients(module: torch.nn.Module, megatron: TransformerConfig, train: TrainConfig) -> Any:
    """Return ``module`` with fp32 gradient buffers for its trainable parameters.

    In bf16 the sum over micro-batches and ranks would lose small gradients, and depend on the layout. With
    ``train.distributed_optimizer`` each data rank will step its share of the parameters.
    """
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=train.distributed_optimizer,
        overlap_grad_reduce=train.overlap_grad_reduce,
    )
    trained = DistributedDataParallel(megatron, settings, module)
    if train.overlap_grad_reduce:
        # Without it the reduction would begin in the first micro-batch, before the sum is complete.
        megatron.no_sync_func = trained.no_sync
    return trained


def make_optimizer(model: Any, settings: OptimizerConfig, dtype: torch.dtype) -> Any:
    """Return a MegatronOptimizer with fresh state for the trainable parameters of ``model``
    (DistributedDataParallel).

    Raises ModelError for settings that the distributed optimizer does not support.
    """
    distributed: bool = model.ddp_config.use_distributed_optimizer
    if distributed and (settings.name != "adam" or not settings.decoupled_weight_decay):
        raise ModelError(
            "train.distributed_optimizer supports only AdamW: set name=adam and decoupled_weight_decay=true"
        )
    config = MegatronOptimizerConfig(
        optimizer=settings.name,
        lr=settings.lr,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.eps,
        sgd_momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        decoupled_weight_decay=settings.decoupled_weight_decay,
        clip_grad=settings.clip_grad,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=distributed,
    )
    optimizer = get_megatron_optimizer(config, [model], use_gloo_process_groups=False)
    for group in optimizer.param_groups:
        # Norms and biases have a multiplier of 0, which only Megatron's own scheduler applies.
        # Without this line they would decay like all other weights.
        group["weight_decay"] = settings.weight_decay * group["wd_mult"]
    if settings.name == "adam":
        _fuse(optimizer)
    return optimizer


def _fuse(optimizer: Any) -> None:
    """Let torch's Adam step a parameter in one kernel.

    Megatron makes torch's Adam without this. Its default on a GPU makes temporaries of about the size of the fp32
    parameters. On either device it passes over the memory several times.
    """
    for part in optimizer.chained_optimizers:
        # Transformer Engine's and Apex's Adam are fused already, and have no such flag.
        if isinstance(part.optimizer, torch.optim.Adam):
            for group in part.optimizer.param_groups:
                group["fused"] = True


def take_step(optimizer: Any, lr: float, clip_grad: float, *, skip: bool) -> StepOutcome:
    """Take one step with the reduced gradients, unless ``skip`` is set or their global norm is zero
    or not finite.

    The norm is over all parameters of the mesh, before clipping. With a gradient of zero, momentum
    and weight decay alone would move the weights: no sample would have asked for that.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.prepare_grads()
    # Reduced over the mesh, so all ranks step or skip alike.
    norm = float(optimizer.get_grad_norm())
    if skip or not norm or not math.isfinite(norm):
        return StepOutcome(norm, applied=False)
    # Megatron clips inside its own step. Here NaN is checked before, so clipping is done by hand.
    # One norm scales all parts: a norm per part would change the direction of the gradient.
    if 0 < clip_grad < norm:
        for part in optimizer.chained_optimizers:
            parameters = part.get_parameters()
            if parameters:
                # In place: Megatron's function allocates a second gradient of each tensor.
                torch.nn.utils.clip_grads_with_norm_(parameters, clip_grad, torch.tensor(norm))
    optimizer.step_with_ready_grads()
    return StepOutcome(norm, applied=True)


def optimizer_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the momenta and the tensors that the optimizer steps: master weights, or fp32
    parameters themselves.
    """
    for group in optimizer.param_groups:
        yield from group["params"]
    for part in optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))
