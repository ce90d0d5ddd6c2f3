"""The optimizer steps of one training call, and the decisions that all ranks must take alike.

    gradient -> loss finite on all ranks? -> moved too far? -> step, if the gradient is finite and not zero
                     no: skip, count             yes: leave out this minibatch and those after it

Statistics exist on the last pipeline stage only, so each decision is a flag reduced over the whole
mesh.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from realsys.algorithm.loss import finish_stats, is_maximum, merge_stats
from realsys.errors import ModelError, NotFiniteError
from realsys.model_calls import MfcRequest
from realsys.train.megatron.train_engine import LossFunction, Stats
from realsys.train.worker.call_handlers import Role
from realsys.train.worker.data_manager import Array
from realsys.train.worker.packing import MicroBatch, split_rows
from realsys.types import SequenceRef

logger = logging.getLogger(__name__)

#: optimizer steps skipped in a row before the run ends: a batch with a bad sample has about four, a diverged model all
MAX_SKIPPED_STEPS = 5
#: means of a minibatch over all ranks (``finish_stats``) -> why this minibatch and the following
#: are left out, or None
StopRule = Callable[[Mapping[str, float]], str | None]


@dataclass(slots=True)
class OptimizerSteps:
    """The optimizer steps of one call, and their statistics. ``lr`` None: no steps, only the statistics."""

    role: Role
    lr: float | None
    temperature: float | None = None  # temperature of the log-probs in the loss; None: the one of generation
    merged: Stats = field(default_factory=dict)
    loss_tokens: int = 0
    denominator: float = 0.0
    grad_norms: list[float] = field(default_factory=list)  # norms of the finite gradients
    taken: int = 0
    skipped: int = 0
    stopped: bool = False

    def take(
        self,
        minibatch: Sequence[Sequence[SequenceRef]],
        batches: Sequence[MicroBatch],
        loss: LossFunction,
        denominator: float,
        stop: StopRule | None = None,
    ) -> None:
        """Compute the gradient of ``minibatch`` and take one optimizer step.

        ``minibatch``: the sequences of all data ranks. ``batches``: this rank's micro-batches of
        it. ``loss`` returns a micro-batch's share of the loss, already divided by ``denominator``,
        which counts all ranks. Raises NotFiniteError when this was the last of
        ``MAX_SKIPPED_STEPS`` skipped ones in a row.
        """
        role = self.role
        if self.lr is None:
            self._merge(
                minibatch, merge_stats(role.engine.measure(batches, loss, temperature=self.temperature)), denominator
            )
            return
        stats = merge_stats(role.engine.accumulate(batches, loss, temperature=self.temperature))
        bad_loss = role.groups.any_rank(
            "loss_sum" in stats and not math.isfinite(stats["loss_sum"].item()), role.device
        )
        if not bad_loss and stop is not None and self._moved_too_far(stats, stop):
            self.stopped = True
            return
        outcome = role.engine.step(self.lr, skip=bad_loss)
        if bad_loss or not math.isfinite(outcome.grad_norm):
            # Its statistics are not merged: the NaN would hide the numbers of the other
            # minibatches.
            self.skipped += 1
            role.skipped_steps += 1
            role.skipped_in_a_row += 1
            if role.skipped_in_a_row >= MAX_SKIPPED_STEPS:
                raise NotFiniteError(role.name, role.skipped_in_a_row, find_not_finite(role, minibatch, batches))
            return
        if outcome.applied:
            role.skipped_in_a_row = 0
            self.taken += 1
        self.grad_norms.append(outcome.grad_norm)
        self._merge(minibatch, stats, denominator)

    def _merge(self, minibatch: Sequence[Sequence[SequenceRef]], stats: Stats, denominator: float) -> None:
        self.loss_tokens += count_loss_tokens(minibatch)
        self.denominator += denominator
        self.merged = merge_stats([self.merged, stats])

    def finish(self) -> dict[str, float]:
        """Return the statistics of the call.

        Means are over the computed loss tokens (``tokens``), ``loss`` over the denominators.
        """
        norms = self.grad_norms
        stats = {"answer_tokens": float(self.loss_tokens)}
        if self.lr is not None:
            stats |= {
                "lr": self.lr,
                "optimizer_steps": float(self.taken),
                "zero_gradient_steps": float(len(norms) - self.taken),
                "skipped_steps": float(self.skipped),
                "skipped_steps_total": float(self.role.skipped_steps),
                "grad_norm": sum(norms) / len(norms) if norms else math.nan,
                "grad_norm_max": max(norms) if norms else math.nan,
            }
        if self.role.groups.last_stage and self.merged:
            totals = reduce_stats(self.merged, self.role)
            stats |= finish_stats(totals)
            stats["loss"] = totals["loss_sum"] / max(1.0, self.denominator)
        elif not self.denominator:
            stats["loss"] = math.nan
        return stats

    def _moved_too_far(self, stats: Stats, stop: StopRule) -> bool:
        """Return True on all ranks if the rule stops this call."""
        groups = self.role.groups
        reason = stop(finish_stats(reduce_stats(stats, self.role))) if groups.last_stage else None
        if reason is not None and groups.tensor_rank == groups.data_rank == 0:
            logger.info("%s: skipped the remaining minibatches: %s", self.role.name, reason)
        return groups.any_rank(reason is not None, self.role.device)


def find_not_finite(role: Role, minibatch: Sequence[Sequence[SequenceRef]], batches: Sequence[MicroBatch]) -> list[str]:
    """Return the samples of a minibatch with a number that is not finite, on every rank; all
    samples if none has one.

    It checks the reward, the arrays that the loss reads, and the model's outputs, which it computes
    again with the parameters of the skipped step.
    """
    refs = [ref for part in minibatch for ref in part]
    own = {ref.sample_id for ref in refs if not math.isfinite(ref.reward)}
    value = role.settings.head == "value"
    outputs = role.engine.values(batches) if value else role.engine.logprobs(batches)
    for batch, output in zip(batches, outputs, strict=role.groups.last_stage):
        own |= _not_finite(split_rows(batch, output, end=value))
        for array in batch.arrays.values():
            own |= _not_finite(split_rows(batch, array))
    flags = all_reduce([float(ref.sample_id in own) for ref in refs], role.groups.whole, role, maximum=True)
    return [ref.sample_id for ref, flag in zip(refs, flags, strict=True) if flag or not any(flags)]


def _not_finite(arrays: Mapping[str, Array]) -> set[str]:
    return {sample_id for sample_id, array in arrays.items() if not np.isfinite(array).all()}


def count_loss_tokens(minibatch: Iterable[Iterable[SequenceRef]]) -> int:
    """Return the number of loss tokens of all data ranks."""
    return sum(ref.loss_tokens for part in minibatch for ref in part)


def call_argument(request: MfcRequest, name: str) -> float:
    """Return an argument of the call. Raises ModelError if the master did not send it."""
    if name not in request.args:
        raise ModelError(f"call {request.mfc!r} has no argument {name!r}: the master must send it")
    return float(request.args[name])


# ---- sums and maxima over the ranks of a mesh. Every rank of the group makes the same call


def reduce_stats(stats: Stats, role: Role) -> dict[str, float]:
    """Reduce this rank's statistics over the data ranks of its stage, which must have the same
    names.
    """
    sums = sorted(name for name in stats if not is_maximum(name))
    maxima = sorted(name for name in stats if is_maximum(name))
    group = role.groups.data
    values = _on_host([stats[name] for name in (*sums, *maxima)], role)
    return dict(zip(sums, all_reduce(values[: len(sums)], group, role), strict=True)) | dict(
        zip(maxima, all_reduce(values[len(sums) :], group, role, maximum=True), strict=True)
    )


def _on_host(values: Sequence[torch.Tensor], role: Role) -> list[float]:
    """Return scalars of either device. The host waits for the device once, not once per value."""
    if not values:
        return []
    device = role.device.device
    found: list[float] = torch.stack([value.to(device, torch.float64) for value in values]).tolist()
    return found


def token_means(stats: Stats, role: Role) -> dict[str, float]:
    """Reduce this rank's statistics over the data ranks, and divide them by ``tokens``; {} before
    the last stage.
    """
    return finish_stats(reduce_stats(stats, role)) if role.groups.last_stage else {}


def all_reduce(values: Sequence[float], group: dist.ProcessGroup, role: Role, *, maximum: bool = False) -> list[float]:
    """Return the sum (or maximum) of each value over ``group``, in float64."""
    if group.size() == 1 or not values:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64, device=role.device.device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM, group=group)
    reduced: list[float] = tensor.tolist()
    return reduced
