"""A request and its completions while SGLang works on them. Pure bookkeeping.

open completions ──pieces──> SGLang ──replies──> take ──> finished, or open again (interrupted: continues later)

SGLang searches stop strings only in the tokens of one piece. ``take`` finds those that began in earlier tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from realsys.errors import GenerationError
from realsys.generation.backend import Completion, Snapshot
from realsys.generation.protocol import UNSYNCED, SamplingParams, not_default
from realsys.generation.sglang.api import Piece, Reply
from realsys.generation.stop_strings import find_stop, window
from realsys.generation.uniforms import completion_seed
from realsys.types import I32, FinishReason, TopLogprobs

#: A longer completion is sampled in pieces, so that its client has its first tokens before its last. SGLang keeps the
#: cache of a piece, so the next one computes hardly anything again.
PIECE_TOKENS = 4096
_UNNAMED = "default"  # SGLang's name for the weights that it started with
#: parameters that SGLang gets in another form; all others go to it under their own name
_ADAPTED = {
    "max_new_tokens",
    "min_new_tokens",
    "stop",
    "stop_token_ids",
    "n",
    "sampling_seed",
    "answer_prefix",
    "top_logprobs_num",
}


@dataclass(frozen=True, slots=True)
class KeyNamespace:
    """A part of SGLang's cache. Requests in one part share the keys of equal beginnings.

    name    None: the only part, whose keys are dropped when weights are loaded
    oldest  version of its oldest keys
    """

    name: str | None
    oldest: int


@dataclass(slots=True, eq=False)
class PartialCompletion:
    """One completion so far."""

    seed: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    segments: list[tuple[int, int]] = field(default_factory=list)
    kv_segments: list[tuple[int, int]] = field(default_factory=list)  # (version of the oldest keys, tokens) runs
    top: TopLogprobs = field(default_factory=list)
    finish: FinishReason | None = None
    matched: int | str | None = None


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and its completions.

    stops      stop tokens of the request and of the model
    tokenizer  finds stop strings; None if the model has none, then no request has stop strings
    limit      tokens of one piece of a completion
    """

    rid: str
    prompt: I32
    params: SamplingParams
    stops: tuple[int, ...]
    completions: list[PartialCompletion]
    tokenizer: Tokenizer | None = None
    limit: int = PIECE_TOKENS
    aborted: bool = False  # ends with the tokens so far
    recalled: bool = False  # SGLang has to return its pieces early
    rids: list[str] = field(default_factory=list)  # ids of its pieces in SGLang
    trip: asyncio.Future[list[Reply]] | None = None  # pieces in SGLang
    go: asyncio.Future[None] | None = None  # while it is held back; resolved when it may be sent to SGLang
    keys: KeyNamespace | None = None  # whose keys it may use, from its first trip on
    sent_at: int = UNSYNCED  # version that SGLang had when its pieces were sent

    @classmethod
    def of(
        cls,
        rid: str,
        prompt: I32,
        params: SamplingParams,
        stops: tuple[int, ...],
        seed: int,
        tokenizer: Tokenizer | None = None,
    ) -> Request:
        return cls(
            rid,
            prompt,
            params,
            stops,
            [PartialCompletion(completion_seed(seed, k)) for k in range(params.n)],
            tokenizer,
        )

    def let_go(self, error: Exception | None = None) -> None:
        """If the request is held back, let it continue, or fail with ``error``."""
        if self.go is not None and not self.go.done():
            self.go.set_result(None) if error is None else self.go.set_exception(error)

    @property
    def open(self) -> list[PartialCompletion]:
        return [completion for completion in self.completions if completion.finish is None]

    def pieces(self, serials: Iterator[int]) -> list[Piece]:
        """Return the rest of the work, in SGLang's form."""
        prompt: list[int] = self.prompt.tolist()
        namespace = self.keys.name if self.keys is not None else None
        # All ids have one width, because SGLang aborts every request whose id begins with the given one.
        pieces = [
            Piece(
                f"{next(serials):012d}",
                prompt + completion.tokens,
                self._sampling(completion),
                self.params.top_logprobs_num,
                namespace,
            )
            for completion in self.open
        ]
        self.rids = [piece.rid for piece in pieces]
        return pieces

    def take(self, replies: Sequence[Reply], version: int | None) -> None:
        """Add the replies for the open completions. ``version`` of all tokens; None: it is in the replies.

        Raises GenerationError if the numbers of tokens, log-probs and versions differ.
        """
        for completion, reply in zip(self.open, replies, strict=True):
            count = len(reply.output_ids)
            segments = [(version, count)] if version is not None else _segments(reply)
            logprobs, top = reply.logprobs, reply.top
            if not count == len(logprobs) == sum(length for _, length in segments):
                raise GenerationError(
                    f"SGLang gave {count} tokens with {len(logprobs)} log-probs and versions {segments}", retryable=True
                )
            if self.params.top_logprobs_num and len(top) != count:
                raise GenerationError(
                    f"SGLang gave {count} tokens with {len(top)} lists of top log-probs", retryable=True
                )
            begin = len(completion.tokens)
            completion.tokens += reply.output_ids
            completion.logprobs += logprobs
            completion.top += top
            completion.segments = _joined(completion.segments + segments)
            completion.kv_segments = _joined(completion.kv_segments + self._oldest_keys(reply, segments))
            self._finish(completion, reply)
            self._cut(completion, begin)

    def snapshot(self, moved: int) -> Snapshot:
        """Return its results as an abort would give them now."""
        running = frozenset(k for k, completion in enumerate(self.completions) if completion.finish is None)
        return Snapshot(self.results(), running, moved)

    def results(self) -> list[Completion]:
        return [
            Completion(
                np.asarray(completion.tokens, np.int32),
                np.asarray(completion.logprobs, np.float32),
                completion.segments,
                completion.finish or "abort",
                completion.matched,
                None if completion.kv_segments == completion.segments else completion.kv_segments,
                top=list(completion.top) if self.params.top_logprobs_num else None,
            )
            for completion in self.completions
        ]

    def _oldest_keys(self, reply: Reply, segments: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the oldest version of the keys that the tokens of a piece may have attended to, as runs.

        SGLang does not tell which version computed a key. A cached one may be as old as its namespace; all others are
        not older than the piece.
        """
        if self.keys is None or self.keys.name is None:
            return segments  # every load drops all keys
        oldest = self.keys.oldest if reply.meta_info.cached_tokens else self.sent_at
        return [(min(oldest, version), count) for version, count in segments]

    def _finish(self, completion: PartialCompletion, reply: Reply) -> None:
        finish = reply.meta_info.finish_reason
        full = finish.type == "length" and len(reply.output_ids) >= self.limit  # else SGLang's context is full
        if full and len(completion.tokens) < self.params.max_new_tokens:
            return
        if finish.type != "abort":
            completion.finish = finish.type
            # A list is for stop tokens that match only together. realsys sends none, so the last token names it.
            completion.matched = completion.tokens[-1] if isinstance(finish.matched, list) else finish.matched
        elif len(completion.tokens) >= self.params.max_new_tokens:
            completion.finish = "length"
        elif self.aborted or not self.recalled:
            completion.finish = "abort"

    def _cut(self, completion: PartialCompletion, begin: int) -> None:
        """Cut the completion after a stop string that began before ``begin``, the first token of this piece."""
        earlier: list[int] = self.prompt[len(self.prompt) - self.params.answer_prefix :].tolist()
        if self.tokenizer is None or not self.params.stop or not begin + len(earlier):
            return
        text, reach = earlier + completion.tokens, window(self.params.stop)
        first = max(begin + 1, self.params.min_new_tokens)
        for count in range(first, min(len(completion.tokens), begin + reach) + 1):
            end = len(earlier) + count
            if (match := find_stop(self.tokenizer, text[max(0, end - reach) : end], self.params.stop)) is not None:
                del completion.tokens[count:], completion.logprobs[count:], completion.top[count:]
                completion.segments = _first(completion.segments, count)
                completion.kv_segments = _first(completion.kv_segments, count)
                completion.finish, completion.matched = "stop", match
                return

    def _sampling(self, completion: PartialCompletion) -> dict[str, Any]:
        done = len(completion.tokens)
        sampling = {name: value for name, value in not_default(self.params).items() if name not in _ADAPTED}
        sampling["max_new_tokens"] = min(self.limit, self.params.max_new_tokens - done)
        if self.params.min_new_tokens > done:
            sampling["min_new_tokens"] = min(self.limit, self.params.min_new_tokens - done)
        if self.params.stop:
            sampling["stop"] = list(self.params.stop)
        if self.stops:
            sampling["stop_token_ids"] = list(self.stops)
        return {**sampling, "sampling_seed": completion.seed, "no_stop_trim": True}


def _segments(reply: Reply) -> list[tuple[int, int]]:
    spans = reply.meta_info.weight_versions
    if spans is None:
        raise GenerationError(
            "SGLang gave a completion without weight_versions, although it reports them", retryable=True
        )
    return [
        (UNSYNCED if span.version == _UNNAMED else int(span.version), span.end - span.start)
        for span in spans
        if span.end > span.start
    ]


def _first(segments: Sequence[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """Return the segments of the first ``count`` tokens."""
    kept: list[tuple[int, int]] = []
    for version, length in segments:
        kept.append((version, min(length, count)))
        count -= kept[-1][1]
    return _joined(kept)


def _joined(segments: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge neighbours of the same version and drop empty segments."""
    joined: list[tuple[int, int]] = []
    for version, count in segments:
        if not count:
            continue
        if joined and joined[-1][0] == version:
            count += joined.pop()[1]
        joined.append((version, count))
    return joined
