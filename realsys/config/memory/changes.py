"""Changes that make a training rank smaller, or its host's memory, and the cheapest of them that is enough.

Costs are rough, in percent of a train step: only their order matters. Every set of changes is tried, cheapest first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from realsys.config.allocation import ACTOR, Allocation, ParallelLayout, parse_allocation
from realsys.config.dataflow import Dataflow, dataflow_of
from realsys.config.fields import replaced
from realsys.config.memory.models import model_of
from realsys.config.roles import role_field, role_settings
from realsys.config.rules.lengths import longest_sequence
from realsys.config.rules.training_rules import can_shard_optimizers
from realsys.config.schema import Config
from realsys.hf.architecture import HfModel, splits_over

HEAD_CHUNK = 2048  # loss tokens; smaller ones save little and start many kernels
MOST_TENSOR = 8  # tensor ranks: beyond a node their collectives are slow
_TENSOR_COST = 12.0  # per doubling of the tensor ranks
_STAGE_COST = 12.0  # per doubling of the pipeline stages


@dataclass(frozen=True, slots=True)
class Change:
    """Fields to set, with their values, and the cost of that."""

    cost: float = 0.0
    values: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join(f"{name}={_text(value)}" for name, value in self.values.items())

    def apply(self, config: Config) -> Config:
        for name, value in self.values.items():
            config = replaced(config, name.split("."), value)
        return config


def cheapest_change(config: Config, fits: Callable[[Config], bool]) -> Change | None:
    """Return the cheapest change of a rank after which ``fits`` holds; None if no change is enough."""
    return _cheapest(config, _combinations(config), fits)


def cheapest_host_change(config: Config, fits: Callable[[Config], bool]) -> Change | None:
    """Return the cheapest change of a host with GPUs after which ``fits`` holds; None if no change is enough."""
    return _cheapest(config, _sets(Change(), _host_switches(config)), fits)


def _cheapest(config: Config, changes: Iterator[Change], fits: Callable[[Config], bool]) -> Change | None:
    for change in sorted(changes, key=lambda change: (change.cost, len(change.values))):
        if fits(change.apply(config)):
            return change
    return None


def _combinations(config: Config) -> Iterator[Change]:
    """Yield every set of changes: at most one of each kind."""
    for tensor in _tensor_ranks(config):
        changed = tensor.apply(config)
        yield from _sets(tensor, _switches(changed, parse_allocation(changed.allocation)))


def _sets(first: Change, changes: Iterator[Change]) -> Iterator[Change]:
    """Yield ``first`` with every subset of ``changes``."""
    for chosen in itertools.product(*([Change(), change] for change in changes)):
        values: dict[str, Any] = {}
        for change in (first, *chosen):
            values |= change.values
        yield Change(first.cost + sum(change.cost for change in chosen), values)


def _host_switches(config: Config) -> Iterator[Change]:
    """Yield what takes host memory and can be off. Without offload the GPUs need more."""
    if config.agreement.sample_tokens:
        yield Change(1.0, {"agreement.sample_tokens": 0})
    if config.weights.delta != "off":
        yield Change(2.0, {"weights.delta": "off"})
    for role in dataflow_of(config).roles:
        if role_settings(config, role).offload != "none":
            yield Change(4.0, {f"{_section(role)}.offload": "none"})


def _switches(config: Config, allocation: Allocation) -> Iterator[Change]:
    """Yield the settings that are still off."""
    train, flow, layout = config.train, dataflow_of(config), allocation.actor
    if layout.tensor > 1 and not train.sequence_parallel:
        yield Change(0.0, {"train.sequence_parallel": True})
    if layout.data > 1 and not train.distributed_optimizer and can_shard_optimizers(config, flow):
        yield Change(0.5, {"train.distributed_optimizer": True})
    if train.inference_microbatch_tokens > train.microbatch_tokens:
        yield Change(1.0, {"train.inference_microbatch_tokens": 0})
    longest = longest_sequence(config)
    if train.microbatch_tokens > longest:
        values = {"train.microbatch_tokens": longest}
        yield Change(2.0 * math.log2(train.microbatch_tokens / longest) + 1.5, values)
    if not 0 < train.head_chunk_tokens <= HEAD_CHUNK:
        yield Change(4.0, {"train.head_chunk_tokens": HEAD_CHUNK})
    yield from _offloads(config, flow)
    if not train.recompute:
        yield Change(30.0, {"train.recompute": True})


def _offloads(config: Config, flow: Dataflow) -> Iterator[Change]:
    """Yield moves to the host between calls. They help only if a worker has several roles."""
    if len(flow.roles) < 2:
        return
    for role in flow.roles:
        if role_settings(config, role).offload == "none":
            kind = "optimizer" if role in flow.trained_roles else "all"
            yield Change(8.0 if role in flow.trained_roles else 3.0, {f"{_section(role)}.offload": kind})


def _section(role: str) -> str:
    return "train" if role == ACTOR else role_field(role)


def _tensor_ranks(config: Config) -> Iterator[Change]:
    """Yield allocations with the same workers, and more tensor ranks in place of data ranks, for the actor."""
    yield Change()
    allocation, model = parse_allocation(config.allocation), model_of(config)
    old = allocation.actor
    if len(allocation.roles) > 1:
        return  # which of the roles must change is the user's choice
    tensor = 2 * old.tensor
    while tensor <= MOST_TENSOR and old.data * old.tensor % tensor == 0:
        if divides(model, tensor):
            layout = ParallelLayout(old.data * old.tensor // tensor, old.pipeline, tensor)
            text = allocation_text(allocation.inference, layout)
            yield Change(_TENSOR_COST * math.log2(tensor / old.tensor), {"allocation": text})
        tensor *= 2


def divides(model: HfModel, tensor: int) -> bool:
    """Return True if the layers of ``model`` can be split over ``tensor`` ranks."""
    return all(splits_over(name, size, tensor) for name, size in model.split_sizes.items())


def layout_cost(layout: ParallelLayout) -> float:
    """Return the cost of a layout's tensor ranks and pipeline stages."""
    return _TENSOR_COST * math.log2(layout.tensor) + _STAGE_COST * math.log2(layout.pipeline)


def allocation_text(inference: ParallelLayout, actor: ParallelLayout) -> str:
    """Return an allocation expression, without the axes of size 1."""
    return f"serve.{_axes(inference)}+{_axes(actor)}"


def _axes(layout: ParallelLayout) -> str:
    axes = {"p": layout.pipeline, "m": layout.tensor}
    return f"d{layout.data}" + "".join(f"{name}{size}" for name, size in axes.items() if size > 1)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
