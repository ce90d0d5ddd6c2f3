"""Rules of sampling that hold for every engine: limits of a request, stop strings, random numbers. No torch.

    request ──Limits.checked_prompt──> engine: one uniform per position, a search for stop strings after each token

Stop strings: the search decodes a few tokens, never the whole completion. Every token is at least one byte, so a string
of b bytes is within the last b tokens. A few more are decoded, because some decoders treat the first token in a special
way: they drop a blank, or show half a character.

Random numbers depend only on (seed, completion, position): no generator state, any batch, any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from realsys.errors import GenerationError, ModelError
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
    grammars    True if the server can keep a completion to a grammar
    """

    vocabulary: int
    eos: tuple[int, ...]
    context: int
    capacity: int
    tokenizer: bool
    model_path: str
    top: bool = True
    grammars: bool = False

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
                "and in a run with SGLang or vLLM generation.sampling.stop in the configuration"
            )
        if params.top_logprobs_num and not self.top:
            return (
                f"sampling_params.top_logprobs_num={params.top_logprobs_num}: this engine has no top log-probs, use 0"
            )
        if params.structural_tag and not self.grammars:
            return "sampling_params.structural_tag: this engine has no grammars (docs/generation.md), leave it out"
        if params.structural_tag and params.answer_prefix:
            return "sampling_params.structural_tag: a grammar begins with a completion, so answer_prefix must be 0"
        if params.n > self.capacity:
            return f"sampling_params.n={params.n} is more than this server can run and queue: at most {self.capacity}"
        return None

    def _outside(self, tokens: Sequence[int]) -> int | None:
        """Return the first token that is outside the vocabulary, or None."""
        # min and max scan a long prompt in C; the loop in Python only runs to find the culprit.
        if not tokens or 0 <= min(tokens) <= max(tokens) < self.vocabulary:
            return None
        return next(token for token in tokens if not 0 <= token < self.vocabulary)


# ---- stop strings in the last tokens


_MARGIN = 4


def read_tokenizer(model_path: Path) -> Tokenizer | None:
    """Read tokenizer.json of a model directory; None if the file does not exist.

    Raises ModelError if it cannot be read.
    """
    path = model_path / "tokenizer.json"
    if not path.exists():
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers package raises plain Exception
        raise ModelError(f"{path}: cannot be read as a tokenizer: {error}") from None


def window(strings: Sequence[str]) -> int:
    """Return how many tokens at the end of a completion suffice to find any of the strings."""
    return max(len(string.encode()) for string in strings) + _MARGIN


def find_stop(tokenizer: Tokenizer, tail: Sequence[int], strings: Sequence[str]) -> str | None:
    """Return the first of ``strings`` that is in the text of a completion's last tokens, or None."""
    text = tokenizer.decode(list(tail), skip_special_tokens=False)
    return next((string for string in strings if string in text), None)


# ---- random numbers by seed, completion and position


U64 = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def splitmix64(state: U64) -> U64:
    """Mix 64-bit words with the finaliser of SplitMix64: a bijection whose results look random."""
    z = state + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def completion_seed(seed: int, completion: int) -> int:
    """Derive the seed of one completion of a request, 63 bits, for an engine with its own random numbers."""
    mixed = splitmix64(np.asarray([seed & 0xFFFFFFFFFFFFFFFF], np.uint64))
    return int(splitmix64(mixed + np.uint64(completion))[0] >> np.uint64(1))


def uniforms(seed: int, completion: int, count: int) -> npt.NDArray[np.float32]:
    """Draw numbers in [0, 1) for positions 0..count-1 of a completion, with 24 random bits each."""
    key = splitmix64(np.asarray([seed & 0xFFFFFFFFFFFFFFFF], np.uint64))
    # Not symmetric in seed and completion: completion 1 of seed 2 must not repeat completion 2 of seed 1.
    key = splitmix64(key ^ (np.asarray([completion], np.uint64) * _MIX_1))
    words = splitmix64(key + np.arange(count, dtype=np.uint64) * _GOLDEN)
    # 24 bits, because float32 holds no more: a 25th could round up to 1.0.
    return ((words >> np.uint64(40)).astype(np.float32)) * np.float32(2.0**-24)
