"""The door of generation engines: ``generation.backend`` is a built-in name or ``package.module:Class``. No torch.

    launcher, RolloutWorker ──> Backend: check, capacity, start_timeout_s, sizes, memory_bytes, holding, sharing
    GenerationServer ──parts──> Backend.build ──> GenerationEngine <── server.py, the HTTP surface
                                                   ├── embedded.engine.EmbeddedEngine  torch, in this process
                                                   ├── child.engine.ChildEngine        SGLang or vLLM in a child process
                                                   └── threaded.SimpleEngine           base of engines with one function

The class is called as ``Class(config, **generation.backend_args)``, by launcher, RolloutWorkers and GenerationServers.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from realsys.cluster.process import INIT_ADDRESS, NODE_RANK, NODES
from realsys.config.backend_rules import BackendRules, backend_rules
from realsys.config.schema import Config
from realsys.errors import GenerationError
from realsys.generation.completion import Completion
from realsys.generation.protocol import AdapterWeights, PauseMode, SamplingParams, ServerInfo, UpdateResult

if TYPE_CHECKING:
    from torch import Tensor

    from realsys.weights.group import Senders

#: reason why an update is refused
ASLEEP = "the engine sleeps and has no memory for weights: wake it first"
#: reason why a request with an adapter is refused
NO_ADAPTERS = "this server samples only from the weights that it has loaded: leave adapter out (docs/generation.md)"


@dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """State of a request in progress.

    completions  results as an abort would give them now, in the order of their indices
    running      numbers of the completions that have not ended
    moved        changes whenever the request gets closer to its end, also by work on requests before it
    """

    completions: list[Completion]
    running: frozenset[int]
    moved: int

    @property
    def tokens(self) -> int:
        """Number of tokens of all completions."""
        return sum(len(completion.tokens) for completion in self.completions)


@dataclass(frozen=True, slots=True)
class Change:
    """Change in the state of an engine.

    ``serial`` counts the starts of the engine, from 0: it serves with the weights it was started with.
    None: it does not serve, because of ``reason``; ``final``: and it never will again.
    """

    serial: int | None
    reason: str = ""
    final: bool = False


class Staged(Protocol):
    """Verified weights by HF name, seconds by the name of the step, and counts of bytes and tensors."""

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...

    @property
    def timings(self) -> Mapping[str, float]: ...

    @property
    def counts(self) -> Mapping[str, int]: ...

    @property
    def unchanged(self) -> bool:
        """True if all tensors are those of the version that was loaded before."""

    @property
    def release(self) -> Callable[[], None]:
        """Ends the use of the tensors, which other servers share. Without a call it ends with the next load."""


class LoadVersion(Protocol):
    """Reader of a version into host memory."""

    def __call__(self, locator: str, version: int, *, loaded: bool = False) -> Staged:
        """Return the weights of ``version``. The next call may overwrite the tensors of this one.

        ``loaded``: the engine has the version of the call before. If this one has the same weights, it needs no
        tensors. Raises WeightsError if it is another version or incomplete.
        """


class ReadVersion(Protocol):
    """Reader of any version, older or newer, into memory of its own. Another thread may stage meanwhile."""

    def __call__(self, locator: str, version: int) -> Staged:
        """Return the weights of ``version``, verified. Raises WeightsError."""


@dataclass(frozen=True, slots=True)
class Materialised:
    """A verified version as a plain HF directory, until the engine calls ``release``. ``timings`` in seconds.

    ``directory`` is None if the weights are those that the engine has, or if the engine must receive them from
    ``senders``.
    """

    directory: Path | None
    timings: Mapping[str, float]
    release: Callable[[], None] = lambda: None
    senders: Senders | None = None


class Materialise(Protocol):
    """Writer of a version as an HF directory."""

    def __call__(
        self, locator: str, version: int, target: Path, *, loaded: bool = False, group: bool = False
    ) -> Materialised:
        """Write ``version``. ``target``: folder to create if memory-backed storage has room.

        ``loaded``: the engine has the version of the call before; if this one has the same weights, nothing is
        written. ``group``: nothing need be written if the engine can receive it from ``senders``. Raises WeightsError
        if the version is incomplete.
        """


class WriteAdapters(Protocol):
    """Writer of the low-rank adapters of a version, for an engine that adds them to the weights that it has."""

    def __call__(self, locator: str, version: int, target: Path, *, loaded: bool) -> bool:
        """Write them to ``target`` as a PEFT directory. False: the version has none, and nothing is written.

        ``loaded``: the engine has the version that was staged last; otherwise those with which it was started. Raises
        WeightsError, also if these are not the weights under the adapters.
        """


class GenerationEngine(Protocol):
    """Contract of a generation engine. All methods are thread-safe.

    A call that the engine refuses, or that ends with it, raises GenerationError, directly or through
    its future. It is ``retryable`` if another server may serve the call.
    """

    @property
    def model_path(self) -> str:
        """Directory of the weights that sample now; before the first update, of the initial model."""

    @property
    def version(self) -> int:
        """Version of the weights that sample now; UNSYNCED before the first verified update."""

    @property
    def failure(self) -> str | None:
        """Reason why the engine does not serve; None while it serves."""

    def start(self) -> None:
        """Start, and return when the engine can serve."""

    def close(self) -> None:
        """Stop; every caller that waits for a completion gets a retryable error."""

    def generate(
        self,
        rid: str,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        stream: bool = False,
        adapter: AdapterWeights | None = None,
    ) -> Future[list[Completion]]:
        """Sample ``params.n`` completions of one prompt.

        ``stream``: a caller waits for each token (``snapshot``), so they must be shown as they are sampled.
        ``adapter``: the weights that sample, whose version the completions have; None: those that the engine has
        loaded. An engine that has no others refuses it (``refuse_adapter``).
        """

    def snapshot(self, rid: str, beyond: int = -1) -> Future[RequestSnapshot | None]:
        """Return the state of a request as soon as it has more than ``beyond`` tokens, by default now.

        None if no request has that id, or if it ends before.
        """

    def update(self, path: str, version: int, *, abort_all: bool = False) -> Future[UpdateResult]:
        """Stage and verify a weight version while generating, then swap it in.

        A refused version is a result with ``success`` False, not an error.
        """

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stop generating and queue new requests. Mode abort ends all requests with the tokens they have."""

    def resume(self) -> Future[None]:
        """Continue after a pause."""

    def sleep(self) -> Future[None]:
        """Stop generating, and release the memory of weights and cache. Requests wait with the tokens that they have.

        The version is UNSYNCED from then on, and an update is refused until ``wake``. In an engine that drains for
        updates, running completions end first. Does nothing while it sleeps.
        """

    def wake(self) -> Future[None]:
        """Take the memory again. The next update loads the weights, and with them the requests continue."""

    def flush(self) -> Future[None]:
        """Drop the cached keys and values of completions that have ended."""

    def abort(self, rid: str) -> Future[bool]:
        """End one request with the tokens it has. False if no request has that id."""

    def abort_all(self) -> Future[None]:
        """End all requests with the tokens they have."""

    def info(self) -> ServerInfo | Future[ServerInfo]:
        """Return limits, load and counters: a snapshot, or a future if the engine must request it."""


