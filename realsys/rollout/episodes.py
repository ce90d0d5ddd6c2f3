"""Checks of an episode before it is pushed: one bad array or number would spoil the whole batch.

The agent is the user's code, so every error here names the part of the episode that is wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from realsys.admission.messages import MOST_METRICS
from realsys.errors import AgentError
from realsys.types import Episode, FinishReason, Row


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of an episode, in tokens. ``episode``: of all its rows; None if the loss works on single rows."""

    row: int
    episode: int | None = None


def check_episode(episode: Episode, limits: Limits, sampled: int) -> None:
    """Check an episode, and turn numpy's numbers into plain ones. ``sampled``: tokens that the engine returned for it.

    An episode without a token to train is right only if every completion was empty. Raises AgentError.
    """
    if not isinstance(episode, Episode):
        raise AgentError(f"run returned {type(episode).__name__}: it must return an Episode")
    if not isinstance(episode.rows, list) or not episode.rows:
        raise AgentError("the episode has no rows: it must have at least one")
    episode.reward = _number("reward", episode.reward)
    if isinstance(episode.correct, np.bool_):
        episode.correct = bool(episode.correct)
    if episode.correct is not None and not isinstance(episode.correct, bool):
        raise AgentError(f"correct is {episode.correct!r}: it must be True, False or None")
    if len(episode.metrics) > MOST_METRICS or not all(isinstance(name, str) for name in episode.metrics):
        raise AgentError(f"metrics must be at most {MOST_METRICS} numbers by name")
    episode.metrics = {name: _number(f"metric {name!r}", value) for name, value in episode.metrics.items()}
    for number, row in enumerate(episode.rows):
        if problem := _row_problem(row, limits.row):
            raise AgentError(f"row {number}: {problem}")
    if sampled and not episode.loss_tokens:
        raise AgentError(f"{sampled} tokens were sampled and none is in a row with loss_mask")
    total = sum(len(row.tokens) for row in episode.rows)
    if limits.episode is not None and total > limits.episode:
        raise AgentError(f"the rows have {total} tokens together, train.microbatch_tokens is {limits.episode}")


def _number(what: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise AgentError(f"{what} is {value!r}: it must be a finite number")
    return number


def _row_problem(row: Row, limit: int) -> str:
    """Return the problem of a row; "" if it has none."""
    if not isinstance(row, Row):
        return f"is a {type(row).__name__}, it must be a Row"
    arrays = (
        ("tokens", row.tokens, np.int32),
        ("loss_mask", row.loss_mask, np.bool_),
        ("logprobs", row.logprobs, np.float32),
        ("versions", row.versions, np.int32),
    )
    for name, array, dtype in arrays:
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
            return f"{name} must be a one-dimensional array of {np.dtype(dtype).name}"
    length, loss = len(row.tokens), int(np.count_nonzero(row.loss_mask))
    if not length or len(row.loss_mask) != length:
        return f"{length} tokens and a loss_mask of {len(row.loss_mask)}: they must be as many, and not 0"
    if row.loss_mask[0]:
        return "loss_mask[0] is True: the first token has no token before it, so it cannot be trained"
    if not loss == len(row.logprobs) == len(row.versions):
        counts = f"{loss} tokens with loss_mask, {len(row.logprobs)} logprobs, {len(row.versions)} versions"
        return f"{counts}: they must be as many"
    if not np.isfinite(row.logprobs).all():
        return "a log-prob is not finite"
    if length > limit:
        return f"{length} tokens, train.microbatch_tokens is {limit}"
    if row.finish_reason not in get_args(FinishReason):
        return f"finish_reason {row.finish_reason!r}: use one of {', '.join(get_args(FinishReason))}"
    if row.route and sum(count for _, count in row.route) != loss:
        return f"route has {sum(count for _, count in row.route)} tokens, loss_mask {loss}"
    return _reward_problem(row)


def _reward_problem(row: Row) -> str:
    for position, reward in row.rewards:
        if not 0 <= position < len(row.tokens) or not row.loss_mask[position]:
            return f"reward at position {position}, which is no token with loss_mask"
        if not math.isfinite(reward):
            return f"reward {reward} at position {position}: it must be a finite number"
    return ""
