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
from typing import Any, Self, TypeVar

import msgspec

from realsys.cluster.failpoint import failpoint
from realsys.cluster.http_client import CallFailed, HttpClient
from realsys.cluster.lease import CheckAlive, unleased
from realsys.config.schema import GenerationConfig
from realsys.errors import MALFORMED, GenerationError, ServerBusy, ServerFailed, ServerSilent
from realsys.generation.completion import EMPTY, Completion, Runs
from realsys.generation.protocol import (
    UNNAMED,
    UNSYNCED,
    Acknowledged,
    AdapterWeights,
    CompletionReply,
    ModelInfo,
    PauseMode,
    ProgressLine,
    SamplingParams,
    ServerInfo,
    UpdateResult,
    not_default,
)

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
        adapter: AdapterWeights | None = None,
    ) -> list[Completion]:
        """Sample ``spec.n`` completions. Completion k of a seed does not depend on the load of the server.

        ``adapter``: the weights that sample; None: those that the server has loaded. ``received`` collects tokens that
        arrive before the reply; with ``on_tokens`` they arrive as they are sampled, unless ``progress_s`` is 0. Raises
        GenerationError, ``retryable`` unless the request itself is wrong.
        """
        received = received or Received(spec.n)
        body = {
            "input_ids": [int(token) for token in input_ids],
            "sampling_params": spec.params(seed),
            "return_logprob": True,
            "rid": rid,
        }
        if adapter is not None:  # a server that is not ours knows no such field
            body["adapter"] = msgspec.structs.asdict(adapter)
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
        return [_completion(url, completion) for completion in completions]

    async def update_weights(
        self,
        url: str,
        path: str,
        version: int,
        timeout_s: float,
        sources: Sequence[str] = (),
        *,
        older: bool = False,
    ) -> UpdateResult:
        """Make the server load ``version`` from ``path``. A refusal is a result with ``success`` False.

        ``sources``: services of other hosts that have a copy of it. ``older``: it may be older than the one that the
        server has, whose requests end with what they have.
        """
        body: dict[str, Any] = {"model_path": path, "weight_version": str(version)}
        if sources:  # a server that is not ours knows no such field
            body["sources"] = list(sources)
        if older:
            body |= {"older": True, "abort_all_requests": True}
        return await self._call(url, "/update_weights_from_disk", body, UpdateResult, timeout_s)

    async def pause(self, url: str, mode: PauseMode) -> None:
        await self._call(url, "/pause_generation", {"mode": mode}, Acknowledged)

    async def resume(self, url: str) -> None:
        await self._call(url, "/continue_generation", {}, Acknowledged)

    async def sleep(self, url: str) -> None:
        """Make the server release the memory of weights and cache. Its requests wait for an update after ``wake``."""
        await self._call(url, "/release_memory_occupation", {}, Acknowledged)

    async def wake(self, url: str) -> None:
        await self._call(url, "/resume_memory_occupation", {}, Acknowledged)

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


def _completion(url: str, reply: CompletionReply) -> Completion:
    meta = reply.meta_info
    tops = meta.output_top_logprobs
    versions = meta.weight_versions or [(meta.weight_version, len(reply.output_ids))]
    try:
        return Completion.of(
            reply.output_ids,
            [entry[0] for entry in meta.output_token_logprobs or []],
            _runs(versions),
            meta.finish_reason.type,
            kv_versions=_runs(versions if meta.kv_versions is None else meta.kv_versions),
            top=None if tops is None else [[(token, logprob) for logprob, token, _ in entry] for entry in tops],
        )
    except (ValueError, OverflowError) as error:
        raise ServerFailed(f"{url}/generate: completion cannot be read: {error}") from error


def _runs(runs: list[tuple[str, int]]) -> Runs:
    """Return (version, tokens) runs from their wire form."""
    return [(UNSYNCED if version == UNNAMED else int(version), count) for version, count in runs]


# ---- tokens that arrive before the reply


_LINE = msgspec.json.Decoder(ProgressLine)


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
        self.completions = [EMPTY] * n
        self.error: tuple[int, str] | None = None

    def take(self, line: bytes) -> None:
        """Add a line. Raises what ``MALFORMED`` lists, and changes nothing, if it cannot be read."""
        progress = _LINE.decode(line)
        for part in progress.parts:
            if not 0 <= part.index < len(self.completions) or part.begin > len(self.completions[part.index].tokens):
                raise ValueError(f"completion {part.index} from token {part.begin} on is not expected")
        added = [
            Completion.of(
                part.output_ids,
                part.logprobs,
                _runs(part.weight_versions),
                part.finish or "abort",
                kv_versions=_runs(part.kv_versions or part.weight_versions),
                top=part.top,
            )
            for part in progress.parts
        ]
        for part, news in zip(progress.parts, added, strict=True):
            before = self.completions[part.index].part(0, part.begin)
            self.completions[part.index] = Completion.joined([before, news])
            if self.on_tokens is not None:
                self.on_tokens(part.index)
            if news.finish_reason != "abort":
                self._on_end(part.index)
        if progress.status:
            self.error = progress.status, progress.message
