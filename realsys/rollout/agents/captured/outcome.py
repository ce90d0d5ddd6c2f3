"""The result of a user's ``run``: a reward, a dict, or None. Pure."""

from __future__ import annotations

import numbers
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from realsys.errors import AgentError

_KEYS = ("reward", "rewards", "correct", "metrics", "answer")
_RESULT = "run must return a reward, a dict, or None"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of an episode.

    reward   None: the environment judges the last completion
    rewards  id of a completion -> reward for its last token, in addition to ``reward``
    """

    reward: float | None = None
    correct: bool | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    answer: str | None = None
    rewards: dict[str, float] = field(default_factory=dict)


def outcome_of(returned: Any) -> Outcome:
    """Read what ``run`` returned. Raises AgentError with the problem in one line.

    A dict with other keys than those of Outcome maps ids of completions to rewards.
    """
    if returned is None:
        return Outcome()
    if isinstance(returned, bool | np.bool_):
        return Outcome(float(returned), bool(returned))
    if _is_number(returned):
        return Outcome(float(returned))
    if not isinstance(returned, Mapping):
        raise AgentError(f"run returned {reprlib.repr(returned)}: {_RESULT}")
    known = [key for key in returned if key in _KEYS]
    if not known:
        return Outcome(0.0 if returned else None, rewards=_rewards(returned))
    if unknown := [key for key in returned if key not in _KEYS]:
        raise AgentError(f"run returned a dict with the key {unknown[0]!r}: use {', '.join(_KEYS)}")
    reward, rewards = returned.get("reward"), _rewards(returned.get("rewards") or {})
    if reward is None and rewards:
        reward = 0.0
    if reward is not None and not _is_number(reward):
        raise AgentError(f"run returned the reward {reprlib.repr(reward)}: it must be a number or None")
    correct, metrics = returned.get("correct"), returned.get("metrics") or {}
    return Outcome(None if reward is None else float(reward), correct, metrics, returned.get("answer"), rewards)


def _rewards(by_id: Any) -> dict[str, float]:
    if not isinstance(by_id, Mapping) or not all(isinstance(key, str) for key in by_id):
        raise AgentError(f"run returned the rewards {reprlib.repr(by_id)}: they must be numbers by id of a completion")
    for key, value in by_id.items():
        if not _is_number(value):
            raise AgentError(f"run returned {reprlib.repr(value)} for {key!r}: it must be a number")
    return {key: float(value) for key, value in by_id.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real | np.number)
