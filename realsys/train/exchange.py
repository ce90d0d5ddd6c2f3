"""Exchange of the sequences of a call among the data ranks of its mesh.

    master ──MfcShare──> every rank: the sequences of its own data rank
    ranks  ──all-gather over data ranks──> MfcRequest with the sequences of all of them

Group means of rewards, denominators and numbers of micro-batches depend on the whole batch. The master would send its
metadata once to every rank; the data ranks have it all, and a faster network.
"""

from __future__ import annotations

import msgspec
import torch.distributed as dist

from realsys.model_calls import MfcRequest, MfcShare
from realsys.train.megatron.collectives import gather_bytes
from realsys.types import SequenceRef

_DECODER = msgspec.msgpack.Decoder(list[list[SequenceRef]])


def whole_request(share: MfcShare, data: dist.ProcessGroup) -> MfcRequest:
    """Return the request with the sequences of all data ranks. Every rank of the mesh must call it.

    ``data``: the group of this rank along the data axis.
    """
    parts = [_DECODER.decode(part) for part in gather_bytes(msgspec.msgpack.encode(share.own), data)]
    minibatches = [list(minibatch) for minibatch in zip(*parts, strict=True)]
    return msgspec.structs.replace(share.request, minibatches=minibatches)