def refuse_adapter(adapter: AdapterWeights | None) -> None:
    """Raise GenerationError if a request has an adapter."""
    if adapter is not None:
        raise GenerationError(NO_ADAPTERS)


@dataclass(frozen=True, slots=True)
class NodeSpan:
    """Nodes of one server: the rank of this one, their number, and the ``host:port`` at which its parts meet."""

    rank: int = 0
    nodes: int = 1
    init_address: str = ""


ONE_NODE = NodeSpan()


def own_span(environment: Mapping[str, str] = os.environ) -> NodeSpan:
    """Return the span that the launcher has given to this process."""
    rank, nodes = (int(environment.get(name, default)) for name, default in ((NODE_RANK, "0"), (NODES, "1")))
    return NodeSpan(rank, nodes, environment.get(INIT_ADDRESS, ""))


@dataclass(frozen=True, slots=True)
class PartParts:
    """Collaborators of a part of a server, on any node but the server's first. ``on_stop``: as in EngineParts."""

    config: Config
    model_path: Path
    index: int
    span: NodeSpan
    on_stop: Callable[[Callable[[], None]], None]


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Collaborators of an engine in its GenerationServer.

    model_path   HF directory to start with
    index        number of this server, from 0
    load         reads and verifies a version into memory
    materialise  verifies a version and writes it as a plain HF directory, for engines that load from disk
    on_change    receives the changes of the engine; the server is registered after the first Change(serial)
    on_stop      registers a function that another thread calls when the process must stop
    span         nodes of this server, of which this is the first. A folder that ``materialise`` writes is seen by all
    read         reads and verifies any version, for a request with an adapter; None: the transport cannot
    write_adapters  verifies the adapters of any version and writes them; None: the transport cannot
    """

    config: Config
    model_path: Path
    index: int
    load: LoadVersion
    materialise: Materialise
    on_change: Callable[[Change], None]
    on_stop: Callable[[Callable[[], None]], None]
    span: NodeSpan = ONE_NODE
    read: ReadVersion | None = None
    write_adapters: WriteAdapters | None = None


class Backend(BackendRules, ABC):
    """Base of the classes that ``generation.backend`` names. It may override the rules of BackendRules."""

    @abstractmethod
    def build(self, parts: EngineParts) -> GenerationEngine:
        """Create the engine of one server; the server starts it. Raises ModelError or ConfigError."""

    def run_part(self, parts: PartParts) -> None:
        """Run what a server has on a node other than its first, until asked to stop.

        Only for engines whose pipeline stages may span nodes. If one part ends, the launcher starts all parts again.
        Raises GenerationError when the part has ended.
        """
        raise GenerationError(f"generation.backend={self.config.generation.backend} does not span nodes")


def make_backend(config: Config) -> Backend:
    """Create the backend that ``generation.backend`` names. Raises ConfigError."""
    backend = backend_rules(config)
    assert isinstance(backend, Backend)  # backend_rules has checked the class
    return backend
