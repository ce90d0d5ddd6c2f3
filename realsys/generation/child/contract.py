"""Contract of an engine in a child process: its start, and the calls of its HTTP API.

    supervisor        ──> EngineLaunch: command line, environment, EngineApi
    requests, update  ──Piece──> EngineApi ──HTTP, loopback──> engine ──Reply──> requests

Only an engine's own package knows its options and its routes. Replies are decoded tolerantly, because engines add
fields with every version. A missing field that realsys needs is an error.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import msgspec

from realsys.cluster.http_client import CallFailed, HttpClient, OnLine
from realsys.config.machine import free_gpu_share, own_gpus
from realsys.errors import GenerationError
from realsys.generation.protocol import PauseMode
from realsys.types import FinishReason, TopLogprobs

#: torch's words for a GPU with too little memory
_FULL = re.compile("out of memory", re.IGNORECASE)
_SMALLER = 0.8  # part of its share with which an engine starts again after it found the GPU full
_LEAST_FREE = 0.01  # smallest free share of a GPU; with less, the engine's own error names the memory
_MOST_SHARE = 0.9  # largest share of free memory: CUDA graphs and activations need the rest
CALL_TIMEOUT_S = 30.0  # bound on calls that do not generate
PROBE_TIMEOUT_S = 120.0  # bound on the first token: a first forward pass may compile
_LOOK_S = 0.01  # between two questions whether a request is at work


@dataclass(frozen=True, slots=True)
class Piece:
    """One prompt to complete. ``rid`` must not be a prefix of another one: SGLang aborts by prefix.

    sampling_params  by SGLang's names
    priority         those with a higher one are first in the engine's queue
    namespace        part of the engine's cache whose keys it may use; None: the part without a name
    adapter          name of an adapter that the engine has loaded; "": none
    """

    rid: str
    input_ids: list[int]
    sampling_params: dict[str, Any]
    top_logprobs_num: int = 0
    priority: int = 0
    namespace: str | None = None
    adapter: str = ""


class SampledSpan(msgspec.Struct):
    """Output tokens start..end-1 were sampled by weights ``version``."""

    version: str
    start: int
    end: int


class PieceEnd(msgspec.Struct):
    """End of a piece. ``status_code``: HTTP status of an error, which a stream of SGLang has in place of an end."""

    type: FinishReason
    matched: int | str | list[int] | None = None
    message: str | None = None
    status_code: int | None = None


class PieceMeta(msgspec.Struct):
    """Facts about a piece, by SGLang's names. Times are seconds and unix seconds; 0 where the engine tells none."""

    finish_reason: PieceEnd | None
    completion_tokens: int = 0
    output_token_logprobs: list[tuple[float, int, str | None]] = []
    output_top_logprobs: list[list[tuple[float, int, str | None]]] | None = None
    cached_tokens: int = 0
    weight_versions: list[SampledSpan] | None = None
    e2e_latency: float = 0.0
    queue_time: float = 0.0
    forward_entry_time: float = 0.0
    prefill_finished_time: float = 0.0


class Reply(msgspec.Struct):
    """One completion, or one piece of it. A stop token is part of ``output_ids``."""

    output_ids: list[int]
    meta_info: PieceMeta

    def logprobs(self, begin: int = 0) -> list[float]:
        """Return those of the tokens from ``begin`` on."""
        return [entry[0] for entry in self.meta_info.output_token_logprobs[begin:]]

    def top(self, begin: int = 0) -> TopLogprobs:
        """Return the most probable tokens at each token from ``begin`` on; empty if not requested."""
        tops = self.meta_info.output_top_logprobs or []
        return [[(token, value) for value, token, _ in best] for best in tops[begin:]]

    @property
    def finish(self) -> PieceEnd:
        """The end. Raises GenerationError if it has none."""
        if self.meta_info.finish_reason is None:
            raise GenerationError("the engine gave a completion without an end", retryable=True)
        return self.meta_info.finish_reason


