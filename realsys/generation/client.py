"""Client of a generation server: one shared HTTP session, no retries. No torch.

Retrying is the caller's decision, because only it knows whether another server may take the request over:
``GenerationError.retryable`` tells whether that can help.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import aiohttp
import msgspec
import numpy as np

from realsys.cluster.failpoint import failpoint
from realsys.cluster.fence import CheckAlive, unleased
from realsys.cluster.http.http_client import open_session, read_reply
from realsys.errors import MALFORMED, GenerationError
from realsys.generation.protocol import (
    Acknowledged,
    CompletionReply,
    ErrorReply,
    ModelInfo,
    PauseMode,
    ServerInfo,
    UpdateResult,
)
from realsys.types import F32, I32, FinishReason

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """How to sample: the fields of protocol.SamplingParams. Stop tokens beside the model's own end of text.

    ``new_tokens_per_chunk``: an answer is asked for in pieces of at most that many tokens; 0: in one.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1
    answer_prefix: int = 0
    new_tokens_per_chunk: int = 0

    def params(self, seed: int) -> dict[str, Any]:
        """The ``sampling_params`` of one request; what is off is left out, so that any backend understands it."""
        sent = [field for field in fields(self) if field.name != "new_tokens_per_chunk"]
        changed = {f.name: getattr(self, f.name) for f in sent if getattr(self, f.name) != f.default}
        return {**changed, "sampling_seed": seed}


@dataclass(frozen=True, slots=True)
class Generated:
    """One answer: int32 [T], float32 [T], int32 [T]. A stop token is part of it.

    ``logprobs`` are natural, of the softmax at the request's temperature before top-k and top-p.
    ``versions`` are those of the weights that sampled the tokens, ``route`` (server, tokens) runs of who did.
    """

    tokens: I32
    logprobs: F32
    versions: I32
    finish_reason: FinishReason
    route: tuple[tuple[str, int], ...] = ()


