"""Client for the part of vLLM's HTTP API that realsys uses: tokens in and out, aborts, weights, metrics."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from realsys.errors import GenerationError
from realsys.generation.child.contract import (
    CALL_TIMEOUT_S,
    PROBE_TIMEOUT_S,
    EngineApi,
    EngineLoad,
    OnReply,
    Piece,
    PieceEnd,
    PieceMeta,
    Reply,
)
from realsys.generation.client import decode_reply
from realsys.generation.protocol import MOST_TOP_LOGPROBS, PauseMode
from realsys.generation.sampling_rules import completion_seed
from realsys.types import FinishReason

#: most log-probs of a token: vLLM counts the sampled token as one of them
MAX_LOGPROBS = MOST_TOP_LOGPROBS + 1
_GENERATE = "/inference/v1/generate"
_RID = "generate-tokens-"  # vLLM puts it in front of the ids of that route
_NO_LOGPROB = -9999.0  # vLLM's word for a log-prob that is not finite
_PROBE = Piece("probe", [0], {"max_new_tokens": 1, "temperature": 0.0})
#: SGLang's name of a parameter -> vLLM's, where they differ
_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}


class _Scored(msgspec.Struct):
    token_id: int
    logprob: float

    @property
    def entry(self) -> tuple[float, int, None]:
        return self.logprob if self.logprob > _NO_LOGPROB else math.nan, self.token_id, None


class _Position(_Scored):
    top_logprobs: list[_Scored] = []


class _LogProbs(msgspec.Struct):
    content: list[_Position]


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _LogProbs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Problem(msgspec.Struct):
    message: str
    code: int = 500


class _Answer(msgspec.Struct):
    """A reply, or one event of a stream: new tokens, or the usage at the end, or an error."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Problem | None = None


class _Received(msgspec.Struct):
    """Why a worker has not received a version; "" if it has."""

    results: list[str]


class _Sampled:
    """One piece, as far as it has arrived."""

    def __init__(self, top: int, on_reply: OnReply | None = None, index: int = 0) -> None:
        self.reply = Reply([], PieceMeta(None, output_top_logprobs=[] if top else None))
        self._top = top
        self._on_reply = on_reply
        self._index = index

    def take_line(self, line: bytes) -> None:
        """Add a line of a stream."""
        data = line.removeprefix(b"data: ")
        if data != line and data != b"[DONE]":
            self.take(decode_reply(f"vLLM{_GENERATE}", data, _Answer))
            if self._on_reply is not None:
                so_far = msgspec.structs.replace(self.reply.meta_info)  # keeps the number of tokens of this event
                self._on_reply(self._index, Reply(self.reply.output_ids, so_far))

    def take(self, answer: _Answer) -> None:
        """Add what an answer brings. Raises GenerationError for an error."""
        if answer.error is not None:
            raise GenerationError(f"vLLM{_GENERATE}: {answer.error.message}", retryable=answer.error.code != 400)
        meta = self.reply.meta_info
        for choice in answer.choices:
            tokens, scored = choice.token_ids or [], choice.logprobs.content if choice.logprobs is not None else []
            self.reply.output_ids += tokens
            meta.output_token_logprobs += [position.entry for position in scored]
            if meta.output_top_logprobs is not None:
                meta.output_top_logprobs += [self._best(position) for position in scored]
            if choice.finish_reason is not None:
                # vLLM names a stop string or token of the request, but not the model's own end of text.
                matched = choice.stop_reason
                if choice.finish_reason == "stop" and matched is None and self.reply.output_ids:
                    matched = self.reply.output_ids[-1]
                meta.finish_reason = PieceEnd(choice.finish_reason, matched)
        meta.completion_tokens = len(self.reply.output_ids)
        if answer.usage is not None and answer.usage.prompt_tokens_details is not None:
            meta.cached_tokens = answer.usage.prompt_tokens_details.cached_tokens or 0

    def _best(self, position: _Position) -> list[tuple[float, int, str | None]]:
        """Return the most probable tokens, which vLLM gives behind the sampled one."""
        ranked = sorted(position.top_logprobs, key=lambda scored: -scored.logprob)
        return [scored.entry for scored in ranked[: self._top]]


