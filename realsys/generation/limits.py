"""Limits of a generation server, and the check of a request against them, for every backend. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from realsys.errors import GenerationError
from realsys.generation.protocol import SamplingParams
from realsys.types import I32


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one server and its model.

    vocabulary  number of token ids
    eos         tokens that end every completion
    context     tokens of the longest sequence, prompt and completion
    capacity    completions that the server runs and queues
    tokenizer   True if the server can search for stop strings
    model_path  directory of the model, for error messages
    top         False if the server cannot return the most probable tokens
    """

    vocabulary: int
    eos: tuple[int, ...]
    context: int
    capacity: int
    tokenizer: bool
    model_path: str
    top: bool = True

    def stops(self, params: SamplingParams) -> tuple[int, ...]:
        """Return all stop tokens of a request: its own and the model's end of text."""
        return tuple(sorted({*params.stop_token_ids, *self.eos}))

    def checked_prompt(self, input_ids: Sequence[int], params: SamplingParams) -> I32:
        """Return the prompt as int32. GenerationError names the first fault of the request."""
        if problem := params.problem() or self._problem(input_ids, params):
            raise GenerationError(problem)
        return np.asarray(input_ids, np.int32)

    def _problem(self, input_ids: Sequence[int], params: SamplingParams) -> str | None:
        if not input_ids:
            return "input_ids is empty: a prompt needs at least one token"
        if (bad := self._outside(input_ids)) is not None:
            return f"input_ids contains token {bad}, but the vocabulary has {self.vocabulary} tokens"
        if (bad := self._outside(params.stop_token_ids)) is not None:
            return f"sampling_params.stop_token_ids contains {bad}, but the vocabulary has {self.vocabulary} tokens"
        # Otherwise every token could be banned, and the sampler would have nothing to draw from.
        if params.min_new_tokens and len(self.stops(params)) >= self.vocabulary:
            return "sampling_params.min_new_tokens > 0, but every token of the vocabulary is a stop token"
        if len(input_ids) + params.max_new_tokens > self.context:
            return (
                f"input_ids of {len(input_ids)} tokens and max_new_tokens={params.max_new_tokens} "
                f"exceed the context of {self.context} tokens"
            )
        if params.answer_prefix >= len(input_ids):
            return f"sampling_params.answer_prefix={params.answer_prefix} leaves no prompt in {len(input_ids)} tokens"
        if params.stop and not self.tokenizer:
            return (
                f"sampling_params.stop={list(params.stop)} needs a tokenizer.json in {self.model_path}, "
                "and in a run with SGLang generation.sampling.stop in the configuration"
            )
        if params.top_logprobs_num and not self.top:
            return (
                f"sampling_params.top_logprobs_num={params.top_logprobs_num}: this engine has no top log-probs, use 0"
            )
        if params.n > self.capacity:
            return f"sampling_params.n={params.n} is more than this server can run and queue: at most {self.capacity}"
        return None

    def _outside(self, tokens: Sequence[int]) -> int | None:
        """Return the first token that is outside the vocabulary, or None."""
        # min and max scan a long prompt in C; the loop in Python only runs to find the culprit.
        if not tokens or 0 <= min(tokens) <= max(tokens) < self.vocabulary:
            return None
        return next(token for token in tokens if not 0 <= token < self.vocabulary)
