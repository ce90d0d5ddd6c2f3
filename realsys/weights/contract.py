"""The contract of a weight transport, which brings versions from the ranks to the servers, and its factory.
No torch.

    MasterWorker       WeightPublisher.prepare ──plan──┐
    ModelWorkers       WeightWriter.write  <───────────┘ ──reports──┐      while the next step trains
    MasterWorker       WeightPublisher.commit  <────────────────────┘ ──locator──┐
    MasterWorker       WeightPublisher.check ──> name store ──> prune  <─────────┘
    GenerationServer   WeightReader.stage(locator, version) ──verified tensors──> swap

One version is one ``PublishedVersion(version, incarnation, locator, step, transport)``. Only the
transport reads the locator; the master, the manager and the servers pass it on and compare it.

Every transport must keep these rules; the rest of the system relies on them:

- ``exists-once-committed``: before ``commit`` returns, no reader finds the version. If ``commit``
  raises, no reader ever does. The master then publishes nothing, and servers keep their weights.
- ``verified-before-served``: ``stage`` returns the bytes that the ranks wrote for that version, or
  raises.
- ``written-again``: a damaged version is committed again under the same locator (``replace``), and
  servers try again.
- ``older-is-refused``: versions are ordered by (incarnation, version). ``stage`` refuses a version
  that is older than one it has staged, and a process of an older incarnation cannot change what a
  newer one has written.
- ``kept-while-needed``: ``prune`` keeps the newest version, those that a server stages or serves,
  and everything that a kept version refers to.

A writer, a publisher and a reader live in three processes, often on three machines. They share only
the configuration, the plan, the reports and the locator.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from realsys.cluster.commit_folder import Removed
from realsys.cluster.lease import CheckAlive, unleased
from realsys.config.doors import TRANSPORT
from realsys.config.schema import Config

if TYPE_CHECKING:
    from torch import Tensor


def build_transport(config: Config) -> Transport:
    """Make the transport that ``weights.transport`` names. Raises ConfigError."""
    transport: Transport = TRANSPORT.make(config.weights.transport, config, config.weights.transport_args)
    return transport


class Transport(abc.ABC):
    """Builder of the three sides. Each process makes one, with ``weights.transport_args``.

    Building one must be cheap, without torch and without side effects: the launcher does it to
    check the arguments.
    """

    def __init__(self, config: Config) -> None:
        self.config = config

    def check(self) -> None:
        """Check the arguments in the launcher, before anything starts. Raises ConfigError."""
        return

    @abc.abstractmethod
    def writer(self, parts: WriterParts) -> WeightWriter: ...

    @abc.abstractmethod
    def publisher(self, parts: PublisherParts) -> WeightPublisher: ...

    @abc.abstractmethod
    def reader(self, parts: ReaderParts) -> WeightReader: ...


# ---- sides


class WeightWriter(Protocol):
    """Writer of one rank of the role's mesh. It runs on a background thread while the next step trains, so it must
    not use the process groups of the training."""

    def write(self, share: Share, tensors: Mapping[str, Tensor]) -> Any:
        """Store ``tensors`` (HF names; any dtype, contiguous in host memory) and return the report for ``commit``.

        ``tensors`` may be empty. A tensor with an adapter is merged each time it is asked for. The memory holds the
        next version after the call: keep copies only. The report is anything that msgspec can encode. Raises
        WeightsError, which ends the trainer. A damaged version is written again by a second call with the same tensors.
        """


class WeightPublisher(Protocol):
    """Publisher on the master. Its calls run one at a time, each in a new thread with a time limit."""

    def prepare(self, version: int, base: str) -> Any:
        """Make room for ``version`` and return the plan that every writer gets.

        The plan is anything that msgspec can encode. ``base``: locator of the version before, which
        this one may refer to; "": it must refer to nothing.
        """

    def commit(self, version: int, step: int, plan: Any, reports: Sequence[Any], *, replace: bool = False) -> Committed:
        """Turn what the ranks wrote into a version.

        ``plan``: as ``prepare`` returned it; ``reports``: of all ranks, in no special order, after
        msgpack. ``replace``: in the place of the same version, which is damaged, and with the same
        locator. Raises WeightsError if a share is missing or is not as its writer reported it.
        """

    def check(self, locator: str) -> None:
        """Look quickly for damage in a version and in those it refers to. Raises WeightsError."""

    def verify(self, locator: str, version: int) -> None:
        """Read a version as a server does, every byte. Raises WeightsError if it is damaged."""

    def prune(self, in_use: Sequence[str]) -> Removed:
        """Delete versions beyond ``weights.keep_versions``, but none in use, and none that a kept one needs.

        ``in_use``: locators of the version published last, and of those that a server may stage or
        serve.
        """

    def discard_unfinished(self) -> Removed:
        """Delete what earlier trainers left half written. Called once, before the first version."""

    def export(self, locator: str, version: int, target: Path) -> None:
        """Write a version to the folder ``target`` as a plain HF model, verified.

        The folder appears whole or not at all. Raises WeightsError if the version is damaged,
        OSError if the target cannot be written.
        """


class WeightReader(Protocol):
    """Reader of one server. Its calls run one at a time, on another thread than the engine's."""

    def stage(self, locator: str, version: int, *, loaded: bool = False) -> StagedWeights:
        """Return all tensors of a version, verified.

        ``loaded``: the engine has the version that was staged before. If this one is ``unchanged``, its tensors are
        not needed, and may be left out.

        Raises WeightsError if the version is damaged, incomplete, older than one that was staged
        before, or not the version ``version``.

        The engine is done with the tensors of one call before the next, which may reuse their
        memory.
        """

    def close(self) -> None:
        """Free what the reader holds. Called once, when the server ends."""


