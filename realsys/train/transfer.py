"""Moving sample arrays between ModelWorkers before a model function call, rank to rank.

Every rank knows the whole plan and the length of every sequence, so nothing is announced: one message per pair of
workers, all pairs at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from realsys.train.data_manager import DataManager, array_size
from realsys.train.device import Device
from realsys.types import ARRAY_KEYS, SequenceRef, Transfer

Item = tuple[str, str]  # sample id, key


def execute(
    transfers: Sequence[Transfer], refs: Mapping[str, SequenceRef], data: DataManager, rank: int, device: Device
) -> int:
    """Do this rank's part of the plan; returns the bytes it received.

    ``refs``: sample id -> sequence, for all samples of the plan. Raises KeyError naming what a source does not hold.
    """
    operations: list[dist.P2POp] = []
    arriving: list[tuple[list[Item], torch.Tensor]] = []
    for (source, target), items in _by_pair(transfers).items():
        if rank == source:
            parts = [data.get(sample_id, key).view(np.uint8) for sample_id, key in items]
            message = torch.from_numpy(np.concatenate(parts)).to(device.device)
            operations.append(dist.P2POp(dist.isend, message, target))
        elif rank == target:
            size = sum(_nbytes(refs[sample_id], key) for sample_id, key in items)
            buffer = torch.empty(size, dtype=torch.uint8, device=device.device)
            operations.append(dist.P2POp(dist.irecv, buffer, source))
            arriving.append((items, buffer))
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    received = 0
    for items, buffer in arriving:
        _store(items, buffer.cpu().numpy(), refs, data)
        received += buffer.numel()
    return received


def _by_pair(transfers: Iterable[Transfer]) -> dict[tuple[int, int], list[Item]]:
    """(src, dst) -> what goes from one to the other, each item once, in the plan's order."""
    pairs: dict[tuple[int, int], dict[Item, None]] = {}
    for transfer in transfers:
        if transfer.src == transfer.dst:
            continue
        items = pairs.setdefault((transfer.src, transfer.dst), {})
        items.update(((sample_id, key), None) for sample_id in transfer.sample_ids for key in transfer.keys)
    return {pair: list(items) for pair, items in pairs.items() if items}


def _nbytes(ref: SequenceRef, key: str) -> int:
    return array_size(ref, key) * np.dtype(ARRAY_KEYS[key][0]).itemsize


def _store(items: Sequence[Item], buffer: np.ndarray, refs: Mapping[str, SequenceRef], data: DataManager) -> None:  # type: ignore[type-arg]
    offset = 0
    for sample_id, key in items:
        size = _nbytes(refs[sample_id], key)
        # A copy: a view would keep the whole message alive until its last sample is cleared.
        data.put(sample_id, {key: buffer[offset : offset + size].copy().view(ARRAY_KEYS[key][0])})
        offset += size
