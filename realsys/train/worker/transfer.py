"""Moves sample arrays between ModelWorkers before a model function call, worker to worker.

Sources and destinations get the same plan with the length of every sequence, so no message
announces sizes. There is one message per pair of workers, and all pairs run at the same time. A
pair need not share a mesh: messages use the process group of the whole world.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from realsys.errors import ModelError
from realsys.model_calls import MfcRequest, MfcShare, Transfer, TransferRequest
from realsys.train.megatron.collectives import gather_bytes
from realsys.train.megatron.device import Device
from realsys.train.worker.data_manager import Array, DataManager, array_size
from realsys.types import ARRAY_KEYS, SequenceRef

Item = tuple[str, str]  # sample id, key


def execute(request: TransferRequest, data: DataManager, worker: int, device: Device) -> int:
    """Do this worker's part of the plan; return the bytes it received.

    Raises KeyError for an array that a source does not hold, ModelError for an array whose length
    differs from the plan.
    """
    refs = {ref.sample_id: ref for ref in request.sequences}
    operations: list[dist.P2POp] = []
    arriving: list[tuple[list[Item], torch.Tensor]] = []
    # All pairs are collected before one is started: if two workers each sent first and received
    # later, both could block.
    for (source, target), items in _by_pair(request.transfers, worker).items():
        if worker == source:
            # One message per pair. A message per array would cost a latency each, for arrays of a
            # few kilobytes.
            message = np.concatenate([_read(data, refs[sample_id], key) for sample_id, key in items])
            # empty completions: the destination computes the same size and expects no message
            if message.size:
                operations.append(dist.P2POp(dist.isend, torch.from_numpy(message).to(device.device), target))
        elif worker == target:
            # The plan gives the size, so the source announces nothing.
            size = sum(_nbytes(refs[sample_id], key) for sample_id, key in items)
            buffer = torch.empty(size, dtype=torch.uint8, device=device.device)
            arriving.append((items, buffer))
            if size:
                operations.append(dist.P2POp(dist.irecv, buffer, source))
    if operations:
        # Launched as one group: NCCL runs single sends and receives in the order of the calls,
        # which may be a deadlock.
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    # Stored after all messages have arrived: a partial failure leaves no sample half updated.
    for items, buffer in arriving:
        _store(items, buffer.cpu().numpy(), refs, data)
    return sum(buffer.numel() for _, buffer in arriving)


def _by_pair(transfers: Iterable[Transfer], worker: int) -> dict[tuple[int, int], list[Item]]:
    """Return (source, destination) -> the items to send, each once, in the order of the plan.

    Only the pairs of ``worker``.
    """
    pairs: dict[tuple[int, int], dict[Item, None]] = {}
    for transfer in transfers:
        for target in transfer.dsts if transfer.src == worker else {worker}.intersection(transfer.dsts):
            # A worker that sends to itself would wait for its own receive.
            if transfer.src == target:
                continue
            items = pairs.setdefault((transfer.src, target), {})
            # A dict as an ordered set: two transfers of a plan may name the same array, and both sides
            # must count it once.
            items.update(((sample_id, key), None) for sample_id in transfer.sample_ids for key in transfer.keys)
    return {pair: list(items) for pair, items in pairs.items() if items}


def _nbytes(ref: SequenceRef, key: str) -> int:
    return array_size(ref, key) * np.dtype(ARRAY_KEYS[key][0]).itemsize


def _read(data: DataManager, ref: SequenceRef, key: str) -> Array:
    """Return the array as bytes, uint8."""
    array = data.get(ref.sample_id, key)
    if len(array) != array_size(ref, key):
        # It would shift all arrays behind it in the message, and the destination would store wrong
        # numbers without an error.
        raise ModelError(
            f"{key} of sample {ref.sample_id} has {len(array)} elements, the plan expects "
            f"{array_size(ref, key)} for its {ref.length} tokens, {ref.loss_tokens} of them in the loss: "
            "this is a bug in the plan or in a call handler"
        )
    return array.view(np.uint8)


def _store(items: Sequence[Item], buffer: Array, refs: Mapping[str, SequenceRef], data: DataManager) -> None:
    offset = 0
    for sample_id, key in items:
        size = _nbytes(refs[sample_id], key)
        # A copy: a view would keep the whole message in memory until its last sample is cleared.
        data.put(sample_id, {key: buffer[offset : offset + size].copy().view(ARRAY_KEYS[key][0])})
        offset += size


# ---- exchange of the sequences of a call among the data ranks of its mesh
#
#     master ──MfcShare──> every rank: the sequences of its own data rank
#     ranks  ──all-gather over data ranks──> MfcRequest with the sequences of all of them
#
# Group means of rewards, denominators and numbers of micro-batches depend on the whole batch. The master would send
# its metadata once to every rank; the data ranks have it all, and a faster network.


_DECODER = msgspec.msgpack.Decoder(list[list[SequenceRef]])


def whole_request(share: MfcShare, data: dist.ProcessGroup) -> MfcRequest:
    """Return the request with the sequences of all data ranks. Every rank of the mesh must call it.

    ``data``: the group of this rank along the data axis.
    """
    parts = [_DECODER.decode(part) for part in gather_bytes(msgspec.msgpack.encode(share.own), data)]
    minibatches = [list(minibatch) for minibatch in zip(*parts, strict=True)]
    return msgspec.structs.replace(share.request, minibatches=minibatches)
