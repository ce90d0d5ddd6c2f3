"""Disagreement: counts of new judgements against the recorded rewards. Pure. Its size depends on the prompts only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from realsys.errors import RewardError
from realsys.launch.regrade.recorded import LeftOut, Recorded
from realsys.observe.evaluation_statistics import Tally, pooled
from realsys.rollout.environments.base import Judgement

TOLERANCE = 1e-6  # rewards that differ by less are equal
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
    _by_prompt: dict[tuple[str, int], Tally] = field(default_factory=dict)  # prompt -> samples judged, different
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
        flip = _flip(recorded, now)
        ticket = recorded.task.ticket
        before = self._by_prompt.get((ticket.split, ticket.prompt_index), Tally(0, 0))
        self._by_prompt[ticket.split, ticket.prompt_index] = Tally(before.judged + 1, before.right + bool(flip))
        if flip:
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
        rate = pooled(self._by_prompt.values())
        return {
            "samples": self.samples,
            "judged": self.judged,
            "disagreements": self.different,
            "rate": rate.value if rate else None,
            "rate_interval_95": [rate.low, rate.high] if rate else None,
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


def verdict_name(correct: bool | None) -> str:
    return _VERDICTS[correct]