class VllmApi(EngineApi):
    """Calls vLLM. Each piece is a request of its own, because the pieces of a trip have different seeds."""

    name = "vLLM"
    field = "generation.backend_args"
    guard = ("--shared", r"/dev/shm/psm_\S+")  # queues between its processes
    whole = True

    async def prepare(self) -> bool:
        """Set the log-probs of its workers, and generate a token: a model that its kernels lack ends it here.

        False, because pieces are returned for an update, so each has one version.
        """
        await self._call_workers("report_trained_logprobs", [], CALL_TIMEOUT_S)
        await self.generate([_PROBE], PROBE_TIMEOUT_S)
        return False

    async def generate(self, pieces: Sequence[Piece], timeout_s: float, on_reply: OnReply | None = None) -> list[Reply]:
        calls = [
            asyncio.ensure_future(self._complete(piece, timeout_s, index, on_reply))
            for index, piece in enumerate(pieces)
        ]
        try:
            return await asyncio.gather(*calls)
        finally:
            for call in calls:  # vLLM ends a request whose connection is closed
                call.cancel()

    async def _complete(self, piece: Piece, timeout_s: float, index: int, on_reply: OnReply | None) -> Reply:
        body = {
            "request_id": piece.rid,
            "token_ids": piece.input_ids,
            "sampling_params": sampling_params(piece),
            "priority": -piece.priority,  # vLLM takes the lowest first
            **({} if piece.namespace is None else {"cache_salt": f"keys-{piece.namespace}"}),
            **({"model": piece.adapter} if piece.adapter else {}),
        }
        sampled = _Sampled(piece.top_logprobs_num, on_reply, index)
        if on_reply is None:
            payload = await self.send(_GENERATE, body, timeout_s)
            sampled.take(decode_reply(f"vLLM{_GENERATE}", payload, _Answer))
        else:
            streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
            await self.send(_GENERATE, streamed, timeout_s, sampled.take_line)
        return sampled.reply

    async def abort(self, rids: Sequence[str]) -> None:
        await self.send("/abort_requests", {"request_ids": [f"{_RID}{rid}" for rid in rids]})

    async def abort_all(self) -> None:
        await self.send("/abort_requests", {"request_ids": []})

    async def pause(self, mode: PauseMode) -> None:
        raise AssertionError("vLLM reports no versions, so its requests are returned before a pause")

    async def resume(self) -> None:
        await self.send("/resume", {})

    async def sleep(self, timeout_s: float) -> None:
        await self.send("/sleep?level=2", {}, timeout_s)  # level 1 would copy the weights to host memory

    async def wake(self, timeout_s: float) -> None:
        await self.send("/wake_up", {}, timeout_s)

    async def drop_cache(self) -> str:
        path = "/reset_prefix_cache"
        reply = decode_reply(f"vLLM{path}", await self.send(path, {}), dict[str, bool])
        return "" if reply.get("success") else f"vLLM{path}: requests are still at work"

    async def load(self, directory: Path, version: int, timeout_s: float, *, flush: bool) -> None:
        """Load weights in a pause of vLLM, which begins with an idle device, and with an empty cache if asked to."""
        await self.send(f"/pause?mode=abort&clear_cache={str(flush).lower()}", {})
        await self._call_workers("load_version", [str(directory)], timeout_s)
        await self.renumber(version)
        await self.resume()

    async def receive(self, order: dict[str, Any], version: int, timeout_s: float, *, flush: bool) -> str:
        """Receive weights in a pause of vLLM. Its workers load them when all of them have all."""
        await self.send(f"/pause?mode=abort&clear_cache={str(flush).lower()}", {})
        reply = await self._call_workers("receive_version", [msgspec.json.encode(order).decode()], timeout_s)
        problem = next(filter(None, decode_reply("vLLM/collective_rpc", reply, _Received).results), "")
        if not problem:
            await self.renumber(version)
        await self.resume()
        return problem

    async def renumber(self, version: int) -> None:
        await self.send("/update_weight_version", {"new_version": str(version)})

    async def load_adapter(self, name: str, directory: Path, timeout_s: float) -> None:
        await self.send("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(directory)}, timeout_s)

    async def unload_adapter(self, name: str) -> None:
        await self.send("/v1/unload_lora_adapter", {"lora_name": name})

    async def _call_workers(self, method: str, arguments: list[str], timeout_s: float) -> bytes:
        return await self.send(
            "/collective_rpc", {"method": method, "args": arguments, "timeout": timeout_s}, timeout_s
        )

    async def read_load(self, timeout_s: float) -> EngineLoad:
        text = (await self.send("/metrics", None, timeout_s)).decode()
        blocks = re.search(r'vllm:cache_config_info{.*block_size="(\d+)".*num_gpu_blocks="(\d+)"', text)
        if blocks is None:
            raise GenerationError("vLLM/metrics: no cache_config_info", retryable=True)
        capacity = int(blocks[1]) * int(blocks[2])
        return EngineLoad(round(_metric(text, "kv_cache_usage_perc") * capacity), capacity, 0)

    async def samples(self, timeout_s: float) -> bool:
        """Request a token. It may wait behind others: then the tokens of those count."""
        try:
            before = await self._sampled_tokens(timeout_s)
            try:
                await self.generate([_PROBE], timeout_s)
                return True
            except GenerationError:
                return await self._sampled_tokens(timeout_s) > before
        except GenerationError:
            return False

    async def _sampled_tokens(self, timeout_s: float) -> float:
        return _metric((await self.send("/metrics", None, timeout_s)).decode(), "generation_tokens_total")


def sampling_params(piece: Piece) -> dict[str, Any]:
    """Return the parameters of a piece with vLLM's names.

    Raises GenerationError for one that has another meaning in vLLM.
    """
    given = dict(piece.sampling_params)
    if given.get("repetition_penalty", 1.0) != 1.0:
        raise GenerationError(
            "sampling_params.repetition_penalty: vLLM would apply it to the prompt, too; leave it at 1"
        )
    for name in ("no_stop_trim", "stream_interval"):  # each token is an event
        given.pop(name, None)
    if (seed := given.pop("sampling_seed", None)) is not None:
        # vLLM begins each request with the first numbers of its seed: the rest of a completion must not repeat them.
        given["seed"] = completion_seed(seed, len(piece.input_ids))
    return {_NAMES.get(name, name): value for name, value in given.items()} | {
        "logprobs": piece.top_logprobs_num + 1 if piece.top_logprobs_num else 0
    }


def _metric(text: str, name: str) -> float:
    """Return the sum of a metric over its engines."""
    return sum(float(value) for value in re.findall(rf"^vllm:{name}{{.*}} (\S+)$", text, re.MULTILINE))
