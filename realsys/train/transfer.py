"""Moving sample arrays between ModelWorkers before a model function call, worker to worker.

Sources and destinations get the same plan with the length of every sequence, so nothing is announced: one message per
pair of workers, all pairs at once. They need be on no common mesh: messages go over the world's group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from realsys.errors import ModelError
from realsys.train.data_manager import Array, DataManager, array_size
from realsys.train.megatron.device import Device
from realsys.types import ARRAY_KEYS, SequenceRef, Transfer, TransferRequest

Item = tuple[str, str]  # sample id, key


def execute(request: TransferRequest, data: DataManager, worker: int, device: Device) -> int:
    """Do this worker's part of the plan; returns the bytes it received.

    Raises KeyError naming what a source does not hold, ModelError for an array that is not as long as its sequence.
    """
    refs = {ref.sample_id: ref for ref in request.sequences}
    operations: list[dist.P2POp] = []
    arriving: list[tuple[list[Item], torch.Tensor]] = []
    for (source, target), items in _by_pair(request.transfers).items():
        if worker == source:
            message = np.concatenate([_read(data, refs[sample_id], key) for sample_id, key in items])
            if message.size:  # empty answers leave nothing to send, and the other side knows
                operations.append(dist.P2POp(dist.isend, torch.from_numpy(message).to(device.device), target))
        elif worker == target:
            size = sum(_nbytes(refs[sample_id], key) for sample_id, key in items)
            buffer = torch.empty(size, dtype=torch.uint8, device=device.device)
            arriving.append((items, buffer))
            if size:
                operations.append(dist.P2POp(dist.irecv, buffer, source))
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    for items, buffer in arriving:
        _store(items, buffer.cpu().numpy(), refs, data)
    return sum(buffer.numel() for _, buffer in arriving)


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


def _read(data: DataManager, ref: SequenceRef, key: str) -> Array:
    """The array's bytes."""
    array = data.get(ref.sample_id, key)
    if len(array) != array_size(ref, key):
        # Sent as it is, it would shift every array behind it in the message.
        raise ModelError(
            f"{key} of sample {ref.sample_id} has {len(array)} elements, {array_size(ref, key)} belong to its "
            f"{ref.length} tokens, {ref.loss_tokens} of them in the loss"
        )
    return array.view(np.uint8)


def _store(items: Sequence[Item], buffer: Array, refs: Mapping[str, SequenceRef], data: DataManager) -> None:
    offset = 0
    for sample_id, key in items:
        size = _nbytes(refs[sample_id], key)
        # A copy: a view would keep the whole message alive until its last sample is cleared.
        data.put(sample_id, {key: buffer[offset : offset + size].copy().view(ARRAY_KEYS[key][0])})
        offset += size
