"""Client of a generation server: one shared HTTP session, no retries. No torch.

Retrying is the caller's decision, because only it knows whether another server may take the request over:
``GenerationError.retryable`` tells whether that can help.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np

from realsys.cluster.failpoint import failpoint
from realsys.cluster.fence import CheckAlive, unleased
from realsys.cluster.http.http_client import CallFailed, HttpClient
from realsys.errors import MALFORMED, GenerationError
from realsys.generation.protocol import (
    Acknowledged,
    CompletionReply,
    ModelInfo,
    PauseMode,
    SamplingParams,
    ServerInfo,
    UpdateResult,
    not_default,
)
from realsys.types import F32, I32, FinishReason

T = TypeVar("T")


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
    """One completion: int32 [T], float32 [T], int32 [T]. A stop token is part of it.

    ``logprobs`` are natural, of the softmax at the request's temperature before top-k and top-p.
    ``versions`` are those of the weights that sampled the tokens, ``route`` (server, tokens) runs of the servers.
    """

    tokens: I32
    logprobs: F32
    versions: I32
    finish_reason: FinishReason
    route: tuple[tuple[str, int], ...] = ()


class GenerationClient:
    """Calls generation servers, within one event loop.

    timeout_s    bounds a call from start to last byte
    token        of the trial, which its servers require; None for a server without a trial
    check_alive  is called before every call: a process without its lease must not change a server
    """

    def __init__(
        self,
        timeout_s: float,
        connect_timeout_s: float = 10.0,
        *,
        token: str | None = None,
        check_alive: CheckAlive = unleased,
    ) -> None:
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._http = HttpClient(token, check_alive=check_alive, faults=_faults)

    async def generate(
        self, url: str, input_ids: Sequence[int], spec: SamplingSpec, *, rid: str, seed: int
    ) -> list[Generated]:
        """Sample ``spec.n`` completions. Completion k of a seed does not depend on the load of the server.

        Raises GenerationError, ``retryable`` unless the request itself is wrong.
        """
        body = {
            "input_ids": [int(token) for token in input_ids],
            "sampling_params": spec.params(seed),
            "return_logprob": True,
            "rid": rid,
        }
        kind: Any = list[CompletionReply] | CompletionReply  # a list only when n > 1
        reply = await self._call(url, "/generate", body, kind)
        completions = reply if isinstance(reply, list) else [reply]
        if len(completions) != spec.n:
            raise GenerationError(
                f"{url}/generate: {len(completions)} completions came back, requested were n={spec.n}"
            )
        return [_generated(url, completion) for completion in completions]

    async def update_weights(self, url: str, path: str, version: int, timeout_s: float) -> UpdateResult:
        """Make the server load ``version`` from ``path``. A refusal is a result with ``success`` False."""
        body = {"model_path": path, "weight_version": str(version)}
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

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def _call(self, url: str, path: str, body: Any, kind: type[T], timeout_s: float | None = None) -> T:
        total = self._timeout_s if timeout_s is None else timeout_s
        try:
            payload = await self._http.call(url + path, body, total, self._connect_timeout_s)
        except CallFailed as error:
            retryable = error.status in (0, 429) or error.status >= 500
            raise GenerationError(f"{url}{path}: {error}", retryable=retryable) from error
        return decode_reply(url + path, payload, kind)


def _faults(replied: bool) -> str:
    return failpoint("server.reply") if replied else failpoint("server.call")


def decode_reply(where: str, payload: bytes, kind: type[T]) -> T:
    """Decode the body of a reply. Raises a retryable GenerationError for anything else."""
    try:
        return msgspec.json.decode(payload, type=kind)
    except MALFORMED as error:
        raise GenerationError(f"{where}: reply cannot be read: {error}", retryable=True) from error


def _generated(url: str, completion: CompletionReply) -> Generated:
    """Return the arrays of one completion. The counts of tokens, log-probs and versions must agree."""
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
    except (ValueError, OverflowError) as error:  # not a number, or out of the range of tokens or versions
        raise GenerationError(f"{url}/generate: completion cannot be read: {error}", retryable=True) from error
    return Generated(tokens, logprobs, versions, meta.finish_reason.type)
