"""Requests of the MasterWorker to the ModelWorkers, with their replies: weights, checkpoints, records. No torch."""

from __future__ import annotations

from typing import Any

import msgspec

# ---- devices


class LeaveDeviceRequest(msgspec.Struct):
    """Release the device's memory: servers use it until the next call, which brings the role of that call back."""


# ---- weights of a role


class CopyWeightsRequest(msgspec.Struct):
    """Copy this rank's share of ``role``'s weights (HF names) to host memory, as version ``version``.

    Training continues after the reply. Any number of SaveWeightsRequest and DigestWeightsRequest may follow.
    """

    role: str
    version: int


class SaveWeightsRequest(msgspec.Struct):
    """Write this rank's copy of version ``version`` of ``role``'s weights, while later requests are served.

    ``plan``: made by the weight transport's publisher, read by its writers
    (``realsys.weights.contract``).
    """

    role: str
    version: int
    plan: Any = None


class DigestWeightsRequest(msgspec.Struct):
    """Compute the checksums of this rank's copy of version ``version``, and write nothing."""

    role: str
    version: int


class SaveWeightsReply(msgspec.Struct):
    """Reply to a SaveWeightsRequest or a DigestWeightsRequest.

    report     made by this rank's writer of the weight transport, read by its publisher; None: nothing was written
    worker     index of the ModelWorker
    checksums  HF name -> xxh3-64 of the tensor's bytes, hex
    """

    report: Any = None
    seconds: float = 0.0
    worker: int = 0
    checksums: dict[str, str] = {}


# ---- checkpoints


class SaveCheckpointRequest(msgspec.Struct):
    """Write this rank's share of ``role``'s training state into the existing directory
    ``directory``.

    The reply follows the snapshot. The files are written while training continues
    (``FinishCheckpointRequest``).
    """

    role: str
    step: int
    directory: str


class FinishCheckpointRequest(msgspec.Struct):
    """Wait until the files of the last ``save_checkpoint`` are on disk, synced.

    A failed write raises on this worker.
    """

    role: str
    step: int


class LoadCheckpointRequest(msgspec.Struct):
    """Replace the training state of an initialised ``role`` by that in ``directory``, which any
    layout may have written.
    """

    role: str
    directory: str


# ---- records of a step


class HoldRequest(msgspec.Struct):
    """Keep these arrays of the next step until its ``RecordRequest``, even if a request clears them
    before.

    ``arrays``: key -> sample ids, those of the worker; each array of a step is kept on one worker only.
    """

    step: int
    arrays: dict[str, list[str]]


class RecordRequest(msgspec.Struct):
    """Write the arrays held for ``step`` into ``directory``. Sent when the calls of the step have
    run.

    The reply does not wait for the file: it is written while later requests run. Notice
    ``recorded`` follows from each worker that has arrays or is in ``digests``.

    ``digests``: worker -> roles of whose trained parameters it computes checksums. The weights that are
    published are not among them: the publication computes their checksums.
    """

    step: int
    directory: str
    digests: dict[int, list[str]] = {}


class RecordReply(msgspec.Struct):
    """``seconds``: time in which the training waited."""

    worker: int
    seconds: float = 0.0


class Recorded(msgspec.Struct):
    """Notice ``recorded``: this worker's file of a record is written, or ``failure`` says why it is
    not.

    ``weights``: role -> parameter on this rank -> xxh3-64 of its bytes after the step, hex.
    """

    worker: int
    step: int
    size: int = 0  # bytes
    checksum: str = ""  # xxh3-64 of the file, hex; empty: the worker had no arrays, and no file
    failure: str = ""
    weights: dict[str, dict[str, str]] = {}


class LoadRecordRequest(msgspec.Struct):
    """Store the samples of the recorded step in ``directory``, as they arrived from rollout.

    Sent to every worker.
    """

    directory: str


# ---- tenants of the training service


class SwitchTenantRequest(msgspec.Struct):
    """Make ``tenant`` the one that the trained role computes for; the state of the one before is kept in host memory.

    A tenant that the rank does not know starts with an adapter drawn with ``seed``, fresh optimizer state and no
    gradients. ``drop``: tenants to forget first.
    """

    role: str
    tenant: str
    seed: int = 0
    drop: list[str] = []


class ClientRows(msgspec.Struct):
    """Rows of a client: name -> its arrays as bytes, of the types of ``realsys.serve.contract.ClientRow``."""

    tokens: dict[str, bytes]
    loss_mask: dict[str, bytes]
    logprobs: dict[str, bytes]
    advantages: dict[str, bytes]


class AddRowsRequest(msgspec.Struct):
    """Store rows of a client on this DP head, under their names. The reply is their metadata (SamplesArrived)."""

    rows: ClientRows


class StepTenantRequest(msgspec.Struct):
    """Take one optimizer step of the current tenant with its gradients, which are zero afterwards.

    ``weight_decay``: decoupled; ``grad_clip_norm``: 0: none.
    """

    role: str
    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float


class StepTenantReply(msgspec.Struct):
    """``grad_norm`` over all ranks, before clipping. ``applied`` False: it is zero or not finite, nothing changed."""

    grad_norm: float
    applied: bool


class LoadTenantRequest(msgspec.Struct):
    """Replace the current tenant's adapter by that in a checkpoint, with ``optimizer`` its state, too.

    Gradients are zero afterwards; without ``optimizer`` the optimizer's state is fresh.
    """

    role: str
    directory: str
    optimizer: bool = True
