"""Disagreement: counts of new judgements against the recorded rewards. Pure, and of constant size."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from realsys.errors import RewardError
from realsys.launch.regrade.recorded import LeftOut, Recorded
from realsys.rollout.environments.base import Judgement

TOLERANCE = 1e-6  # rewards that differ by less are equal
_Z = 1.959964  # quantile of a 95 % interval
_VERDICTS = {True: "right", False: "wrong", None: "not judged"}


@dataclass(frozen=True, slots=True)
class Different:
    """A sample whose new judgement is not the recorded one."""

    recorded: Recorded
    now: Judgement


@dataclass(slots=True)
class Disagreement:
    """Counts of the samples so far. ``shown``: the first ``keep`` that disagree."""

    keep: int = 0
    judged: int = 0
    flips: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)  # cause -> samples without a new verdict
    first_errors: dict[str, str] = field(default_factory=dict)  # cause -> message
    left_out: Counter[str] = field(default_factory=Counter)  # reason -> samples, or steps
    first_left_out: dict[str, str] = field(default_factory=dict)  # reason -> sample or step
    shown: list[Different] = field(default_factory=list)
    _reward: tuple[float, float] = (0.0, 0.0)  # sums: recorded, now
    _right: tuple[int, int] = (0, 0)
    _known: int = 0  # samples that are right or wrong in both

    @property
    def samples(self) -> int:
        return self.judged + sum(self.errors.values())

    @property
    def different(self) -> int:
        return sum(self.flips.values())

    def add(self, recorded: Recorded, now: Judgement) -> None:
        """Count a sample with a new judgement."""
        self.judged += 1
        self._reward = self._reward[0] + recorded.reward, self._reward[1] + now.reward
        if recorded.correct is not None and now.correct is not None:
            self._known += 1
            self._right = self._right[0] + recorded.correct, self._right[1] + now.correct
        if flip := _flip(recorded, now):
            self.flips[flip] += 1
            if len(self.shown) < self.keep:
                self.shown.append(Different(recorded, now))

    def fail(self, error: RewardError) -> None:
        """Count a sample without a new verdict."""
        self.errors[error.cause] += 1
        self.first_errors.setdefault(error.cause, str(error))

    def leave_out(self, sample: LeftOut) -> None:
        """Count a sample that cannot be judged."""
        self.left_out[sample.reason] += 1
        self.first_left_out.setdefault(sample.reason, sample.what)

    def results(self) -> dict[str, Any]:
        """Return all counts as plain values; a mean or rate that was not measured is None."""
        low, high = interval(self.different, self.judged)
        return {
            "samples": self.samples,
            "judged": self.judged,
            "disagreements": self.different,
            "rate": self.different / self.judged if self.judged else None,
            "rate_interval_95": [low, high] if self.judged else None,
            "flips": dict(self.flips.most_common()),
            "errors": dict(self.errors.most_common()),
            "left_out": dict(self.left_out.most_common()),
            "reward_mean": _pair(self._reward, self.judged),
            "accuracy": _pair(self._right, self._known),
        }


def _pair(sums: tuple[float, float], count: int) -> dict[str, float] | None:
    return {"recorded": sums[0] / count, "now": sums[1] / count} if count else None


def _flip(recorded: Recorded, now: Judgement) -> str:
    """Return the direction in which a judgement changed; "" if it did not.

    Correctness decides where both have it, so that another scale of rewards is no disagreement.
    """
    if recorded.correct is not None and now.correct is not None:
        changed = recorded.correct is not now.correct
        return f"{_VERDICTS[recorded.correct]} -> {_VERDICTS[now.correct]}" if changed else ""
    if abs(now.reward - recorded.reward) <= TOLERANCE:
        return ""
    return "higher reward" if now.reward > recorded.reward else "lower reward"


def interval(count: int, total: int) -> tuple[float, float]:
    """Return the 95 % interval of a rate (Wilson); (0, 1) without samples."""
    if not total:
        return 0.0, 1.0
    rate, z2 = count / total, _Z**2 / total
    centre, half = rate + z2 / 2, _Z * math.sqrt(rate * (1 - rate) / total + z2 / (4 * total))
    return min(rate, max(0.0, (centre - half) / (1 + z2))), max(rate, min(1.0, (centre + half) / (1 + z2)))


def verdict_name(correct: bool | None) -> str:
    return _VERDICTS[correct]
