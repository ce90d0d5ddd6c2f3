"""HTTP messages between a generation server and its clients: the part of SGLang's API that realsys uses.

    POST /generate                   GenerateRequest -> CompletionReply, or a list of them when n > 1;
                                     with progress_s or stream, lines of ProgressLine before it
    POST /update_weights_from_disk   UpdateRequest   -> UpdateResult
    POST /pause_generation           PauseRequest    -> Acknowledged     POST /continue_generation
    POST /release_memory_occupation  Nothing         -> Acknowledged     POST /resume_memory_occupation
    POST /abort_request              AbortRequest    -> Acknowledged     POST /flush_cache
    GET  /health /model_info /server_info

No torch here. Unknown fields are refused: a misspelt parameter must not silently sample from another distribution.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from realsys.types import LOWEST_TEMPERATURE, FinishReason, TopLogprobs, is_temperature

PauseMode = Literal["abort", "retract", "in_place"]
LOWEST_PENALTY = 1e-3
MOST_TOP_LOGPROBS = 20
CONTINUES = 1  # priority of a request that continues a completion or an episode; a new prompt has 0
#: version of a server that has not loaded published weights yet
UNSYNCED = -1
UNNAMED = "default"  # SGLang's name for the weights that it started with


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sampling parameters of one request, with SGLang's names and meanings (docs/generation.md defines them).

    temperature 0 means greedy; top_k -1 means off. Penalties and stop strings apply to the tokens of the
    completion only. ``answer_prefix`` is not part of SGLang's API: that number of the last input_ids are
    earlier tokens of this completion, which continues here. They count for penalties and stop strings,
    but not for min_new_tokens and max_new_tokens. ``top_logprobs_num`` is a field of the request in SGLang's API:
    the reply has that many most probable tokens for each token, with their log-probs. ``structural_tag`` is the grammar
    of the completion, as JSON of xgrammar: tokens that break it are not sampled, and the log-probs are of what is left.
    ``priority`` is a field of the request in SGLang's API, too: of the requests that wait, those with a higher one are
    first. It does not interrupt running ones.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1
    sampling_seed: int | None = None
    answer_prefix: int = 0
    top_logprobs_num: int = 0
    structural_tag: str = ""
    priority: int = 0

    @property
    def penalised(self) -> bool:
        """True if the tokens of a completion change the probabilities of its next token."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def problem(self) -> str | None:
        """Describe in one line the first value that is not allowed; None if all are."""
        limits: tuple[tuple[str, object, bool, str], ...] = (
            (
                "temperature",
                self.temperature,
                is_temperature(self.temperature),
                f"0 (the most probable token), or finite and at least {LOWEST_TEMPERATURE:g}",
            ),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k, self.top_k == -1 or self.top_k >= 1, "-1 (off) or at least 1"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "in [0, 1]"),
            (
                "repetition_penalty",
                self.repetition_penalty,
                LOWEST_PENALTY <= self.repetition_penalty <= 2,
                f"from {LOWEST_PENALTY:g} to 2, 1 is off",
            ),
            ("presence_penalty", self.presence_penalty, -2 <= self.presence_penalty <= 2, "in [-2, 2], 0 is off"),
            ("frequency_penalty", self.frequency_penalty, -2 <= self.frequency_penalty <= 2, "in [-2, 2], 0 is off"),
            ("max_new_tokens", self.max_new_tokens, self.max_new_tokens >= 1, "at least 1"),
            (
                "min_new_tokens",
                self.min_new_tokens,
                0 <= self.min_new_tokens <= self.max_new_tokens,
                f"from 0 to max_new_tokens={self.max_new_tokens}",
            ),
            ("stop", list(self.stop), all(self.stop), "strings of at least one character"),
            ("n", self.n, self.n >= 1, "at least 1"),
            ("answer_prefix", self.answer_prefix, self.answer_prefix >= 0, "at least 0"),
            (
                "top_logprobs_num",
                self.top_logprobs_num,
                0 <= self.top_logprobs_num <= MOST_TOP_LOGPROBS,
                f"from 0 to {MOST_TOP_LOGPROBS}",
            ),
        )
        for name, value, good, allowed in limits:
            if not good:
                return f"sampling_params.{name}={value}: must be {allowed}"
        return None


@functools.cache
def _defaults(kind: type[SamplingParams]) -> dict[str, Any]:
    return msgspec.structs.asdict(kind())


