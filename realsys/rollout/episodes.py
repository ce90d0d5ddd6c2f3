"""Checks of an episode before it is pushed: one bad array or number would spoil the whole batch.

The agent is the user's code, so every error here names the part of the episode that is wrong.
"""

from __future__ import annotations

import math
import reprlib
from typing import Any

import numpy as np

from realsys.cluster.stream.codec import BOOL, FINISH_REASONS, FLOAT, INT, LOGPROB_SLACK
from realsys.errors import AgentError
from realsys.manager.messages import MOST_METRICS
from realsys.reward.verifiers.contract import MAX_METRIC_NAME, is_metric_name
from realsys.types import Episode, Row, is_temperature

_ARRAYS = (("tokens", INT), ("loss_mask", BOOL), ("logprobs", FLOAT), ("versions", INT))


def check_episode(episode: Episode, longest_row: int, sampled: int) -> None:
    """Check an episode, and convert numpy's numbers to plain ones. Raises AgentError.

    ``longest_row``: limit of a row in tokens. ``sampled``: tokens that the engine returned for this episode.
    An episode without a token to train is valid only if every completion was empty.
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
    if episode.answer is not None and not isinstance(episode.answer, str):
        raise AgentError(f"answer is {reprlib.repr(episode.answer)}: it must be a text or None")
    if not isinstance(episode.metrics, dict) or len(episode.metrics) > MOST_METRICS:
        raise AgentError(f"metrics must be a dict of at most {MOST_METRICS} numbers by name")
    for name in episode.metrics:
        if not is_metric_name(name):
            problem = f"a name must have 1 to {MAX_METRIC_NAME} printable characters"
            raise AgentError(f"metrics has the name {reprlib.repr(name)}: {problem}")
    episode.metrics = {name: _number(f"metric {name!r}", value) for name, value in episode.metrics.items()}
    loss_tokens = 0
    for number, row in enumerate(episode.rows):
        if problem := _row_problem(row, longest_row):
            raise AgentError(f"row {number}: {problem}")
        loss_tokens += len(row.logprobs)
    if sampled and not loss_tokens:
        fix = "use RowBuilder.completion, and a temperature above 0"
        raise AgentError(f"{sampled} tokens were sampled, but no row has a loss_mask: {fix}")


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
        return f"is a {type(row).__name__}: it must be a Row"
    arrays = (row.tokens, row.loss_mask, row.logprobs, row.versions)
    for (name, dtype), array in zip(_ARRAYS, arrays, strict=True):
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
            return f"{name} must be a one-dimensional array of {dtype.name}"
    length, loss = len(row.tokens), int(np.count_nonzero(row.loss_mask))
    if not length or len(row.loss_mask) != length:
        return f"{length} tokens and a loss_mask of {len(row.loss_mask)}: they must be as many, and not 0"
    if row.loss_mask[0]:
        return "loss_mask[0] is True: the first token has no token before it, so it cannot be trained"
    if not loss == len(row.logprobs) == len(row.versions):
        counts = f"{loss} tokens with loss_mask, {len(row.logprobs)} logprobs, {len(row.versions)} versions"
        return f"{counts}: they must be as many"
    if length > limit:
        return f"{length} tokens, but train.microbatch_tokens is {limit}: stop the episode earlier or increase it"
    if row.finish_reason not in FINISH_REASONS:
        return f"finish_reason {row.finish_reason!r}: use one of {', '.join(FINISH_REASONS)}"
    return _value_problem(row) or _route_problem(row, loss) or _temperature_problem(row, loss) or _reward_problem(row)


def _value_problem(row: Row) -> str:
    # count_nonzero, because all() and any() take several times as long on a short array
    if np.count_nonzero(np.isfinite(row.logprobs) & (row.logprobs <= LOGPROB_SLACK)) < len(row.logprobs):
        return "a log-prob is not finite, or greater than 0"
    low, _ = row.version_span or (0, 0)
    return f"version {low}: it must be at least 0" if low < 0 else ""


def _route_problem(row: Row, loss: int) -> str:
    """Return the problem of the route; types are checked too, because numpy's numbers cannot be encoded."""
    for server, count in row.route:
        if type(server) is not str or type(count) is not int or count < 1:
            return f"route has ({server!r}, {count!r}): it must be (name of a server, whole number of tokens)"
    if row.route and sum(count for _, count in row.route) != loss:
        return f"route has {sum(count for _, count in row.route)} tokens, loss_mask {loss}"
    return ""


def _temperature_problem(row: Row, loss: int) -> str:
    """Return the problem of the temperatures, and convert numpy's numbers to plain ones."""
    if not row.temperatures:
        return ""
    row.temperatures = tuple((float(temperature), int(count)) for temperature, count in row.temperatures)
    if any(not is_temperature(temperature) or count < 1 for temperature, count in row.temperatures):
        return f"temperatures {reprlib.repr(row.temperatures)}: they must be 0 or at least 1e-6, each with its tokens"
    tokens = sum(count for _, count in row.temperatures)
    return "" if tokens == loss else f"temperatures have {tokens} tokens, loss_mask {loss}"


def _reward_problem(row: Row) -> str:
    """Check the rewards of single tokens, and convert numpy's numbers to plain ones."""
    if not row.rewards:
        return ""
    row.rewards = tuple((int(position), float(reward)) for position, reward in row.rewards)
    before = -1
    for position, reward in row.rewards:
        if not 0 <= position < len(row.tokens) or not row.loss_mask[position]:
            return f"reward at position {position}, which has no loss_mask: use RowBuilder.reward"
        if position <= before:
            return f"reward at position {position} after one at {before}: positions must rise"
        if not math.isfinite(reward):
            return f"reward {reward} at position {position}: it must be a finite number"
        before = position
    return ""
