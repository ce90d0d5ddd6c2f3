"""Calls of the MasterWorker to the ModelWorkers, their replies, and what ModelWorkers notify.

The records of the data that they carry are in ``realsys.types``.
"""

from __future__ import annotations

from typing import Any

import msgspec

from realsys.types import SampleMeta, SequenceRef

SNAPSHOT = "snapshot"  #: argument of a call: a SnapshotPlan
PPO = "ppo"  #: argument of a call: fields of ``train.ppo`` that have other values in it
MEASURE = "measure"  #: argument of a call that trains: it computes its statistics, and changes no weights


class SnapshotPlan(msgspec.Struct):
    """Comparison of engine and trainer on tokens of an earlier version (``AgreementSampler``).

    ``samples`` are scored with the snapshot of ``version``, or with the weights of the call if they are of
    ``version``. With ``take``, the weights of the call then become the snapshot.
    """

    version: int = -1
    samples: list[str] = []
    take: bool = False


class Transfer(msgspec.Struct, array_like=True, gc=False):
    """Copy of the arrays ``keys`` of ``sample_ids`` from worker ``src`` to each of the workers ``dsts``
    (worker indices).
    """

    src: int
    dsts: list[int]
    sample_ids: list[str]
    keys: list[str]


class MfcRequest(msgspec.Struct):
    """One model function call, the same for every rank of the role's mesh.

    ``minibatches[m][d]`` lists the sequences of DP rank d in minibatch m. Handlers see all of it, so each
    rank computes the micro-batch counts of the others without communication. Each rank is sent its
    ``MfcShare``. Hooks run before and after, in order. ``inputs`` and ``outputs``: its keys; without them it is a call
    of the configuration's dataflow.
    """

    mfc: str
    role: str
    handler: str
    step: int
    version: int
    minibatches: list[list[list[SequenceRef]]]
    args: dict[str, Any] = {}
    inputs: list[str] = []
    outputs: list[str] = []
    pre_hooks: list[str] = []
    post_hooks: list[str] = []

    def share(self, data_rank: int) -> MfcShare:
        """Return the part that the ranks of ``data_rank`` are sent."""
        own = [minibatch[data_rank] for minibatch in self.minibatches]
        return MfcShare(msgspec.structs.replace(self, minibatches=[]), own)


class MfcShare(msgspec.Struct):
    """The part of an MfcRequest that the master sends to one data rank.

    ``request`` has no sequences; ``own[m]`` are those of the data rank in minibatch m. The data ranks exchange
    their shares (``train.worker.call_service``): the master sends each sequence to the ranks that compute it only.
    """

    request: MfcRequest
    own: list[list[SequenceRef]]


class MfcReply(msgspec.Struct):
    """Reply of one worker. ``stats`` are already reduced over the mesh; only DP heads fill them.

    ``scores``: sample id -> reward of a reward model; each DP head reports its own samples.
    ``abandoned``: the run stops, and the call was not run to its end, on any rank. ``not_finite``:
    arguments of the NotFiniteError that ended the call; the master raises it. ``gpu``: readings of the
    worker's GPU since its last reply (``realsys.cluster.gpu_devices``); empty on a CPU. ``host_bytes``: resident
    memory.
    """

    worker: int
    stats: dict[str, float] = {}
    scores: dict[str, float] = {}
    seconds: float = 0.0
    tokens: int = 0
    abandoned: bool = False
    not_finite: tuple[str, int, list[str]] | None = None
    gpu: dict[str, float] = {}
    host_bytes: int = 0


class TransferRequest(msgspec.Struct):
    """Moves of arrays from or to one worker.

    ``sequences``: the samples of these transfers, for their lengths.
    """

    transfers: list[Transfer]
    sequences: list[SequenceRef]


class TransferReply(msgspec.Struct):
    """Reply to a TransferRequest. ``received``: bytes that other workers sent to this one."""

    received: int
    seconds: float = 0.0


class Empty(msgspec.Struct):
    """A reply without content."""


class MaskRequest(msgspec.Struct):
    """Take the tokens of versions below ``oldest`` out of the loss of these samples; they stay in the context."""

    sample_ids: list[str]
    oldest: int


class InitializeRequest(msgspec.Struct):
    """Build this worker's shard of ``role`` from the HF directory ``model_path``. Sent to the
    role's mesh only.

    ``trainable``: with gradients and an optimizer. ``trainer_incarnation``: incarnation of the
    master; the worker refuses groups that were granted under another one.
    """

    role: str
    model_path: str
    trainable: bool = True
    trainer_incarnation: str = ""


class LoadRowsRequest(msgspec.Struct):
    """Tokenise lines of a split of ``data.demos`` and store them as samples.

    ``lines``: name of the line in its batch -> its index. The two rows of a pair, the chosen one first, are one
    episode of it.
    """

    lines: dict[str, int]
    split: str = "train"


class SamplesArrived(msgspec.Struct):
    """Metadata of samples that a ModelWorker now holds: reply to ``load_rows``, notice
    ``samples_arrived``.
    """

    samples: list[SampleMeta]


class KeepDroppedRequest(msgspec.Struct):
    """Write a group to disk for people, before its samples are cleared: it was too old to be trained.

    reason        as in the ledger: ``stale`` or ``masked``
    next_version  version on top of which the next batch is trained
    samples       rows of the group that this worker holds
    """

    reason: str
    next_version: int
    samples: list[SampleMeta]


class ClearRequest(msgspec.Struct):
    """Discard these samples; with ``keys`` only these arrays of them."""

    sample_ids: list[str]
    keys: list[str] = []


class ReadRequest(msgspec.Struct):
    """Return the arrays ``keys`` of these samples, which a training script has asked for."""

    sample_ids: list[str]
    keys: list[str]


class ReadReply(msgspec.Struct):
    """``arrays``: for each sample its arrays in the order of the keys, each as a list of numbers."""

    arrays: list[list[list[int | float | bool]]]
