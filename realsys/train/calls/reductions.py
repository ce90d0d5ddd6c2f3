"""Sums and maxima over the ranks of a mesh. Every rank of the group makes the same call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from realsys.algorithm.loss import finish_stats, is_maximum
from realsys.train.calls.role import Role
from realsys.train.megatron.train_engine import Stats


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