#: Receives the number of a piece, and its tokens so far.
OnReply = Callable[[int, Reply], None]


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Tokens in the cache and that fit into it, and most requests that run."""

    used: int
    capacity: int
    running: int


class EngineApi(ABC):
    """Calls one run. Every failure is a retryable GenerationError, except status 400: the request is wrong.

    name   the engine's word in messages, and in lower case its log
    field  section of its settings in the configuration
    guard  further arguments of the guard of its processes
    whole  it receives all tensors of a version, even those that it has
    """

    name: str
    field: str
    guard: Sequence[str] = ()
    whole = False

    def __init__(self, http: HttpClient, url: str) -> None:
        self._http = http
        self._url = url

    @abstractmethod
    async def prepare(self) -> bool:
        """Make a new run ready. True if it reports for every token which weights sampled it."""

    @abstractmethod
    async def generate(self, pieces: Sequence[Piece], timeout_s: float, on_reply: OnReply | None = None) -> list[Reply]:
        """Complete all pieces, at least one. Returns when the last one is complete.

        ``on_reply`` receives the pieces as they are sampled; ``timeout_s`` then bounds the time without a token.
        """

    @abstractmethod
    async def abort(self, rids: Sequence[str]) -> None:
        """End pieces with the tokens they have. One that the engine has not read yet may continue."""

    @abstractmethod
    async def abort_all(self) -> None:
        """End all pieces with the tokens they have."""

    @abstractmethod
    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling. Only for a run that reports versions."""

    @abstractmethod
    async def resume(self) -> None:
        """Continue after ``pause``."""

    @abstractmethod
    async def sleep(self, timeout_s: float) -> None:
        """Release the memory of weights and cache, as far as the engine was started for it. No request is at work."""

    @abstractmethod
    async def wake(self, timeout_s: float) -> None:
        """Take the memory again. The weights in it are undefined until ``load``."""

    @abstractmethod
    async def drop_cache(self) -> str:
        """Drop the cache, or return why that is impossible: a request is still at work."""

    @abstractmethod
    async def load(self, directory: Path, version: int, timeout_s: float, *, flush: bool) -> None:
        """Load weights; ``flush`` drops the cache. After a GenerationError the run's weights are unknown."""

    async def receive(self, order: dict[str, Any], version: int, timeout_s: float, *, flush: bool) -> str:
        """Load what the senders in ``order`` broadcast to all ranks of the engine; ``flush`` drops the cache.

        Returns "", or why the engine has the weights that it had. After a GenerationError they are unknown.
        """
        return f"{self.name} receives no weights by group"

    @abstractmethod
    async def renumber(self, version: int) -> None:
        """Call the weights that the run has ``version``. Running requests continue, with their earlier versions."""

    async def load_adapter(self, name: str, directory: Path, timeout_s: float) -> None:
        """Load a PEFT directory, which stays while the adapter is loaded. Only for an engine started with adapters."""
        raise GenerationError(f"{self.name} has no adapters")

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter that no piece at work has."""
        raise GenerationError(f"{self.name} has no adapters")

    @abstractmethod
    async def read_load(self, timeout_s: float) -> EngineLoad:
        """Return the load. Raises GenerationError if this engine does not report it."""

    @abstractmethod
    async def samples(self, timeout_s: float) -> bool:
        """Return True if the run samples a token, for a running request or else for this call.

        While it is paused or loads weights the result is False.
        """

    async def idle(self) -> None:
        """Return when no request is at work and the cache is empty: an engine sends the last answer a moment before.

        Raises GenerationError after ``CALL_TIMEOUT_S``.
        """
        end = time.monotonic() + CALL_TIMEOUT_S
        while problem := await self.drop_cache():
            if time.monotonic() > end:
                raise GenerationError(problem, retryable=True)
            await asyncio.sleep(_LOOK_S)

    async def send(
        self, path: str, body: object, timeout_s: float = CALL_TIMEOUT_S, on_line: OnLine | None = None
    ) -> bytes:
        """POST ``body`` as JSON, or GET if it is None. Returns the body of the reply, without lines for ``on_line``."""
        try:
            return await self._http.call(self._url + path, body, timeout_s, on_line=on_line)
        except CallFailed as error:
            raise GenerationError(f"{self.name}{path}: {error}", retryable=error.status != 400) from error


@dataclass(frozen=True, slots=True)
class EngineLaunch(ABC):
    """Settings of one start.

    context    tokens of a sequence
    options    of the user, by name without dashes
    tokenizer  the engine loads the model's tokenizer and turns every token into text
    shared     training ranks or other servers may be on its GPUs: they and the engine start at the same time, so
               either may be first
    lent       its devices are those of training ranks, and it releases their memory while these compute

    api, share_option, too_little  of the engine: its API, its option for the memory of weights and cache, and its
                                   words for a GPU that has less than that
    """

    api: ClassVar[type[EngineApi]]
    share_option: ClassVar[str]
    too_little: ClassVar[re.Pattern[str]]

    python: str
    model_path: Path
    dtype: str
    context: int
    tensor: int
    seed: int
    threads: int
    gpus: bool
    options: Mapping[str, Any]
    tokenizer: bool = False
    shared: bool = False
    lent: bool = False

    @abstractmethod
    def command(self, port: int) -> list[str]:
        """Return argv."""

    @abstractmethod
    def environment(self, inherited: Mapping[str, str] = os.environ) -> dict[str, str]: ...

    @abstractmethod
    def share_of(self, share: float, free: float) -> float:
        """Return the option's value for a ``share`` of the whole GPU, of which the share ``free`` is free."""

    def sized(self) -> Self:
        """Return the launch for the memory that is free now: the planned share, and at most ``_MOST_SHARE`` of it."""
        planned = self._planned
        if planned is None:
            return self
        free = max(free_gpu_share(own_gpus()), _LEAST_FREE)
        return self._with_share(self.share_of(min(planned, _MOST_SHARE * free), free))

    def after_failure(self, error: str) -> Self | None:
        """Return the next launch after the engine did not start; None if it would fail again.

        On a shared GPU a rank may have allocated memory while the engine measured it. So it measures again, with a
        smaller share if it did not fit.
        """
        if not self.shared or not (_FULL.search(error) or self.too_little.search(error)):
            return None
        planned = self._planned
        return self if planned is None or not _FULL.search(error) else self._with_share(planned * _SMALLER)

    @property
    def _planned(self) -> float | None:
        """The share of a shared GPU that the plan, or the user, gives to the engine."""
        share = self.options.get(self.share_option)
        return share if self.shared and isinstance(share, int | float) else None

    def _with_share(self, share: float) -> Self:
        return replace(self, options={**self.options, self.share_option: round(share, 4)})


def is_lost(error: GenerationError) -> bool:
    """Return True if the connection of the call broke before a reply."""
    cause = error.__cause__
    return isinstance(cause, CallFailed) and not cause.status and not cause.timed_out
