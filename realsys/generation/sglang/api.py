"""The part of SGLang's HTTP API that is used here, and what its replies mean. One client per run of the server.

A reply is read by name and tolerantly: SGLang adds fields with every version. What is missing although we rely on it
is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec

from realsys.cluster.http.http_client import read_reply
from realsys.errors import MALFORMED, GenerationError
from realsys.generation.protocol import PauseMode
from realsys.types import FinishReason

T = TypeVar("T")

CALL_TIMEOUT_S = 30.0  # of calls that do not generate


class Span(msgspec.Struct):
    """Output tokens start..end-1 were sampled by weights ``version``."""

    version: str
    start: int
    end: int


class _Finish(msgspec.Struct):
    type: FinishReason
    matched: int | str | list[int] | None = None
    message: str | None = None


class _Meta(msgspec.Struct):
    finish_reason: _Finish
    output_token_logprobs: list[tuple[float, int, str | None]] = []
    weight_versions: list[Span] | None = None


class Reply(msgspec.Struct):
    """One answer, or one piece of it. A stop token is part of ``output_ids``."""

    output_ids: list[int]
    meta_info: _Meta

    @property
    def logprobs(self) -> list[float]:
        return [entry[0] for entry in self.meta_info.output_token_logprobs]


class Load(msgspec.Struct):
    """Of one data-parallel rank. SGLang publishes it now and then, not with every step."""

    num_used_tokens: int = 0
    max_total_num_tokens: int = 0
    max_running_requests: int = 0


class _Loads(msgspec.Struct):
    loads: list[Load]


class _Updated(msgspec.Struct):
    success: bool
    message: str = ""


class _ErrorDetail(msgspec.Struct):
    message: str = ""


class _Error(msgspec.Struct):
    error: _ErrorDetail | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """One prompt to complete. ``rid``: no other's may begin with it, as SGLang aborts by prefix."""

    rid: str
    input_ids: list[int]
    sampling_params: dict[str, Any]


class SglangApi:
    """Calls one server. Every failure is a retryable GenerationError, except a request that SGLang calls wrong."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url

    async def generate(self, pieces: Sequence[Piece], timeout_s: float) -> list[Reply]:
        """Complete all in one request; returns when the last is done."""
        body = {
            "rid": [piece.rid for piece in pieces],
            "input_ids": [piece.input_ids for piece in pieces],
            "sampling_params": [piece.sampling_params for piece in pieces],
            "return_logprob": True,
        }
        replies = _decode("/generate", await self._send("/generate", body, timeout_s), list[Reply])
        if len(replies) != len(pieces):
            raise GenerationError(f"SGLang gave {len(replies)} answers to {len(pieces)} prompts", retryable=True)
        return replies

    async def abort(self, rids: Sequence[str]) -> None:
        """End requests. SGLang ignores one that it has not read yet, and says nothing about it."""
        for rid in rids:
            await self._send("/abort_request", {"rid": rid})

    async def abort_all(self) -> None:
        await self._send("/abort_request", {"rid": "", "abort_all": True})

    async def pause(self, mode: PauseMode) -> None:
        await self._send("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._send("/continue_generation", {})

    async def load(self, directory: Path, version: int, timeout_s: float) -> None:
        """Load weights and drop the cache. Raises GenerationError when it did not: what it then serves is unknown."""
        body = {"model_path": str(directory), "weight_version": str(version), "flush_cache": True}
        reply = _decode(
            "/update_weights_from_disk", await self._send("/update_weights_from_disk", body, timeout_s), _Updated
        )
        if not reply.success:
            raise GenerationError(f"SGLang did not load version {version}: {reply.message}", retryable=True)

    async def loads(self, timeout_s: float) -> list[Load]:
        """Of every data-parallel rank. Raises GenerationError where this version does not tell."""
        path = "/v1/loads?include=core"
        return _decode(path, await self._send(path, None, timeout_s), _Loads).loads

    async def _send(self, path: str, body: Any, timeout_s: float = CALL_TIMEOUT_S) -> bytes:
        """POST ``body`` as JSON, or GET when there is none; the reply's bytes."""
        method, data = ("GET", None) if body is None else ("POST", msgspec.json.encode(body))
        try:
            async with self._session.request(
                method,
                self._url + path,
                data=data,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
                headers={"Content-Type": "application/json"},
            ) as response:
                payload, status = await read_reply(response), response.status
        except TimeoutError as error:
            raise GenerationError(f"SGLang{path}: no answer within {timeout_s:g} s", retryable=True) from error
        except (aiohttp.ClientError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise GenerationError(f"SGLang{path}: connection failed: {reason}", retryable=True) from error
        if status != 200:
            raise GenerationError(f"SGLang{path}: status {status}: {_reason(payload)}", retryable=status != 400)
        return payload


def _decode(path: str, payload: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(payload, type=kind)
    except MALFORMED as error:
        raise GenerationError(f"SGLang{path}: reply cannot be read: {error}", retryable=True) from error


def _reason(payload: bytes) -> str:
    """The message of an error reply, in one line."""
    try:
        error = msgspec.json.decode(payload, type=_Error)
    except MALFORMED:
        text = payload[:300].decode("utf-8", "replace")
    else:
        text = (error.error.message if error.error is not None else error.message) or ""
    return " ".join(text.split()) or "no reason given"
