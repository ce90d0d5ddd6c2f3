"""Collectives of a process group: bytes of every rank, errors of any rank, tensors that one rank reads for all.

    per batch:  each rank reads the tensors whose turn is its own ──> all agree ──> broadcasts over the group

The data ranks of one (tensor, pipeline) position are a replica group: they hold the same shards. ``ReplicaReader``
reads each byte of a checkpoint or of a Hugging Face model once per group, not once per data rank. Every rank makes the
same calls in the same order. An error of one rank is raised on all: none of them waits in a broadcast for a rank that
has given up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from realsys.errors import RealsysError
from realsys.train.megatron.device import Device

T = TypeVar("T")

#: bytes that the ranks of a group read before they exchange them
_BATCH = 1 << 30


def gather_bytes(own: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Return what each rank of ``group`` passed as ``own``, in the order of the ranks. Every rank must call it."""
    # torch's own function for objects would unpickle them.
    if group.size() == 1:
        return [own]
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    size = torch.tensor([len(own)], device=device)
    sizes = [torch.empty_like(size) for _ in range(group.size())]
    dist.all_gather(sizes, size, group=group)
    lengths = [int(each) for each in sizes]
    mine = torch.zeros(max(lengths), dtype=torch.uint8)
    mine[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8) if own else 0
    mine = mine.to(device)
    parts = [torch.empty_like(mine) for _ in lengths]
    if len(mine):
        dist.all_gather(parts, mine, group=group)
    return [part[:length].cpu().numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]


def agreed(group: dist.ProcessGroup, work: Callable[[], T], error: type[RealsysError]) -> T:
    """Do ``work`` on every rank of ``group``, and return its result. Raises ``error`` on all ranks if one raises it."""
    problem, result = "", None
    try:
        result = work()
    except error as raised:
        problem = str(raised)
    problems = [each.decode() for each in gather_bytes(problem.encode(), group)]
    if first := next(filter(None, problems), ""):
        raise error(problem or first)
    return result  # type: ignore[return-value]


class Readable(Protocol):
    """A tensor in files. If it is ``shared``, all ranks of the group load it; else this rank alone.

    ``nbytes``: about its size, the same on all ranks if it is shared.
    """

    @property
    def shared(self) -> bool: ...
    @property
    def nbytes(self) -> int: ...

    def read(self) -> torch.Tensor:
        """Read the tensor into host memory. Raises the error that ``ReplicaReader`` was given."""

    def blank(self, device: torch.device) -> torch.Tensor:
        """Return memory for the tensor on ``device``, with the shape and type that ``read`` gives."""


class ReplicaReader:
    """Reader of one rank. ``group`` has the data ranks of its position; ``error`` is what reading may raise."""

    def __init__(self, group: dist.ProcessGroup, device: Device, error: type[RealsysError]) -> None:
        self._group = group
        self._device = device
        self._error = error
        self._rank = dist.get_rank(group)

    @property
    def alone(self) -> bool:
        """Return True if this rank reads everything for itself."""
        return self._group.size() == 1

    def read(self, wanted: Sequence[Sequence[Readable]]) -> Iterator[list[torch.Tensor]]:
        """Yield the tensors of each list. Shared ones must be the same on all ranks.

        Raises the error on all ranks if one of them cannot read.
        """
        batch: list[int] = []
        size = 0
        for number, tensors in enumerate(wanted):
            batch.append(number)
            # Of what all ranks know: they must form the same batches.
            size += sum(tensor.nbytes for tensor in tensors if tensor.shared)
            if self.alone or size >= _BATCH or number + 1 == len(wanted):
                yield from self._read_batch({number: wanted[number] for number in batch})
                batch, size = [], 0

    def _read_batch(self, batch: dict[int, Sequence[Readable]]) -> Iterator[list[torch.Tensor]]:
        def read() -> dict[tuple[int, int], torch.Tensor]:
            every = ((number, at) for number, tensors in batch.items() for at in range(len(tensors)))
            return {place: batch[place[0]][place[1]].read() for place in every if self._reads(batch, *place)}

        found = agreed(self._group, read, self._error)
        for number, tensors in batch.items():
            yield [self._exchanged(number, tensor, found.pop((number, at), None)) for at, tensor in enumerate(tensors)]

    def _turn(self, number: int) -> int:
        return number % self._group.size()

    def _reads(self, batch: dict[int, Sequence[Readable]], number: int, at: int) -> bool:
        return not batch[number][at].shared or self._turn(number) == self._rank

    def _exchanged(self, number: int, tensor: Readable, found: torch.Tensor | None) -> torch.Tensor:
        """Return a tensor on every rank that loads it. For a shared one a collective of the group."""
        if not tensor.shared or self.alone:
            assert found is not None, "this rank has read it"
            return found
        device = self._device.device
        content = tensor.blank(device) if found is None else found.to(device).contiguous()
        dist.broadcast(content, group=self._group, group_src=self._turn(number))
        return content