# ---- records


@dataclass(frozen=True, slots=True)
class WriterParts:
    """Parts of a ModelWorker for its writer.

    worker       index of the ModelWorker
    check_alive  raises Fenced if this process has lost its lease; call it before each visible act
    trial        trial folder
    token        secret of the trial, which requests between its processes carry
    """

    worker: int = 0
    check_alive: CheckAlive = unleased
    trial: Path = Path()
    token: str | None = None


@dataclass(frozen=True, slots=True)
class PublisherParts:
    """Parts of the MasterWorker for its publisher.

    root         folder of the role's versions, in the trial folder, which every process reaches
    model_dir    HF folder of the model: config and tokenizer files
    incarnation  id of this trainer; sorts after those of all earlier trainers of the trial
    check_alive, token  as in ``WriterParts``
    """

    root: Path
    model_dir: Path
    incarnation: str
    check_alive: CheckAlive = unleased
    token: str | None = None


@dataclass(frozen=True, slots=True)
class ReaderParts:
    """Parts of a GenerationServer for its reader: its index, the model's HF folder, the trial's folder and token."""

    server: int = 0
    model_dir: Path = Path()
    trial: Path = Path()
    token: str | None = None


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a version.

    role, version  name of the model role, and the version to write
    rank, ranks    this rank's number in the role's mesh, and how many ranks write
    plan           from ``WeightPublisher.prepare``, after msgpack: a record arrives as a dict
    checksums      HF name -> xxh3-64 of the tensor's bytes, hex; the record of the step has the same
    """

    role: str
    version: int
    rank: int
    ranks: int
    plan: Any
    checksums: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Committed:
    """A version that exists now.

    written  bytes stored for it
    size     bytes of all its tensors
    """

    locator: str
    written: int
    size: int


@dataclass(slots=True)
class StagedWeights:
    """Verified tensors in host memory, by HF name.

    timings    seconds by name, for the status page: read_s, verify_s, ...
    counts     numbers by name: bytes, bytes_read, ...
    unchanged  True if all tensors are those of the version that this reader staged before
    folder     plain HF folder with these tensors, if the reader has one
    release    ends the use of tensors and folder; without a call they stay until the next ``stage``
    """

    tensors: dict[str, Tensor]
    timings: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    unchanged: bool = False
    folder: Path | None = None
    release: Callable[[], None] = lambda: None
