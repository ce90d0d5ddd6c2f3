"""Reading for a replica group: the data ranks of one (tensor, pipeline) position hold the same shards.

    per batch:  each rank reads the tensors whose turn is its own ──> all agree ──> broadcasts over the data ranks

So each byte is read once per group, not once per data rank. Every rank makes the same calls in the same order. An
error of one rank is raised on all: none of them waits in a broadcast for a rank that has given up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from realsys.errors import CheckpointError
from realsys.train.checkpoint.tensors import PieceReader, Shard
from realsys.train.megatron.device import Device
from realsys.train.megatron.gather import gather_bytes

T = TypeVar("T")

#: bytes that the ranks of a group read before they exchange them
_BATCH = 1 << 30


@dataclass(frozen=True, slots=True)
class Part:
    """``[start, stop)`` of a flattened shard. ``shared``: all data ranks load it; else this rank alone."""

    kind: str
    shard: Shard
    start: int
    stop: int
    shared: bool


def agreed(group: dist.ProcessGroup, work: Callable[[], T]) -> T:
    """Do ``work`` on every rank of ``group``, and return its result. Raises CheckpointError on all if one fails."""
    problem, result = "", None
    try:
        result = work()
    except CheckpointError as error:
        problem = str(error)
    problems = [each.decode() for each in gather_bytes(problem.encode(), group)]
    if first := next(filter(None, problems), ""):
        raise CheckpointError(problem or first)
    return result  # type: ignore[return-value]


class ReplicaReader:
    """Reader of one rank. ``group`` has the data ranks of its position."""

    def __init__(self, reader: PieceReader, group: dist.ProcessGroup, device: Device) -> None:
        self._reader = reader
        self._group = group
        self._device = device
        self._rank = dist.get_rank(group)

    def read(self, wanted: Sequence[Sequence[Part]]) -> Iterator[list[torch.Tensor]]:
        """Yield the tensors of each list of parts, flat. Shared parts must be the same on all ranks.

        Raises CheckpointError on all ranks if one of them cannot read its parts.
        """
        batch: list[int] = []
        size = 0
        for number, parts in enumerate(wanted):
            batch.append(number)
            # Of what all ranks know: they must form the same batches.
            size += sum(4 * part.shard.numel for part in parts if part.shared)
            if size >= _BATCH or number + 1 == len(wanted):
                yield from self._read_batch({number: wanted[number] for number in batch})
                batch, size = [], 0

    def _read_batch(self, batch: dict[int, Sequence[Part]]) -> Iterator[list[torch.Tensor]]:
        def read() -> dict[Part, torch.Tensor]:
            mine = [part for number, parts in batch.items() for part in parts if self._reads(number, part)]
            return {part: self._reader.read(part.kind, part.shard, part.start, part.stop) for part in mine}

        found = agreed(self._group, read)
        for number, parts in batch.items():
            yield [self._exchanged(number, part, found.pop(part, None)) for part in parts]

    def _turn(self, number: int) -> int:
        return number % self._group.size()

    def _reads(self, number: int, part: Part) -> bool:
        return not part.shared or self._turn(number) == self._rank

    def _exchanged(self, number: int, part: Part, found: torch.Tensor | None) -> torch.Tensor:
        """Return a part on every rank that loads it. For a shared one a collective of the group."""
        if not part.shared or self._group.size() == 1:
            assert found is not None, "this rank has read it"
            return found
        device = self._device.device
        if found is None:
            dtype = self._reader.dtype(part.kind, part.shard.name)
            found = torch.empty(part.stop - part.start, dtype=dtype, device=device)
        found = found.to(device).contiguous()
        dist.broadcast(found, group=self._group, group_src=self._turn(number))
        return found
