"""Client for the part of SGLang's HTTP API that realsys uses. One client per run of the server.

Replies are decoded tolerantly, because SGLang adds fields with every version. A missing field that realsys needs is an
error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from realsys.cluster.http_client import CallFailed, HttpClient, OnLine
from realsys.errors import GenerationError
from realsys.generation.client import decode_reply
from realsys.generation.protocol import PauseMode
from realsys.types import FinishReason, TopLogprobs

CALL_TIMEOUT_S = 30.0  # bound on calls that do not generate
T = TypeVar("T")

_LOOK_S = 0.01  # between two questions whether a request is at work


class SampledSpan(msgspec.Struct):
    """Output tokens start..end-1 were sampled by weights ``version``."""

    version: str
    start: int
    end: int


class _Finish(msgspec.Struct):
    type: FinishReason
    matched: int | str | list[int] | None = None
    message: str | None = None
    status_code: int | None = None  # HTTP status of an error, which a stream has in place of an end


class _Meta(msgspec.Struct):
    finish_reason: _Finish | None
    completion_tokens: int = 0
    output_token_logprobs: list[tuple[float, int, str | None]] = []
    output_top_logprobs: list[list[tuple[float, int, str | None]]] | None = None
    cached_tokens: int = 0
    weight_versions: list[SampledSpan] | None = None
    # Seconds, and unix seconds; 0 where SGLang does not tell. All but the first need its --enable-metrics.
    e2e_latency: float = 0.0
    queue_time: float = 0.0
    forward_entry_time: float = 0.0
    prefill_finished_time: float = 0.0


class Reply(msgspec.Struct):
    """One completion, or one piece of it. A stop token is part of ``output_ids``."""

    output_ids: list[int]
    meta_info: _Meta

    def logprobs(self, begin: int = 0) -> list[float]:
        """Return those of the tokens from ``begin`` on."""
        return [entry[0] for entry in self.meta_info.output_token_logprobs[begin:]]

    def top(self, begin: int = 0) -> TopLogprobs:
        """Return the most probable tokens at each token from ``begin`` on; empty if not requested."""
        tops = self.meta_info.output_top_logprobs or []
        return [[(token, value) for value, token, _ in best] for best in tops[begin:]]

    @property
    def finish(self) -> _Finish:
        """The end. Raises GenerationError if it has none."""
        if self.meta_info.finish_reason is None:
            raise GenerationError("SGLang gave a completion without an end", retryable=True)
        return self.meta_info.finish_reason


class _Problem(msgspec.Struct):
    message: str
    code: int = 0


class _Event(msgspec.Struct):
    """One event of a stream: new tokens of piece ``index``, or an error of all pieces."""

    output_ids: list[int] = []
    meta_info: _Meta | None = None
    index: int = 0
    error: _Problem | None = None


#: Receives the number of a piece, and its tokens so far.
OnReply = Callable[[int, Reply], None]


class _Stream:
    """Pieces of a stream, as far as their events have arrived."""

    def __init__(self, pieces: int, on_reply: OnReply) -> None:
        self.replies: list[Reply | None] = [None] * pieces
        self._on_reply = on_reply

    def take(self, line: bytes) -> None:
        """Add a line. Raises GenerationError for an error, and for tokens that do not follow those so far."""
        data = line.removeprefix(b"data: ")
        if data == line or data == b"[DONE]":
            return
        event = decode_reply("SGLang/generate", data, _Event)
        meta = event.meta_info
        if event.error is not None or meta is None:
            error = event.error or _Problem("an event without tokens")
            raise GenerationError(f"SGLang/generate: {error.message}", retryable=error.code != 400)
        finish = meta.finish_reason
        if finish is not None and finish.status_code is not None:
            raise GenerationError(f"SGLang/generate: {finish.message}", retryable=finish.status_code != 400)
        if not 0 <= event.index < len(self.replies):
            raise GenerationError(f"SGLang gave tokens of piece {event.index}, which was not sent", retryable=True)
        before = self.replies[event.index] or Reply([], _Meta(None))
        was, end = before.meta_info, meta.completion_tokens
        ids = _followed(before.output_ids, event.output_ids, end)
        meta.output_token_logprobs = _followed(was.output_token_logprobs, meta.output_token_logprobs, end)
        if meta.output_top_logprobs is not None:
            meta.output_top_logprobs = _followed(was.output_top_logprobs or [], meta.output_top_logprobs, end)
        self.replies[event.index] = reply = Reply(ids, meta)
        self._on_reply(event.index, reply)


def _followed(before: list[T], new: list[T], end: int) -> list[T]:
    """Return ``before`` and ``new``, whose last element has the number ``end - 1``: an event may repeat elements."""
    begin = end - len(new)
    if not 0 <= begin <= len(before) or before[begin:] != new[: len(before) - begin]:
        raise GenerationError(f"SGLang's stream does not follow its first {len(before)} tokens", retryable=True)
    before[begin:] = new
    return before


class RankLoad(msgspec.Struct):
    """Load of one data-parallel rank. SGLang publishes it from time to time, not with every step."""

    num_used_tokens: int = 0
    max_total_num_tokens: int = 0
    max_running_requests: int = 0


class _Loads(msgspec.Struct):
    loads: list[RankLoad]


class _Updated(msgspec.Struct):
    success: bool
    message: str = ""


@dataclass(frozen=True, slots=True)
class SglangPiece:
    """One prompt to complete. ``rid`` must not be a prefix of another one: SGLang aborts by prefix.

    ``priority``: those with a higher one are first in SGLang's queue.
    ``namespace``: part of SGLang's cache whose keys it may use; None: the part without a name.
    """

    rid: str
    input_ids: list[int]
    sampling_params: dict[str, Any]
    top_logprobs_num: int = 0
    priority: int = 0
    namespace: str | None = None


def is_lost(error: GenerationError) -> bool:
    """Return True if the connection of the call broke before a reply."""
    cause = error.__cause__
    return isinstance(cause, CallFailed) and not cause.status and not cause.timed_out


class SglangApi:
    """Calls one server. Every failure is a retryable GenerationError, except status 400: the request is wrong."""

    def __init__(self, http: HttpClient, url: str) -> None:
        self._http = http
        self._url = url

    async def generate(
        self, pieces: Sequence[SglangPiece], timeout_s: float, on_reply: OnReply | None = None
    ) -> list[Reply]:
        """Complete all pieces in one request. Returns when the last one is complete.

        ``on_reply`` receives the pieces as they are sampled, every ``stream_interval`` tokens; ``timeout_s`` then
        bounds the time without a token.
        """
        body = {
            "rid": [piece.rid for piece in pieces],
            "input_ids": [piece.input_ids for piece in pieces],
            "sampling_params": [piece.sampling_params for piece in pieces],
            "return_logprob": True,
            "priority": pieces[0].priority,  # they have the same
        }
        if tops := [piece.top_logprobs_num for piece in pieces if piece.top_logprobs_num]:
            body["top_logprobs_num"] = max(tops)  # the pieces of one request want the same number
        if pieces[0].namespace is not None:
            body["extra_key"] = pieces[0].namespace  # the same, too
        if on_reply is None:
            replies = decode_reply("SGLang/generate", await self._send("/generate", body, timeout_s), list[Reply])
        else:
            stream = _Stream(len(pieces), on_reply)
            await self._send("/generate", {**body, "stream": True}, timeout_s, stream.take)
            replies = [reply for reply in stream.replies if reply is not None]
        if len(replies) != len(pieces):
            raise GenerationError(f"SGLang gave {len(replies)} completions for {len(pieces)} prompts", retryable=True)
        return replies

    async def abort(self, rids: Sequence[str]) -> None:
        """End requests. SGLang silently ignores the abort of a request that it has not read yet."""
        await asyncio.gather(*(self._send("/abort_request", {"rid": rid}) for rid in rids))

    async def abort_all(self) -> None:
        await self._send("/abort_request", {"rid": "", "abort_all": True})

    async def pause(self, mode: PauseMode) -> None:
        await self._send("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._send("/continue_generation", {})

    async def idle(self) -> None:
        """Return when no request is at work: SGLang sends the last answer a moment before that.

        A load that meets a request ends SGLang, because it cannot drop the cache. Raises GenerationError after
        ``CALL_TIMEOUT_S``.
        """
        end = time.monotonic() + CALL_TIMEOUT_S
        while True:
            try:
                await self._http.call(self._url + "/flush_cache", {}, CALL_TIMEOUT_S)
                return
            except CallFailed as error:
                if error.status != 400 or time.monotonic() > end:
                    raise GenerationError(f"SGLang/flush_cache: {error}", retryable=True) from error
            await asyncio.sleep(_LOOK_S)

    async def load(self, directory: Path, version: int, timeout_s: float, *, flush: bool) -> None:
        """Load weights; ``flush`` drops the cache. After a GenerationError SGLang's weights are unknown."""
        body = {"model_path": str(directory), "weight_version": str(version), "flush_cache": flush}
        path = "/update_weights_from_disk"
        reply = decode_reply(f"SGLang{path}", await self._send(path, body, timeout_s), _Updated)
        if not reply.success:
            raise GenerationError(f"SGLang did not load version {version}: {reply.message}", retryable=True)

    async def renumber(self, version: int) -> None:
        """Call the weights that SGLang has ``version``. Running requests continue, with their earlier versions."""
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._send("/update_weight_version", body)

    async def loads(self, timeout_s: float) -> list[RankLoad]:
        """Return the load of every data-parallel rank. Raises GenerationError if this SGLang does not report it."""
        path = "/v1/loads?include=core"
        return decode_reply(f"SGLang{path}", await self._send(path, None, timeout_s), _Loads).loads

    async def _send(
        self, path: str, body: Any, timeout_s: float = CALL_TIMEOUT_S, on_line: OnLine | None = None
    ) -> bytes:
        """POST ``body`` as JSON, or GET if it is None. Returns the body of the reply, without lines for ``on_line``."""
        try:
            return await self._http.call(self._url + path, body, timeout_s, on_line=on_line)
        except CallFailed as error:
            raise GenerationError(f"SGLang{path}: {error}", retryable=error.status != 400) from error
