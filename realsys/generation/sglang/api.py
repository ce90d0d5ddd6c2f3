"""Client for the part of SGLang's HTTP API that realsys uses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from realsys.cluster.http_client import CallFailed
from realsys.errors import GenerationError
from realsys.generation.child.contract import (
    CALL_TIMEOUT_S,
    PROBE_TIMEOUT_S,
    EngineApi,
    EngineLoad,
    OnReply,
    Piece,
    PieceMeta,
    Reply,
)
from realsys.generation.client import decode_reply
from realsys.generation.protocol import PauseMode
from realsys.weights.inside import UNDONE

T = TypeVar("T")


class _Problem(msgspec.Struct):
    message: str
    code: int = 0


class _Event(msgspec.Struct):
    """One event of a stream: new tokens of piece ``index``, or an error of all pieces."""

    output_ids: list[int] = []
    meta_info: PieceMeta | None = None
    index: int = 0
    error: _Problem | None = None


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
        before = self.replies[event.index] or Reply([], PieceMeta(None))
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


class _RankLoad(msgspec.Struct):
    """Load of one data-parallel rank. SGLang publishes it from time to time, not with every step."""

    num_used_tokens: int = 0
    max_total_num_tokens: int = 0
    max_running_requests: int = 0


class _Loads(msgspec.Struct):
    loads: list[_RankLoad]


class _Updated(msgspec.Struct):
    success: bool
    message: str = ""


class SglangApi(EngineApi):
    """Calls SGLang. One request of it has all pieces of a trip."""

    name = "SGLang"
    field = "generation.sglang"
    guard = ("--shared", r"/dev/shm/sglang_loads_\S+")  # its processes publish their load there, and never remove it

    async def prepare(self) -> bool:
        """Generate one token. Returns True if its version is in the reply: SGLang 0.5.18 and newer tell it."""
        piece = Piece("probe", [0], {"max_new_tokens": 1, "temperature": 0.0})
        [reply] = await self.generate([piece], PROBE_TIMEOUT_S)
        return reply.meta_info.weight_versions is not None

    async def generate(self, pieces: Sequence[Piece], timeout_s: float, on_reply: OnReply | None = None) -> list[Reply]:
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
        if pieces[0].adapter:
            body["lora_path"] = pieces[0].adapter  # SGLang's word for its name
        if on_reply is None:
            replies = decode_reply("SGLang/generate", await self.send("/generate", body, timeout_s), list[Reply])
        else:
            stream = _Stream(len(pieces), on_reply)
            await self.send("/generate", {**body, "stream": True}, timeout_s, stream.take)
            replies = [reply for reply in stream.replies if reply is not None]
        if len(replies) != len(pieces):
            raise GenerationError(f"SGLang gave {len(replies)} completions for {len(pieces)} prompts", retryable=True)
        return replies

    async def abort(self, rids: Sequence[str]) -> None:
        """End requests. SGLang silently ignores the abort of a request that it has not read yet."""
        await asyncio.gather(*(self.send("/abort_request", {"rid": rid}) for rid in rids))

    async def abort_all(self) -> None:
        await self.send("/abort_request", {"rid": "", "abort_all": True})

    async def pause(self, mode: PauseMode) -> None:
        await self.send("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self.send("/continue_generation", {})

    async def sleep(self, timeout_s: float) -> None:
        await self.send("/release_memory_occupation", {}, timeout_s)

    async def wake(self, timeout_s: float) -> None:
        await self.send("/resume_memory_occupation", {}, timeout_s)

    async def drop_cache(self) -> str:
        """Drop the cache. A load that meets a request would end SGLang, because it cannot drop the cache."""
        try:
            await self._http.call(self._url + "/flush_cache", {}, CALL_TIMEOUT_S)
            return ""
        except CallFailed as error:
            if error.status == 400:
                return f"SGLang/flush_cache: {error}"
            raise GenerationError(f"SGLang/flush_cache: {error}", retryable=True) from error

    async def load(self, directory: Path, version: int, timeout_s: float, *, flush: bool) -> None:
        body = {"model_path": str(directory), "weight_version": str(version), "flush_cache": flush}
        path = "/update_weights_from_disk"
        reply = decode_reply(f"SGLang{path}", await self.send(path, body, timeout_s), _Updated)
        if not reply.success:
            raise GenerationError(f"SGLang did not load version {version}: {reply.message}", retryable=True)

    async def receive(self, order: dict[str, Any], version: int, timeout_s: float, *, flush: bool) -> str:
        """Receive weights in an update session. Its plugin takes ``load_format=realsys``."""
        try:
            await self._http.call(self._url + "/begin_weight_update", {}, CALL_TIMEOUT_S)
        except CallFailed as error:
            if error.status == 404:
                return "this SGLang has no update sessions: install a newer one, or set weights.transport=memory"
            raise GenerationError(f"SGLang/begin_weight_update: {error}", retryable=True) from error
        body: dict[str, Any] = {
            "names": [],
            "dtypes": [],
            "shapes": [],
            "group_name": msgspec.json.encode(order).decode(),
        }
        body |= {"load_format": "realsys", "weight_version": str(version), "flush_cache": flush}
        try:
            await self.send("/update_weights_from_distributed", body, timeout_s)  # a failed load has status 400
        except GenerationError as error:
            if not str(error).endswith(UNDONE):
                raise
            return str(error)
        finally:
            await self.send("/end_weight_update", {})
        return ""

    async def renumber(self, version: int) -> None:
        body = {"new_version": str(version), "abort_all_requests": False}
        await self.send("/update_weight_version", body)

    async def load_adapter(self, name: str, directory: Path, timeout_s: float) -> None:
        await self.send("/load_lora_adapter", {"lora_name": name, "lora_path": str(directory)}, timeout_s)

    async def unload_adapter(self, name: str) -> None:
        await self.send("/unload_lora_adapter", {"lora_name": name})

    async def read_load(self, timeout_s: float) -> EngineLoad:
        path = "/v1/loads?include=core"
        ranks = decode_reply(f"SGLang{path}", await self.send(path, None, timeout_s), _Loads).loads
        return EngineLoad(
            sum(rank.num_used_tokens for rank in ranks),
            sum(rank.max_total_num_tokens for rank in ranks),
            sum(rank.max_running_requests for rank in ranks),
        )

    async def samples(self, timeout_s: float) -> bool:
        """Return True if SGLang samples. Its own limit on the call is 20 s."""
        return await self._http.answers(f"{self._url}/health_generate", timeout_s)
