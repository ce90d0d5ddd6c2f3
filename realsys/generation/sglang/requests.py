"""A request and its answers while SGLang works on them. Pure bookkeeping.

open answers ──pieces──> SGLang ──replies──> take ──> finished, or open again (interrupted: goes on from its tokens)

SGLang looks for stop strings in what one piece has sampled. One that began in the tokens before is found in ``take``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from realsys.errors import GenerationError
from realsys.generation.backend import Completion
from realsys.generation.protocol import UNSYNCED, SamplingParams
from realsys.generation.sglang.api import Piece, Reply
from realsys.generation.stop_strings import find_stop, window
from realsys.generation.uniforms import completion_seed
from realsys.types import I32, FinishReason

_UNNAMED = "default"  # SGLang's name for the weights that it started with
_AS_IN_SGLANG = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_DEFAULTS = SamplingParams()


@dataclass(slots=True, eq=False)
class Answer:
    """One answer so far."""

    seed: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    segments: list[tuple[int, int]] = field(default_factory=list)
    finish: FinishReason | None = None
    matched: int | str | None = None


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and the answers asked for. ``stops``: its stop tokens with the model's own.

    ``tokenizer``: for stop strings; none, and there are none.
    """

    rid: str
    prompt: I32
    params: SamplingParams
    stops: tuple[int, ...]
    answers: list[Answer]
    tokenizer: Tokenizer | None = None
    aborted: bool = False  # ends with what it has
    recalled: bool = False  # SGLang was asked to give back what is under way
    rids: list[str] = field(default_factory=list)  # of the pieces under way
    trip: asyncio.Future[list[Reply]] | None = None  # under way in SGLang
    go: asyncio.Future[None] | None = None  # held back: resolved when it may go to SGLang

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
        return cls(rid, prompt, params, stops, [Answer(completion_seed(seed, k)) for k in range(params.n)], tokenizer)

    @property
    def open(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.finish is None]

    def pieces(self, serials: Iterator[int]) -> list[Piece]:
        """What is left to do, as SGLang is asked for it."""
        prompt: list[int] = self.prompt.tolist()
        # Of one width: SGLang aborts every request whose id begins with the one it is given.
        pieces = [
            Piece(f"{next(serials):012d}", prompt + answer.tokens, self._sampling(answer)) for answer in self.open
        ]
        self.rids = [piece.rid for piece in pieces]
        return pieces

    def take(self, replies: Sequence[Reply], version: int | None) -> None:
        """Add what came back for the open answers. ``version`` of all tokens; None: the replies tell.

        Raises GenerationError when tokens, log-probs and versions do not match up.
        """
        for answer, reply in zip(self.open, replies, strict=True):
            count = len(reply.output_ids)
            segments = [(version, count)] if version is not None else _segments(reply)
            logprobs = reply.logprobs
            if not count == len(logprobs) == sum(length for _, length in segments):
                raise GenerationError(
                    f"SGLang gave {count} tokens with {len(logprobs)} log-probs and versions {segments}", retryable=True
                )
            begin = len(answer.tokens)
            answer.tokens += reply.output_ids
            answer.logprobs += logprobs
            answer.segments = _joined(answer.segments + segments)
            self._finish(answer, reply)
            self._cut(answer, begin)

    def results(self) -> list[Completion]:
        return [
            Completion(
                np.asarray(answer.tokens, np.int32),
                np.asarray(answer.logprobs, np.float32),
                answer.segments,
                answer.finish or "abort",
                answer.matched,
            )
            for answer in self.answers
        ]

    def _finish(self, answer: Answer, reply: Reply) -> None:
        finish = reply.meta_info.finish_reason
        if finish.type != "abort":
            answer.finish = finish.type
            # A list is of stop tokens that only match together; none are sent, so the last token is as good a name.
            answer.matched = answer.tokens[-1] if isinstance(finish.matched, list) else finish.matched
        elif len(answer.tokens) >= self.params.max_new_tokens:
            answer.finish = "length"
        elif self.aborted or not self.recalled:
            answer.finish = "abort"

    def _cut(self, answer: Answer, begin: int) -> None:
        """End the answer where a stop string is complete that began before token ``begin``, the first of this piece."""
        earlier: list[int] = self.prompt[len(self.prompt) - self.params.answer_prefix :].tolist()
        if self.tokenizer is None or not self.params.stop or not begin + len(earlier):
            return
        text, reach = earlier + answer.tokens, window(self.params.stop)
        first = max(begin + 1, self.params.min_new_tokens)
        for count in range(first, min(len(answer.tokens), begin + reach) + 1):
            end = len(earlier) + count
            if (match := find_stop(self.tokenizer, text[max(0, end - reach) : end], self.params.stop)) is not None:
                del answer.tokens[count:], answer.logprobs[count:]
                answer.segments = _first(answer.segments, count)
                answer.finish, answer.matched = "stop", match
                return

    def _sampling(self, answer: Answer) -> dict[str, Any]:
        done = len(answer.tokens)
        values = {name: getattr(self.params, name) for name in _AS_IN_SGLANG}
        sampling = {name: value for name, value in values.items() if value != getattr(_DEFAULTS, name)}
        sampling["max_new_tokens"] = self.params.max_new_tokens - done
        if self.params.min_new_tokens > done:
            sampling["min_new_tokens"] = self.params.min_new_tokens - done
        if self.params.stop:
            sampling["stop"] = list(self.params.stop)
        if self.stops:
            sampling["stop_token_ids"] = list(self.stops)
        return {**sampling, "sampling_seed": answer.seed, "no_stop_trim": True}


def _segments(reply: Reply) -> list[tuple[int, int]]:
    spans = reply.meta_info.weight_versions
    if spans is None:
        raise GenerationError("SGLang gave an answer without weight_versions, though it has them", retryable=True)
    return [
        (UNSYNCED if span.version == _UNNAMED else int(span.version), span.end - span.start)
        for span in spans
        if span.end > span.start
    ]


def _first(segments: Sequence[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """The segments of the first ``count`` tokens."""
    kept: list[tuple[int, int]] = []
    for version, length in segments:
        kept.append((version, min(length, count)))
        count -= kept[-1][1]
    return _joined(kept)


def _joined(segments: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbours of one version as one; empty ones left out."""
    joined: list[tuple[int, int]] = []
    for version, count in segments:
        if not count:
            continue
        if joined and joined[-1][0] == version:
            count += joined.pop()[1]
        joined.append((version, count))
    return joined
