"""Records of single-turn samples, as most tests want them: a prompt, then one completion that is trained."""

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from realsys.types import F32, I32, Episode, FinishReason, Group, Row, SampleMeta, SequenceRef, Ticket

Array = npt.NDArray[Any]
_episodes = itertools.count()


def make_ref(
    sample_id: str, length: int, prompt: int, reward: float = 1.0, truncated: bool = False, group: int = 0
) -> SequenceRef:
    """A row of ``length`` tokens, the first ``prompt`` of which are context; the only one of its episode."""
    tokens = length - prompt
    return SequenceRef(sample_id, length, tokens, reward, truncated, group, next(_episodes), tokens)


def prompt_len(ref: SequenceRef | SampleMeta) -> int:
    return ref.length - ref.loss_tokens


def make_mask(length: int, prompt: int) -> Array:
    """Loss mask bool [length]: False for the first ``prompt`` tokens."""
    return np.arange(length) >= prompt


def mask_of(ref: SequenceRef) -> Array:
    return make_mask(ref.length, prompt_len(ref))


def make_row(
    tokens: Array,
    logprobs: Array,
    versions: Array,
    finish_reason: FinishReason = "stop",
    route: tuple[tuple[str, int], ...] = (),
) -> Row:
    """A row whose last ``len(logprobs)`` tokens were sampled."""
    return Row(tokens, make_mask(len(tokens), len(tokens) - len(logprobs)), logprobs, versions, finish_reason, route)


def single_turn(tokens: I32, logprobs: F32, versions: I32, reward: float) -> Episode:
    """An episode of one row, correct if its reward is positive."""
    return Episode([make_row(tokens, logprobs, versions)], reward, correct=reward > 0)


def group_of(ticket: Ticket, episodes: Iterable[Episode], **times: float) -> Group:
    """A group that ``rollout_worker/0`` made."""
    return Group(ticket, list(episodes), "rollout_worker/0", **times)
