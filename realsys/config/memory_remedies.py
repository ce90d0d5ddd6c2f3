"""Settings that make a trial smaller, and the allocation that fits. The cheapest that is enough is chosen.

Costs are rough, in percent of a train step: only their order matters. Every set of settings is tried, cheapest first.
"""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from realsys.config.allocation import (
    ACTOR,
    Allocation,
    ParallelLayout,
    allocation_text,
    lent_servers,
    parse_allocation,
)
from realsys.config.backend_rules import sizes_of
from realsys.config.dataflow import Dataflow, dataflow_of, own_offload, role_field
from realsys.config.device_memory import GIB, rank_uses, server_use, usable_bytes
from realsys.config.fields import replaced
from realsys.config.schema import Config
from realsys.config.training_rules import can_shard_optimizers
from realsys.config.trial_sizes import longest_sequence, model_of
from realsys.model_files.architecture import HfModel, splits_over

HEAD_CHUNK = 2048  # loss tokens; smaller ones save little and start many kernels
MOST_TENSOR = 8  # tensor ranks: beyond a node their collectives are slow
_TENSOR_COST = 12.0  # per doubling of the tensor ranks
_STAGE_COST = 12.0  # per doubling of the pipeline stages
#: pipeline stages: three only if no other number fits, because few numbers of ranks divide by it
_STAGES = ((1, 2, 4), (3,))
_TENSORS = tuple(1 << power for power in range(MOST_TENSOR.bit_length()))
#: longest sequences that a server should hold at the same time, if more GPUs per server allow that
_CACHED_SEQUENCES = 4
#: bytes of a GPU that a rank leaves free, if some layout allows that: a prediction is not a measurement
_SPARE = 6 * GIB


# ---- settings that make a training rank smaller, or its host's memory


@dataclass(frozen=True, slots=True)
class Remedy:
    """Fields to set, with their values, and the cost of that."""

    cost: float = 0.0
    values: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join(shlex.quote(f"{name}={_text(value)}") for name, value in self.values.items())

    def apply(self, config: Config) -> Config:
        for name, value in self.values.items():
            config = replaced(config, name.split("."), value)
        return config


def cheapest_remedy(config: Config, fits: Callable[[Config], bool]) -> Remedy | None:
    """Return the cheapest remedy for a rank after which ``fits`` holds; None if none is enough."""
    return _cheapest(config, _combinations(config), fits)


def cheapest_host_remedy(config: Config, fits: Callable[[Config], bool]) -> Remedy | None:
    """Return the cheapest remedy for a host with GPUs after which ``fits`` holds; None if none is enough."""
    return _cheapest(config, _sets(Remedy(), _host_switches(config)), fits)


def _cheapest(config: Config, remedies: Iterator[Remedy], fits: Callable[[Config], bool]) -> Remedy | None:
    for remedy in sorted(remedies, key=lambda remedy: (remedy.cost, len(remedy.values))):
        if fits(remedy.apply(config)):
            return remedy
    return None


def _combinations(config: Config) -> Iterator[Remedy]:
    """Yield every set of remedies: at most one of each kind."""
    for tensor in _tensor_ranks(config):
        changed = tensor.apply(config)
        yield from _sets(tensor, _switches(changed, parse_allocation(changed.allocation)))


def _sets(first: Remedy, remedies: Iterator[Remedy]) -> Iterator[Remedy]:
    """Yield ``first`` with every subset of ``remedies``."""
    for chosen in itertools.product(*([Remedy(), remedy] for remedy in remedies)):
        values: dict[str, Any] = {}
        for remedy in (first, *chosen):
            values |= remedy.values
        yield Remedy(first.cost + sum(remedy.cost for remedy in chosen), values)


