"""Client of a generation server: one shared HTTP session, no retries. No torch.

Retrying is the caller's decision, because only it knows whether another server may take the request over. A retryable
GenerationError says what the call learned about the server:

    ServerBusy     its queue is full: the server is well
    ServerSilent   no reply and no progress within the limit: ``works`` asks whether it lives
    ServerFailed   connection refused or reset, status 5xx, or a reply that cannot be read

A client that has received a token keeps it when the server dies (``Received``). The reply repeats all tokens, so the
lines before it count only if it does not come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import msgspec
import numpy as np

from realsys.cluster.failpoint import failpoint
from realsys.cluster.http_client import CallFailed, HttpClient
from realsys.cluster.lease import CheckAlive, unleased
from realsys.config.schema import GenerationConfig
from realsys.errors import MALFORMED, GenerationError, ServerBusy, ServerFailed, ServerSilent
from realsys.generation.protocol import (
    Acknowledged,
    CompletionReply,
    ModelInfo,
    PauseMode,
    ProgressLine,
    SamplingParams,
    ServerInfo,
    UpdateResult,
    not_default,
)
from realsys.types import F32, I32, FinishReason, TopLogprobs

T = TypeVar("T")

ANSWER_TIMEOUT_S = 10.0  # bound on the reply of a server that may be dead
WATCH_S = 2.0  # time in which a living server samples a token


class SamplingSpec(SamplingParams, frozen=True):
    """Sampling of a completion, in one request or in pieces.

    ``new_tokens_per_chunk``: a request asks for at most that many tokens of a completion; 0: for all.
    """

    new_tokens_per_chunk: int = 0

    def params(self, seed: int) -> dict[str, Any]:
        """Return the ``sampling_params`` of one request. Defaults are left out, so that any backend understands it."""
        changed = not_default(self)
        changed.pop("new_tokens_per_chunk", None)
        return {**changed, "max_new_tokens": self.max_new_tokens, "sampling_seed": seed}


@dataclass(frozen=True, slots=True)
class Generated:
    """A completion of T tokens.

    tokens       int32 [T]; a stop token is the last of them
    logprobs     float32 [T], natural, of softmax(logits / temperature), before top-k and top-p
    versions     int32 [T]: weights that sampled each token
    route        (server, token count) runs, in order
    kv_versions  int32 [T]: weights that computed the oldest key that each token attended to; None: as ``versions``
    top          most probable tokens at each token; None if not requested (``top_logprobs_num``)
    temperature  that of the request if it is not the trial's; None: the trial's; 0: the request was greedy
    """

    tokens: I32
    logprobs: F32
    versions: I32
    finish_reason: FinishReason
    route: tuple[tuple[str, int], ...] = ()
    kv_versions: I32 | None = None
    top: TopLogprobs | None = None
    temperature: float | None = None

    @property
    def greedy(self) -> bool:
        """Return True if the tokens are no samples: no policy can be trained on them."""
        return self.temperature == 0


def joined_kv_versions(completions: Sequence[Generated]) -> I32 | None:
    """Return the ``kv_versions`` of completions one after another; None if no completion has them."""
    if all(completion.kv_versions is None for completion in completions):
        return None
    return np.concatenate([c.versions if c.kv_versions is None else c.kv_versions for c in completions])


#: seconds without a new token, and without progress of the queue before it, after which a request moves to another
#: server: more than a weight update of a large model or the prefill of a long queue takes
PROGRESS_TIMEOUT_S = 600.0


class GenerationClient:
    """Calls generation servers, within one event loop.

    timeout_s    bounds a call from start to last byte; of generate() the time without progress
    progress_s   generate() requests the tokens so far this often; 0: only the reply
    token        of the trial, which its servers require; None for a server without a trial
    check_alive  is called before every call: a process without its lease must not change a server
    """

    def __init__(
        self,
        timeout_s: float,
        connect_timeout_s: float = 10.0,
        *,
        progress_s: float = 0.0,
        token: str | None = None,
        check_alive: CheckAlive = unleased,
    ) -> None:
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._progress_s = progress_s
        self._http = HttpClient(token, check_alive=check_alive, faults=_faults)

    @classmethod
    def of(cls, config: GenerationConfig, token: str | None, check_alive: CheckAlive) -> Self:
        """Return a client with the limits of the configuration."""
        return cls(PROGRESS_TIMEOUT_S, progress_s=config.progress_s, token=token, check_alive=check_alive)

    async def generate(
        self,
        url: str,
        input_ids: Sequence[int],
        spec: SamplingSpec,
        *,
        rid: str,
        seed: int,
        received: Received | None = None,
    ) -> list[Generated]:
        """Sample ``spec.n`` completions. Completion k of a seed does not depend on the load of the server.

        ``received`` collects tokens that arrive before the reply; with ``on_tokens`` they arrive as they are sampled,
        unless ``progress_s`` is 0. Raises GenerationError, ``retryable`` unless the
        request itself is wrong.
        """
        received = received or Received(spec.n)
        body = {
            "input_ids": [int(token) for token in input_ids],
            "sampling_params": spec.params(seed),
            "return_logprob": True,
            "rid": rid,
        }
        if self._progress_s:
            body["progress_s"] = self._progress_s
            if received.on_tokens is not None:
                body["stream"] = True
        kind: Any = list[CompletionReply] | CompletionReply  # a list only when n > 1
        payload = await self._send(url, "/generate", body, self._timeout_s, received)
        if received.error is not None:
            status, message = received.error
            raise _failure(f"{url}/generate: status {status}: {message}", status)
        reply = decode_reply(url + "/generate", payload, kind)
        completions = reply if isinstance(reply, list) else [reply]
        if len(completions) != spec.n:
            raise GenerationError(
                f"{url}/generate: {len(completions)} completions came back, requested were n={spec.n}"
            )
        return [_generated(url, completion) for completion in completions]

    async def update_weights(
        self, url: str, path: str, version: int, timeout_s: float, sources: Sequence[str] = ()
    ) -> UpdateResult:
        """Make the server load ``version`` from ``path``. A refusal is a result with ``success`` False.

        ``sources``: services of other hosts that have a copy of it.
        """
        body: dict[str, Any] = {"model_path": path, "weight_version": str(version)}
        if sources:  # a server that is not ours knows no such field
            body["sources"] = list(sources)
        return await self._call(url, "/update_weights_from_disk", body, UpdateResult, timeout_s)

    async def pause(self, url: str, mode: PauseMode) -> None:
        await self._call(url, "/pause_generation", {"mode": mode}, Acknowledged)

    async def resume(self, url: str) -> None:
        await self._call(url, "/continue_generation", {}, Acknowledged)

    async def abort(self, url: str, rid: str) -> None:
        """End a request; its caller gets the tokens so far with finish reason ``abort``. Unknown ids are ignored."""
        await self._call(url, "/abort_request", {"rid": rid}, Acknowledged)

    async def model_info(self, url: str, timeout_s: float | None = None) -> ModelInfo:
        return await self._call(url, "/model_info", None, ModelInfo, timeout_s)

    async def server_info(self, url: str, timeout_s: float | None = None) -> ServerInfo:
        return await self._call(url, "/server_info", None, ServerInfo, timeout_s)

    async def works(self, url: str) -> bool:
        """Return True if the server answers, and is paused or samples tokens. Takes ``WATCH_S``."""
        try:
            before = await self.server_info(url, ANSWER_TIMEOUT_S)
            await asyncio.sleep(WATCH_S)
            after = await self.server_info(url, ANSWER_TIMEOUT_S)
        except GenerationError:
            return False
        return after.paused or (before.steps, before.generated_tokens) != (after.steps, after.generated_tokens)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def _call(self, url: str, path: str, body: Any, kind: type[T], timeout_s: float | None = None) -> T:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        return decode_reply(url + path, await self._send(url, path, body, limit_s), kind)

    async def _send(self, url: str, path: str, body: Any, limit_s: float, received: Received | None = None) -> bytes:
        def take(line: bytes) -> None:
            assert received is not None
            try:
                received.take(line)
            except (ValueError, *MALFORMED) as error:
                raise ServerFailed(f"{url}{path}: progress cannot be read: {error}") from error

        try:
            on_line = None if received is None else take
            return await self._http.call(url + path, body, limit_s, self._connect_timeout_s, on_line)
        except CallFailed as error:
            raise _failure(f"{url}{path}: {error}", error.status, error.timed_out) from error


def _failure(message: str, status: int, timed_out: bool = False) -> GenerationError:
    """Return the error of a call by its status; 0: no reply came."""
    if timed_out:
        return ServerSilent(message)
    if status == 429:
        return ServerBusy(message)
    return ServerFailed(message) if status == 0 or status >= 500 else GenerationError(message)


def _faults(replied: bool) -> str:
    return failpoint("server.reply") if replied else failpoint("server.call")


def decode_reply(where: str, payload: bytes, kind: type[T]) -> T:
    """Decode the body of a reply. Raises ServerFailed for anything else."""
    try:
        return msgspec.json.decode(payload, type=kind)
    except MALFORMED as error:
        raise ServerFailed(f"{where}: reply cannot be read: {error}") from error


def generated_so_far(received: Received) -> list[Generated]:
    """Return the completions of a request whose reply did not come, with the tokens that had arrived."""
    return [
        Generated(
            np.asarray(one.tokens, np.int32),
            np.asarray(one.logprobs, np.float32),
            np.asarray(one.versions, np.int32),
            one.finish,
            kv_versions=None if one.kv_versions == one.versions else np.asarray(one.kv_versions, np.int32),
            top=one.top if one.top and len(one.top) == len(one.tokens) else None,
        )
        for one in received.completions
    ]


def _generated(url: str, completion: CompletionReply) -> Generated:
    """Return the arrays of one completion. The counts of tokens, log-probs and versions must agree."""
    meta = completion.meta_info
    entries, segments = meta.output_token_logprobs or [], meta.weight_versions or []
    kv_segments = segments if meta.kv_versions is None else meta.kv_versions
    counts, kv_counts = [count for _, count in segments], [count for _, count in kv_segments]
    top = meta.output_top_logprobs
    lengths = {len(completion.output_ids), len(entries), sum(counts), sum(kv_counts)}
    if min(counts + kv_counts, default=0) < 0 or len(lengths if top is None else lengths | {len(top)}) > 1:
        raise GenerationError(
            f"{url}/generate: {len(completion.output_ids)} tokens but {len(entries)} log-probs and versions of {counts}"
            + (f", of keys {kv_counts}" if meta.kv_versions else "")
            + (f", {len(top)} lists of top log-probs" if top is not None else "")
        )
    try:
        tokens = np.asarray(completion.output_ids, np.int32)
        logprobs = np.asarray([entry[0] for entry in entries], np.float32)
        versions = np.repeat(np.asarray([int(version) for version, _ in segments], np.int32), counts)
        kv_versions = np.repeat(np.asarray([int(version) for version, _ in kv_segments], np.int32), kv_counts)
    except (ValueError, OverflowError) as error:  # not a number, or out of the range of tokens or versions
        raise ServerFailed(f"{url}/generate: completion cannot be read: {error}") from error
    return Generated(
        tokens,
        logprobs,
        versions,
        meta.finish_reason.type,
        kv_versions=None if meta.kv_versions is None else kv_versions,
        top=None if top is None else [[(token, logprob) for logprob, token, _ in entry] for entry in top],
    )


# ---- tokens that arrive before the reply


_LINE = msgspec.json.Decoder(ProgressLine)


@dataclass(slots=True)
class PartsOfOne:
    """Tokens of one completion that have arrived. ``finish`` is abort while it runs, ``top`` empty if not requested."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kv_versions: list[int] = field(default_factory=list)
    top: TopLogprobs = field(default_factory=list)
    finish: FinishReason = "abort"


