"""Construction of the rows of an episode from the tokens that the engine received and returned.

    RowBuilder(prompt) ──tokens──> session.generate ──> completion() ──> context(feedback) ──tokens──> generate ...
         └── branch() ──> another row that starts with the same tokens               row() ──> Row

token-identity: tokens go in as they were sent or sampled. No method takes text, so nothing can be tokenised again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from realsys.generation.client import Generated, joined_kv_versions
from realsys.types import I32, FinishReason, Row

V = TypeVar("V")


class RowBuilder:
    """Builder of one row. ``tokens`` is the input of the next call of the engine."""

    def __init__(self, token_ids: Sequence[int] | I32 = ()) -> None:
        self._parts: list[tuple[I32, Generated | None]] = []
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

    def completion(self, completion: Generated) -> None:
        """Append a completion that was sampled after exactly the tokens so far. Its tokens are trained.

        Those of a greedy completion are context: they are no samples of the policy.
        """
        self._add(completion.tokens, None if completion.greedy else completion)

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
        sampled: list[Generated] = []
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

    def _add(self, tokens: I32, completion: Generated | None) -> None:
        if len(tokens) or completion is not None:
            self._parts.append((tokens, completion))
            self._length += len(tokens)


def _joined(arrays: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    if len(arrays) == 1:
        return arrays[0]  # arrays of a completion are never changed
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


def _route(sampled: Sequence[Generated]) -> tuple[tuple[str, int], ...]:
    """Join the routes of all completions, neighbours on one server as one run; empty if one is not known."""
    if any(len(completion.tokens) and not completion.route for completion in sampled):
        return ()
    return _joined_runs(run for completion in sampled for run in completion.route)


def _temperatures(sampled: Sequence[Generated]) -> tuple[tuple[float, int], ...]:
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
