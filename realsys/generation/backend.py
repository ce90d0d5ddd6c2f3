"""What stands behind the HTTP surface of a generation server. No torch.

server.py ──> GenerationEngine ──┬── engine.Engine           in this process
                                 └── sglang.SglangEngine     SGLang in a child process
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from realsys.generation.protocol import PauseMode, SamplingParams, ServerInfo, UpdateResult
from realsys.generation.scheduler import AnswerResult


@dataclass(frozen=True, slots=True)
class Change:
    """News of an engine. ``serial``: it serves, with the weights it was started with; counts its starts, from 0.
    None: it does not serve, for ``reason``; ``final``: and never will again.
    """

    serial: int | None
    reason: str = ""
    final: bool = False


class GenerationEngine(Protocol):
    """Thread-safe. A call that the engine refuses, or that ends with it, raises GenerationError, at once or through
    its future; ``retryable`` when another server may do it.
    """

    @property
    def model_path(self) -> str:
        """Directory of the weights that sample now: at first, of the model that it was started with."""

    @property
    def version(self) -> int:
        """Of the weights that sample now; UNSYNCED before the first verified update."""

    @property
    def failure(self) -> str | None:
        """Why it does not serve; None while it does."""

    def start(self) -> None:
        """Return when it can serve."""

    def close(self) -> None:
        """Stop; whoever waits for an answer gets a retryable error."""

    def generate(self, rid: str, input_ids: Sequence[int], params: SamplingParams) -> Future[list[AnswerResult]]:
        """Sample ``params.n`` answers to one prompt."""

    def update(self, path: str, version: int, *, abort_all: bool = False) -> Future[UpdateResult]:
        """Stage and verify a weight version while generating, then swap it in. A refusal is a result."""

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stop generating; new requests are queued. abort: end all requests with the tokens they have."""

    def resume(self) -> Future[None]:
        """Go on after a pause."""

    def abort(self, rid: str) -> Future[bool]:
        """End one request with the tokens it has. False when there is none of that id."""

    def abort_all(self) -> Future[None]:
        """End all requests with the tokens they have."""

    def info(self) -> ServerInfo | Future[ServerInfo]:
        """Limits, load and counters: a snapshot, or one that has to be asked for."""
