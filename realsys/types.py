"""Records that cross a module or process boundary. No torch, no I/O.

    Ticket ──rollout──> TrajectoryGroup ──stream──> SampleMeta (to the master), arrays (stay at the DP head)
    SampleMeta ──plan──> SequenceRef in an MfcRequest ──ModelWorker──> MfcReply

A *group* is all answers to one prompt and has one ticket. A *sequence* is one answer with its prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]

TicketKind = Literal["train", "eval"]
FinishReason = Literal["stop", "length", "abort"]


class Ticket(msgspec.Struct, frozen=True):
    """The right to roll out one prompt once. ``attempt`` counts re-issues of the same ticket."""

    ticket_id: str
    attempt: int
    prompt_index: int
    kind: TicketKind = "train"
    split: str = "train"
    n: int = 1  # answers to sample
    seed: int = 0  # base seed of the group's sampling
    version: int = 0  # version published when granted


@dataclass(slots=True)
class Trajectory:
    """One answer with its prompt.

    tokens    int32   [prompt_len + answer_len]
    logprobs  float32 [answer_len]  under the policy that sampled the token (``behav``); never recomputed
    versions  int32   [answer_len]  version of that policy
    """

    tokens: I32
    logprobs: F32
    versions: I32
    prompt_len: int
    reward: float
    finish_reason: FinishReason

    @property
    def answer_len(self) -> int:
        return len(self.logprobs)

    @property
    def truncated(self) -> bool:
        return self.finish_reason != "stop"


@dataclass(slots=True)
class TrajectoryGroup:
    """All answers to one prompt, as pushed to a DP head."""

    ticket: Ticket
    trajectories: list[Trajectory]
    worker: str
    started: float = 0.0  # unix seconds
    finished: float = 0.0
    extra: dict[str, float] = field(default_factory=dict)


class SampleMeta(msgspec.Struct):
    """What the master knows of a sequence: everything but its tokens."""

    sample_id: str  # f"{ticket_id}/{k}", k-th answer
    ticket_id: str
    attempt: int
    length: int  # prompt + answer tokens
    prompt_len: int
    reward: float
    truncated: bool
    version_min: int
    version_max: int
    owner: int  # index of the ModelWorker that holds the tensors
    arrived: float = 0.0  # unix seconds

    @property
    def answer_len(self) -> int:
        return self.length - self.prompt_len


class SequenceRef(msgspec.Struct):
    """A sequence as a model function call sees it. ``group`` numbers the prompts of one batch from 0."""

    sample_id: str
    length: int
    prompt_len: int
    reward: float
    truncated: bool
    group: int

    @property
    def answer_len(self) -> int:
        return self.length - self.prompt_len


class Transfer(msgspec.Struct):
    """Move the arrays ``keys`` of ``sample_ids`` from worker ``src`` to worker ``dst`` (plain worker indices)."""

    src: int
    dst: int
    sample_ids: list[str]
    keys: list[str]


class MfcRequest(msgspec.Struct):
    """One model function call, the same for every rank of the mesh.

    ``minibatches[m][d]`` lists what DP rank d works on in minibatch m; all ranks see all of it, so each
    can derive the others' micro-batch counts without talking to them.
    """

    mfc: str
    role: str
    interface: str
    step: int
    version: int
    minibatches: list[list[list[SequenceRef]]]
    transfers: list[Transfer] = []
    args: dict[str, Any] = {}


class MfcReply(msgspec.Struct):
    """What one worker answers. ``stats`` are already reduced over the mesh; only DP heads fill them."""

    worker: int
    stats: dict[str, float] = {}
    seconds: float = 0.0
    tokens: int = 0


class Empty(msgspec.Struct):
    """A reply with nothing to say."""


class InitializeRequest(msgspec.Struct):
    """Build the model shards from the HF directory ``model_path``."""

    model_path: str


class LoadDemosRequest(msgspec.Struct):
    """Tokenise these demonstrations and hold them as samples."""

    indices: list[int]


class SamplesArrived(msgspec.Struct):
    """Metadata of sequences that a ModelWorker now holds: reply to ``load_demos``, notice ``samples_arrived``."""

    samples: list[SampleMeta]


class ClearRequest(msgspec.Struct):
    """Forget these samples."""

    sample_ids: list[str]


class SaveWeightsRequest(msgspec.Struct):
    """Write this rank's share of ``role``'s weights into the existing directory ``directory`` (HF names)."""

    role: str
    version: int
    directory: str


class SaveWeightsReply(msgspec.Struct):
    """The files this rank wrote."""

    shards: list[ShardInfo]
    seconds: float = 0.0


class ShardInfo(msgspec.Struct):
    """One file of a weight version, as its writer reports it."""

    file: str
    size: int  # bytes
    checksum: str  # xxh3-64 of the whole file, hex
    tensors: dict[str, int]  # HF tensor name -> bytes


class PublishedVersion(msgspec.Struct, frozen=True):
    """The value of the name-store key ``model_version``."""

    version: int
    incarnation: str
    path: str  # directory with the manifest
    step: int


class ServerAddress(msgspec.Struct, frozen=True):
    """What a GenerationServer registers."""

    name: str  # generation_server/0
    url: str  # http://host:port
    pid: int
    host: str
    incarnation: str  # new for each start of the process


#: name of a stored array -> (numpy dtype, whether it spans the whole sequence or only the answer)
ARRAY_KEYS: dict[str, tuple[str, Literal["sequence", "answer"]]] = {
    "tokens": ("int32", "sequence"),
    "behav_logprobs": ("float32", "answer"),
    "versions": ("int32", "answer"),
    "prox_logprobs": ("float32", "answer"),
    "ref_logprobs": ("float32", "answer"),
    "values": ("float32", "answer"),
}