def not_default(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that differ from their defaults, by name."""
    defaults = _defaults(type(params)).items()
    return {name: value for name, default in defaults if (value := getattr(params, name)) != default}


class AdapterWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Weights of one request that are not those in training: a version that the weight transport has under ``locator``.

    ``key``: name of these weights, the same for all their requests. ``version`` is in the reply.
    """

    key: str
    version: int
    locator: str


class GenerateRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of /generate. ``rid`` names the request for /abort_request; the server chooses one if it is empty.

    ``progress_s`` is not part of SGLang's API: a reply that takes longer begins with a ProgressLine for every
    ``progress_s`` seconds in which something moved; 0: no lines. With ``stream``, which also needs ``progress_s``,
    there is a line as soon as there are new tokens; SGLang has another form of stream. ``adapter`` is not
    part of SGLang's API: the weights that sample this request; None: those that the server has loaded.
    """

    input_ids: list[int]
    sampling_params: SamplingParams = SamplingParams()
    return_logprob: bool = False
    rid: str = ""
    progress_s: float = 0.0
    stream: bool = False
    adapter: AdapterWeights | None = None


class Finish(msgspec.Struct, omit_defaults=True):
    """Reason for the end of a completion.

    ``matched`` is the stop token or the stop string, ``length`` the limit that was reached.
    """

    type: FinishReason
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None


class MetaInfo(msgspec.Struct, omit_defaults=True):
    """Facts about one completion.

    weight_versions  (version, tokens) runs over the output tokens, in order
    kv_versions      such runs of the oldest keys that each token attended to; absent if those of weight_versions
    output_top_logprobs  the ``top_logprobs_num`` most probable tokens at each output token, most probable first
    """

    id: str
    finish_reason: Finish
    prompt_tokens: int
    completion_tokens: int
    weight_version: str
    weight_versions: list[tuple[str, int]] | None = None
    kv_versions: list[tuple[str, int]] | None = None
    output_token_logprobs: list[tuple[float, int, str | None]] | None = None
    output_top_logprobs: list[list[tuple[float, int, str | None]]] | None = None


class CompletionReply(msgspec.Struct):
    """One completion. ``output_ids`` include a stop token, or the tokens of a stop string."""

    output_ids: list[int]
    meta_info: MetaInfo


class ProgressPart(msgspec.Struct, array_like=True):
    """Tokens of completion ``index`` from its ``begin``-th on. ``finish``: its finish reason, or None while it runs.

    ``kv_versions``: as in MetaInfo, of these tokens. ``top``: (token, log-prob) of the most probable tokens at each.
    """

    index: int
    begin: int
    output_ids: list[int]
    logprobs: list[float]
    weight_versions: list[tuple[str, int]]
    finish: FinishReason | None = None
    kv_versions: list[tuple[str, int]] | None = None
    top: TopLogprobs | None = None


class ProgressLine(msgspec.Struct, omit_defaults=True):
    """A line before the reply of /generate: new tokens, or the error that replaces the reply.

    No parts: the request waits, and the server works on others. ``status``: HTTP status of the error.
    """

    parts: list[ProgressPart] = []
    status: int = 0
    message: str = ""


class UpdateRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of /update_weights_from_disk."""

    model_path: str
    weight_version: str
    abort_all_requests: bool = False
    sources: list[str] = []  # services of other hosts that have a copy of the version
    older: bool = False  # it may be older than the one before; others are refused then


class UpdateResult(msgspec.Struct):
    """Result of a weight update, with ``timings`` in seconds and ``counts``.

    stage_s, verify_s, drain_s  while decoding continues
    pause_s                     the whole pause, of which load_s swaps the weights
    first_token_s               from the swap to the first token of the new version; absent if no completion
                                was running. The KV cache of interrupted completions is recomputed between
                                decoding steps.
    counts                      bytes of all tensors, bytes_read of them, and the number of tensors that were
                                read whole, changed (a delta), or kept
    """

    success: bool
    message: str
    timings: dict[str, float] = {}
    counts: dict[str, int] = {}


class PauseRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of /pause_generation."""

    mode: PauseMode = "abort"


class AbortRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of /abort_request: one request, or all."""

    rid: str = ""
    abort_all: bool = False


class Nothing(msgspec.Struct, frozen=True):
    """Body of calls without parameters."""


class Acknowledged(msgspec.Struct):
    """Reply of calls without a result."""

    success: bool = True
    message: str = ""


class ModelInfo(msgspec.Struct):
    """Reply of /model_info. ``weight_version`` is the version that samples now; "-1" before the first update."""

    model_path: str
    weight_version: str
    tokenizer_path: str = ""
    is_generation: bool = True


class ServerInfo(msgspec.Struct):
    """Reply of /server_info: limits, load and counters."""

    backend: str
    weight_version: str
    context_length: int
    max_running: int
    max_queued: int
    running: int
    queued: int
    kv_tokens: int  # cached now
    kv_capacity: int
    generated_tokens: int  # since start
    steps: int
    updates: int
    paused: bool
    busy_s: float  # seconds spent in steps since start
    retained_tokens: int = 0  # cached now, of completions that have ended; not in kv_tokens, because they give way
    prefilled_tokens: int = 0  # since start; an engine without a count has 0
    reused_tokens: int = 0  # found in the cache instead of prefilled; hit rate: reused / (reused + prefilled)
    evicted_tokens: int = 0  # those of prefilled_tokens that a larger cache would still have had, at least
    memory_bytes: int = 0  # resident now: this process, and those that the engine has started
    gpu_peak_bytes: int = 0  # most that torch has held on one GPU of this process; 0 without, and for SGLang


class ErrorDetail(msgspec.Struct):
    """Content of an ErrorReply."""

    message: str


class ErrorReply(msgspec.Struct):
    """Body of every reply that is not 2xx."""

    error: ErrorDetail


def parse_version(text: str) -> int:
    """Return the number in a ``weight_version``. Raises ValueError if it is none."""
    try:
        version = int(text)
    except ValueError:
        version = -1
    if version < 0:
        raise ValueError(f"weight_version={text!r}: must be a version number, 0 or more")
    return version


def segments_of(versions: Sequence[tuple[int, int]]) -> list[tuple[str, int]]:
    """Convert (version, count) segments to their wire form."""
    return [(str(version), count) for version, count in versions]