def _tensor_ranks(config: Config) -> Iterator[Remedy]:
    """Yield allocations with the same workers, and more tensor ranks in place of data ranks, for the actor."""
    yield Remedy()
    allocation, model = parse_allocation(config.allocation), model_of(config)
    old = allocation.actor
    if len(allocation.roles) > 1:
        return  # which of the roles must change is the user's choice
    tensor = 2 * old.tensor
    while tensor <= MOST_TENSOR and old.data * old.tensor % tensor == 0:
        if divides(model, tensor):
            layout = ParallelLayout(old.data * old.tensor // tensor, old.pipeline, tensor)
            text = allocation_text(allocation.inference, layout, allocation.lent)
            yield Remedy(_TENSOR_COST * math.log2(tensor / old.tensor), {"allocation": text})
        tensor *= 2


def _switches(config: Config, allocation: Allocation) -> Iterator[Remedy]:
    """Yield the settings that are still off."""
    train, flow, layout = config.train, dataflow_of(config), allocation.actor
    if layout.tensor > 1 and not train.sequence_parallel:
        yield Remedy(0.0, {"train.sequence_parallel": True})
    if layout.data > 1 and not train.distributed_optimizer and can_shard_optimizers(config, flow):
        yield Remedy(0.5, {"train.distributed_optimizer": True})
    if train.inference_microbatch_tokens > train.microbatch_tokens:
        yield Remedy(1.0, {"train.inference_microbatch_tokens": 0})
    longest = longest_sequence(config)
    if train.microbatch_tokens > longest:
        values = {"train.microbatch_tokens": longest}
        yield Remedy(2.0 * math.log2(train.microbatch_tokens / longest) + 1.5, values)
    if not 0 < train.head_chunk_tokens <= HEAD_CHUNK:
        yield Remedy(4.0, {"train.head_chunk_tokens": HEAD_CHUNK})
    yield from _offloads(config, flow)
    if train.recompute is not True:
        yield Remedy(30.0, {"train.recompute": True})


def _offloads(config: Config, flow: Dataflow) -> Iterator[Remedy]:
    """Yield moves to the host between calls. They help only if a worker has several roles."""
    if len(flow.roles) < 2:
        return
    for role in flow.roles:
        if own_offload(config, role) == "none":
            kind = "optimizer" if role in flow.trained_roles and not lent_servers(config) else "all"
            yield Remedy(8.0 if role in flow.trained_roles else 3.0, {f"{_section(role)}.offload": kind})


def _host_switches(config: Config) -> Iterator[Remedy]:
    """Yield what takes host memory and can be off. Without offload the GPUs need more."""
    if config.train.engine_check:
        yield Remedy(1.0, {"train.engine_check": 0})
    if config.weights.delta != "off":
        yield Remedy(2.0, {"weights.delta": "off"})
    for role in dataflow_of(config).roles:
        if own_offload(config, role) != "none":
            yield Remedy(4.0, {f"{_section(role)}.offload": "none"})


def _section(role: str) -> str:
    return "train" if role == ACTOR else role_field(role)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# ---- the allocation for allocation=auto: as few training ranks as memory allows, at least a quarter


def smallest_training(config: Config, gpus: int, gpu_bytes: int) -> str | None:
    """Return the allocation with the fewest training ranks that fits ``gpus`` GPUs of ``gpu_bytes``; None if none does.

    Of several layouts of the same ranks, the one with the least communication is chosen. Raises ModelError.
    """
    server = _server_width(config, gpu_bytes)
    if server is None:
        return None
    tensor, width = server
    numbers = [ranks for ranks in range(max(1, gpus // 4), gpus - width + 1) if (gpus - ranks) % width == 0]
    for stages, spare, ranks in itertools.product(_STAGES, (_SPARE, 0), numbers):
        inference = ParallelLayout((gpus - ranks) // width, 1, tensor)
        if text := _cheapest_layout(config, inference, ranks, stages, gpu_bytes - spare):
            return text
    return None


def training_alone(config: Config, gpus: int, gpu_bytes: int) -> str | None:
    """Return the allocation without servers that fits ``gpus`` GPUs of ``gpu_bytes``; None if none does.

    Raises ModelError.
    """
    for stages, spare in itertools.product(_STAGES, (_SPARE, 0)):
        if text := _cheapest_layout(config, ParallelLayout(0), gpus, stages, gpu_bytes - spare):
            return text
    return None


def _cheapest_layout(
    config: Config, inference: ParallelLayout, ranks: int, stages: Sequence[int], gpu_bytes: int
) -> str | None:
    """Return the allocation whose ``ranks`` fit with the least communication; None if none does."""
    for layout in sorted(_layouts(config, ranks, stages), key=layout_cost):
        text = allocation_text(inference, layout)
        if ranks_fit(replaced(config, ["allocation"], text), gpu_bytes):
            return text
    return None


def ranks_fit(config: Config, gpu_bytes: int) -> bool:
    """Return True if every training rank fits."""
    allocation, usable = parse_allocation(config.allocation), usable_bytes(config, gpu_bytes, server=False)
    uses = rank_uses(config, allocation, dataflow_of(config), on_gpu=True)
    return all(use.total <= usable for use, _ in uses)


def least_recompute(config: Config, gpu_bytes: int) -> int | None:
    """Return the fewest recomputed layers of a stage with which every rank leaves ``_SPARE`` free.

    None if all layers must be recomputed, or if that is not enough. Raises ModelError.
    """
    stages = parse_allocation(config.allocation).actor.pipeline
    for number in range(-(-model_of(config).layers // stages)):
        if ranks_fit(replaced(config, ["train", "recompute"], number), gpu_bytes - _SPARE):
            return number
    return None


def _server_width(config: Config, gpu_bytes: int) -> tuple[int, int] | None:
    """Return m and the GPUs of one server: as few as hold the model and some sequences, else as few as hold one.

    The options of the backend may replace m, or multiply the GPUs.
    """
    usable, model = usable_bytes(config, gpu_bytes, server=True), model_of(config)
    tensors = (1,) if config.generation.backend == "embedded" else _TENSORS
    for sequences in (_CACHED_SEQUENCES, 1):
        for tensor in (tensor for tensor in tensors if divides(model, tensor)):
            served = replaced(config, ["allocation"], allocation_text(ParallelLayout(1, 1, tensor), ParallelLayout()))
            allocation = parse_allocation(served.allocation)
            use = server_use(served, allocation, on_gpu=True)
            extra = 0 if config.generation.backend == "embedded" else (sequences - 1) * use.cache
            if use.total + extra <= usable:
                return tensor, sizes_of(served, allocation).gpus
    return None


def _layouts(config: Config, ranks: int, numbers: Sequence[int]) -> Iterator[ParallelLayout]:
    """Yield the layouts of ``ranks`` ranks with one of these ``numbers`` of pipeline stages."""
    model = model_of(config)
    for stages, tensor in itertools.product(numbers, _TENSORS):
        if stages <= model.layers and ranks % (stages * tensor) == 0 and divides(model, tensor):
            yield ParallelLayout(ranks // (stages * tensor), stages, tensor)


def layout_cost(layout: ParallelLayout) -> float:
    """Return the cost of a layout's tensor ranks and pipeline stages."""
    return _TENSOR_COST * math.log2(layout.tensor) + _STAGE_COST * math.log2(layout.pipeline)


def divides(model: HfModel, tensor: int) -> bool:
    """Return True if the layers of ``model`` can be split over ``tensor`` ranks."""
    return all(splits_over(name, size, tensor) for name, size in model.split_sizes.items())
