"""Choice of an allocation for ``allocation=auto``: as few training ranks as memory allows, at least a quarter."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from realsys.config.allocation import ParallelLayout, parse_allocation
from realsys.config.dataflow import dataflow_of
from realsys.config.fields import replaced
from realsys.config.memory.changes import MOST_TENSOR, allocation_text, divides, layout_cost
from realsys.config.memory.device_memory import GIB, rank_uses, server_use, usable_bytes
from realsys.config.memory.models import model_of
from realsys.config.rules.backend_rules import sizes_of
from realsys.config.schema import Config

#: pipeline stages: three only if no other number fits, because few numbers of ranks divide by it
_STAGES = ((1, 2, 4), (3,))
_TENSORS = tuple(1 << power for power in range(MOST_TENSOR.bit_length()))
#: longest sequences that a server should hold at the same time, if more GPUs per server allow that
_CACHED_SEQUENCES = 4
#: bytes of a GPU that a rank leaves free, if some layout allows that: a prediction is not a measurement
_SPARE = 6 * GIB


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
        for layout in sorted(_layouts(config, ranks, stages), key=layout_cost):
            text = allocation_text(inference, layout)
            if ranks_fit(replaced(config, ["allocation"], text), gpu_bytes - spare):
                return text
    return None


def ranks_fit(config: Config, gpu_bytes: int) -> bool:
    """Return True if every training rank fits."""
    allocation, usable = parse_allocation(config.allocation), usable_bytes(config, gpu_bytes, server=False)
    uses = rank_uses(config, allocation, dataflow_of(config), on_gpu=True)
    return all(use.total <= usable for use, _ in uses)


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