class Received:
    """Tokens of a request that have arrived before its reply. ``error``: status and message instead of the reply.

    ``on_end`` gets the number of each completion that ends while others of the request continue. ``on_tokens`` gets
    that of each completion with new tokens, as soon as the server has sampled them; None: they may arrive later.
    """

    def __init__(
        self,
        n: int,
        on_end: Callable[[int], None] = lambda _: None,
        on_tokens: Callable[[int], None] | None = None,
    ) -> None:
        self._on_end = on_end
        self.on_tokens = on_tokens
        self.completions = [PartsOfOne() for _ in range(n)]
        self.error: tuple[int, str] | None = None

    def take(self, line: bytes) -> None:
        """Add a line. Raises what ``MALFORMED`` lists, and changes nothing, if it cannot be read."""
        progress = _LINE.decode(line)
        versions = [_expanded(part.weight_versions) for part in progress.parts]
        kv_versions = [_expanded(part.kv_versions or part.weight_versions) for part in progress.parts]
        for part, sampled, kv in zip(progress.parts, versions, kv_versions, strict=True):
            if not len(part.output_ids) == len(part.logprobs) == len(sampled) == len(kv):
                raise ValueError(f"completion {part.index} has not as many log-probs and versions as tokens")
            if part.top is not None and len(part.top) != len(part.output_ids):
                raise ValueError(f"completion {part.index} has not as many lists of top log-probs as tokens")
            if not 0 <= part.index < len(self.completions) or part.begin > len(self.completions[part.index].tokens):
                raise ValueError(f"completion {part.index} from token {part.begin} on is not expected")
        for part, sampled, kv in zip(progress.parts, versions, kv_versions, strict=True):
            one = self.completions[part.index]
            one.tokens[part.begin :] = part.output_ids
            one.logprobs[part.begin :] = part.logprobs
            one.versions[part.begin :] = sampled
            one.kv_versions[part.begin :] = kv
            one.top[part.begin :] = part.top or []
            one.finish = part.finish or "abort"
            if self.on_tokens is not None:
                self.on_tokens(part.index)
            if one.finish != "abort":
                self._on_end(part.index)
        if progress.status:
            self.error = progress.status, progress.message


def _expanded(runs: list[tuple[str, int]]) -> list[int]:
    """Return one version per token from (version, tokens) runs in wire form."""
    return [int(version) for version, count in runs for _ in range(count)]