class GenerationClient:
    """Calls generation servers; use within one event loop. ``timeout_s`` bounds a call from start to last byte.

    ``token``: the trial's, without which a server of a trial does nothing; None for one that stands alone.
    ``check_alive`` is asked before every call: one who has lost its lease must not change a server.
    """

    def __init__(
        self,
        timeout_s: float,
        connect_timeout_s: float = 10.0,
        *,
        token: str | None = None,
        check_alive: CheckAlive = unleased,
    ) -> None:
        self._timeout_s, self._check_alive = timeout_s, check_alive
        self._connect_timeout_s = connect_timeout_s
        authorization = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._headers = {"Content-Type": "application/json", **authorization}
        self._session: aiohttp.ClientSession | None = None

    async def generate(
        self, url: str, input_ids: Sequence[int], spec: SamplingSpec, *, rid: str, seed: int
    ) -> list[Generated]:
        """Sample ``spec.n`` answers. Answer k of a seed is the same whatever else the server is doing.

        Raises GenerationError, ``retryable`` unless the server called the request itself wrong.
        """
        body = {
            "input_ids": [int(token) for token in input_ids],
            "sampling_params": spec.params(seed),
            "return_logprob": True,
            "rid": rid,
        }
        kind: Any = list[CompletionReply] | CompletionReply  # a list only when n > 1
        reply = await self._call("POST", url, "/generate", body, kind)
        completions = reply if isinstance(reply, list) else [reply]
        if len(completions) != spec.n:
            raise GenerationError(f"{url}/generate: {len(completions)} answers came back, n={spec.n} asked for")
        return [_generated(url, completion) for completion in completions]

    async def update_weights(self, url: str, path: str, version: int, timeout_s: float) -> UpdateResult:
        """Make the server load ``version`` from ``path``. A refusal is a result with ``success`` False."""
        body = {"model_path": path, "weight_version": str(version)}
        return await self._call("POST", url, "/update_weights_from_disk", body, UpdateResult, timeout_s)

    async def pause(self, url: str, mode: PauseMode) -> None:
        await self._call("POST", url, "/pause_generation", {"mode": mode}, Acknowledged)

    async def resume(self, url: str) -> None:
        await self._call("POST", url, "/continue_generation", {}, Acknowledged)

    async def abort(self, url: str, rid: str) -> None:
        """End a request; its caller gets the tokens so far with finish reason ``abort``. Unknown ids are ignored."""
        await self._call("POST", url, "/abort_request", {"rid": rid}, Acknowledged)

    async def model_info(self, url: str, timeout_s: float | None = None) -> ModelInfo:
        return await self._call("GET", url, "/model_info", None, ModelInfo, timeout_s)

    async def server_info(self, url: str, timeout_s: float | None = None) -> ServerInfo:
        return await self._call("GET", url, "/server_info", None, ServerInfo, timeout_s)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _call(
        self, method: str, url: str, path: str, body: Any, kind: type[T], timeout_s: float | None = None
    ) -> T:
        if self._session is None:
            self._session = open_session(self._headers)
        total = self._timeout_s if timeout_s is None else timeout_s
        timeout = aiohttp.ClientTimeout(total=total, sock_connect=self._connect_timeout_s)
        data = None if body is None else msgspec.json.encode(body)
        fault = failpoint("server.call")
        self._check_alive()
        if fault == "garbage":
            data = b"{\xff"
        try:
            if fault == "drop":
                raise ConnectionResetError("the request was lost")
            for _ in range(1 + (fault == "duplicate")):
                async with self._session.request(method, url + path, data=data, timeout=timeout) as response:
                    status, payload = response.status, await read_reply(response)
            match failpoint("server.reply"):
                case "drop":
                    raise ConnectionResetError("the reply was lost")
                case "garbage":
                    payload = b"{\xff"
        except TimeoutError as error:
            raise GenerationError(f"{url}{path}: no answer within {total:g} s", retryable=True) from error
        except (aiohttp.ClientError, OSError) as error:
            text = str(error) or type(error).__name__
            raise GenerationError(f"{url}{path}: connection failed: {text}", retryable=True) from error
        if status != 200:
            reason = _error_message(payload)
            raise GenerationError(f"{url}{path}: status {status}: {reason}", retryable=status >= 500 or status == 429)
        return decode_reply(url + path, payload, kind)


def decode_reply(where: str, payload: bytes, kind: type[T]) -> T:
    """The body of a reply. Raises GenerationError, retryable, when it is something else."""
    try:
        return msgspec.json.decode(payload, type=kind)
    except MALFORMED as error:
        raise GenerationError(f"{where}: reply cannot be read: {error}", retryable=True) from error


def _generated(url: str, completion: CompletionReply) -> Generated:
    """Arrays of one answer; the counts of tokens, log-probs and versions must agree."""
    meta = completion.meta_info
    entries, segments = meta.output_token_logprobs or [], meta.weight_versions or []
    counts = [count for _, count in segments]
    if min(counts, default=0) < 0 or not len(completion.output_ids) == len(entries) == sum(counts):
        raise GenerationError(
            f"{url}/generate: {len(completion.output_ids)} tokens but {len(entries)} log-probs and versions of {counts}"
        )
    try:
        tokens = np.asarray(completion.output_ids, np.int32)
        logprobs = np.asarray([entry[0] for entry in entries], np.float32)
        versions = np.repeat(np.asarray([int(version) for version, _ in segments], np.int32), counts)
    except (ValueError, OverflowError) as error:  # no number, or one that no token or version has
        raise GenerationError(f"{url}/generate: answer cannot be read: {error}", retryable=True) from error
    return Generated(tokens, logprobs, versions, meta.finish_reason.type)


def _error_message(payload: bytes) -> str:
    try:
        return msgspec.json.decode(payload, type=ErrorReply).error.message
    except MALFORMED:
        return payload[:200].decode("utf-8", "replace") or "no reason given"
