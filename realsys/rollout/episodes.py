"""Episodes: construction of their rows, checks before they are pushed, and choice by outcome.

A row is made of the tokens that the engine received and returned:

    RowBuilder(prompt) ──tokens──> session.generate ──> completion() ──> context(feedback) ──tokens──> generate ...
         └── branch() ──> another row that starts with the same tokens               row() ──> Row

token-identity: tokens go in as they were sent or sampled. No method takes text, so nothing can be tokenised again.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from realsys.agent_runner.contract import one_line
from realsys.algorithm.token_losses import EQUAL_REWARDS, REFUSED, SUCCESS_RATE
from realsys.cluster.stream.codec import BOOL, FINISH_REASONS, FLOAT, INT, LOGPROB_SLACK
from realsys.config.doors import FILTER
from realsys.config.schema_rollout import KeepConfig
from realsys.config.schema_train import FilterConfig
from realsys.errors import AgentError
from realsys.generation.completion import Completion, joined_kv_versions
from realsys.manager.messages import MOST_METRICS
from realsys.reward.verifiers.contract import MAX_METRIC_NAME, is_metric_name
from realsys.types import I32, Episode, FinishReason, Row, is_temperature, sampling_seed

V = TypeVar("V")


class RowBuilder:
    """Builder of one row. ``tokens`` is the input of the next call of the engine."""

    def __init__(self, token_ids: Sequence[int] | I32 = ()) -> None:
        self._parts: list[tuple[I32, Completion | None]] = []
        self._rewards: list[tuple[int, float]] = []
        self._length = 0
        self.context(token_ids)

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> list[int]:
        """All tokens so far, in the order in which the model sees them."""
        return [token for tokens, _ in self._parts for token in tokens.tolist()]

    def context(self, token_ids: Sequence[int] | I32) -> None:
        """Append tokens that the policy did not sample: a prompt, feedback, or the result of a tool."""
        self._add(np.array(token_ids, np.int32), None)

    def completion(self, completion: Completion) -> None:
        """Append a completion that was sampled after exactly the tokens so far. Its tokens are trained.

        Those of a greedy completion and of a pinned policy are context: they are no samples of the policy in training.
        """
        self._add(completion.tokens, completion if completion.trainable else None)

    def reward(self, value: float) -> None:
        """Give a reward to the token before this point: the last one of the latest completion, usually one per turn.

        It is added to ``Episode.reward``. Raises ValueError if the row does not end with a sampled token.
        """
        if not self._parts or self._parts[-1][1] is None or not len(self._parts[-1][0]):
            raise ValueError("a reward belongs to a sampled token: call reward() right after completion()")
        self._rewards.append((self._length - 1, float(value)))

    def branch(self) -> RowBuilder:
        """Start another row with the tokens so far as its context.

        They are not trained in the new row: a token that was sampled once is trained in one row only.
        """
        return RowBuilder(self.tokens)

    def row(self) -> Row:
        """Build the row. The builder stays usable: more can be appended afterwards."""
        sampled: list[Completion] = []
        mask, begin = np.zeros(self._length, np.bool_), 0
        for tokens, completion in self._parts:
            end = begin + len(tokens)
            if completion is not None:
                mask[begin:end] = True
                sampled.append(completion)
            begin = end
        reason: FinishReason = sampled[-1].finish_reason if sampled else "stop"
        return Row(
            tokens=_joined([tokens for tokens, _ in self._parts], np.int32),
            loss_mask=mask,
            logprobs=_joined([completion.logprobs for completion in sampled], np.float32),
            versions=_joined([completion.versions for completion in sampled], np.int32),
            finish_reason=reason,
            route=_route(sampled),
            rewards=tuple(self._rewards),
            kv_versions=joined_kv_versions(sampled),
            temperatures=_temperatures(sampled),
        )

    def _add(self, tokens: I32, completion: Completion | None) -> None:
        if len(tokens) or completion is not None:
            self._parts.append((tokens, completion))
            self._length += len(tokens)


def _joined(arrays: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    if len(arrays) == 1:
        return arrays[0]  # arrays of a completion are never changed
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


def _route(sampled: Sequence[Completion]) -> tuple[tuple[str, int], ...]:
    """Join the routes of all completions, neighbours on one server as one run; empty if one is not known."""
    if any(len(completion.tokens) and not completion.route for completion in sampled):
        return ()
    return _joined_runs(run for completion in sampled for run in completion.route)


def _temperatures(sampled: Sequence[Completion]) -> tuple[tuple[float, int], ...]:
    """Return the temperatures of all completions; empty if all have that of the trial."""
    if all(completion.temperature is None for completion in sampled):
        return ()
    return _joined_runs((each.temperature or 0.0, len(each.tokens)) for each in sampled if len(each.tokens))


def _joined_runs(runs: Iterable[tuple[V, int]]) -> tuple[tuple[V, int], ...]:
    """Join neighbouring runs of one value."""
    joined: list[tuple[V, int]] = []
    for value, count in runs:
        if joined and joined[-1][0] == value:
            joined[-1] = (value, joined[-1][1] + count)
        else:
            joined.append((value, count))
    return tuple(joined)


# ---- checks of an episode before it is pushed: one bad array or number would spoil the whole batch
#
# The agent is the user's code, so every error here names the part of the episode that is wrong.


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
    problem = _value_problem(row) or _route_problem(row, loss) or _temperature_problem(row, loss)
    return problem or _reward_problem(row) or _teacher_problem(row, loss)


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


def _teacher_problem(row: Row, loss: int) -> str:
    if row.teacher is None:
        return ""
    for (name, dtype), array in zip((("tokens", INT), ("log-probs", FLOAT)), row.teacher, strict=True):
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 2 or len(array) != loss:
            return f"{name} of the teacher must be an array of {dtype.name} with a line for each of {loss} loss tokens"
    tokens, logprobs = row.teacher
    if tokens.shape != logprobs.shape or not tokens.shape[1]:
        return f"the teacher's {tokens.shape[1]} tokens and {logprobs.shape[1]} log-probs must be as many, and not 0"
    # A token that is named twice would count twice.
    if not np.isfinite(logprobs).all() or (np.exp(logprobs.astype(np.float64)).sum(1) > 1 + LOGPROB_SLACK).any():
        return "log-probs of the teacher must be finite, and their probabilities at most 1 in all"
    return "a token of the teacher is below 0" if loss and tokens.min() < 0 else ""


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


# ---- choice by outcome: is a finished group worth training on, and which of its episodes (docs/sampling.md)
#
# episodes of a group ──reason_to_drop──> dropped, for a reason ──> another prompt takes its place
#                             └─ kept ──kept_episodes──> the ones that are trained


class Judged(Protocol):
    """The part of an episode that this module needs."""

    @property
    def reward(self) -> float: ...

    @property
    def correct(self) -> bool | None: ...


def any_group(episodes: Sequence[Judged]) -> bool:
    """Accept every group (``train.ppo.filter.accept=any``)."""
    return True


def unequal_rewards(episodes: Sequence[Judged]) -> bool | str:
    """Refuse a group whose episodes all have the same reward (``train.ppo.filter.accept=unequal_rewards``)."""
    return EQUAL_REWARDS if len({episode.reward for episode in episodes}) == 1 else True


def reason_to_drop(episodes: Sequence[Judged], config: FilterConfig) -> str:
    """Return why a group is not worth training on, "" if it is (DAPO, arXiv 2503.14476, section 3.2).

    The success rate is the share of correct episodes, so each must be right or wrong if it is bounded. A function of
    the user runs to its end in this thread, which has no event loop. Raises AgentError if its result is neither a bool
    nor a text, and whatever it raises.
    """
    if config.bounds_success:
        rate = sum(episode.correct is True for episode in episodes) / len(episodes)
        if not config.min <= rate <= config.max:
            return SUCCESS_RATE
    accept = FILTER.load(config.accept)
    verdict = accept(episodes)
    if inspect.iscoroutine(verdict):
        verdict = asyncio.run(verdict)
    if isinstance(verdict, str):
        return one_line(verdict) or REFUSED
    if not isinstance(verdict, bool | np.bool_):
        code = getattr(inspect.unwrap(accept), "__code__", None)
        place = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
        raise AgentError(f"it returned {reprlib.repr(verdict)}: it must return True, False or the reason{place}")
    return "" if verdict else REFUSED


def kept_episodes(rewards: Sequence[float], config: KeepConfig, seed: int) -> list[int]:
    """Return the indices of the episodes that are trained, rising; all if there are no more than ``episodes``.

    best     the highest rewards
    spread   the subset whose rewards have the largest variance (PODS, arXiv 2504.13818): it always has the i lowest
             and the others highest, for some i

    Equal rewards are ordered by numbers that ``seed`` draws: not by number or arrival, which depend on the length.
    """
    size, wanted = len(rewards), config.episodes
    if not wanted or size <= wanted:
        return list(range(size))
    ties = np.random.Generator(np.random.PCG64(sampling_seed(seed, size))).permutation(size)
    rising = sorted(range(size), key=lambda k: (rewards[k], ties[k]))
    if config.by == "best":
        return sorted(rising[size - wanted :])
    subsets = [rising[:low] + rising[size - wanted + low :] for low in range(wanted + 1)]
    # Rounded, so that equal variances are equal; the most even split is the best of those.
    variances = [round(float(np.var([rewards[k] for k in subset])), 9) for subset in subsets]
    best = max(range(wanted + 1), key=lambda low: (variances[low], -abs(2 * low - wanted)))
    return sorted(subsets[best])
