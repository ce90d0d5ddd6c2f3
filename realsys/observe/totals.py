"""Totals of a whole run from its step log: sums, means and extremes over the records that hold.

step log ──surviving_steps──> Totals (for the summary) ──> curve_points (for the curves)

Both read the log record by record, so that a run of any length can be reported.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Self

from realsys.observe.evaluation_records import without_incomplete
from realsys.observe.screen.progress import TIME_PARTS, Record, mean, number, time_parts
from realsys.observe.step_log import RECOVERED, USED_UP

#: number of first and of last steps whose means describe a run: one batch is noise
END_STEPS = 5
#: curves that are means: name -> place in the record of a step
_CURVES: dict[str, tuple[str, ...]] = {
    **{
        name: (name,)
        for name in (
            *("step", "reward_mean", "accuracy", "length_mean", "length_correct", "length_wrong"),
            *("consumed_tokens_per_s", "train_tokens_per_s"),
        )
    },
    **{name: ("stats", name) for name in ("loss", "grad_norm", "clip_fraction", "w_mean", "w_max", "w_ess")},
    "entropy": ("stats", "entropy_mean"),
    "kl_behav": ("stats", "kl_behav_prox_mean"),
    "kl_step": ("stats", "kl_prox_theta_mean"),
    "kl_ref": ("stats", "kl_ref_mean"),
    "truncated": ("truncated_fraction",),
}
CURVE_POINTS = 2000  # maximum for one curve


@dataclass(slots=True)
class Mean:
    """Mean of the numbers that were added; None without any."""

    total: float = 0.0
    count: int = 0

    def add(self, value: float | None) -> None:
        if value is not None:
            self.total += value
            self.count += 1

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass(slots=True)
class Totals:
    """Sums over a step log. ``since``: unix seconds; earlier starts of the trial do not count in the wall time."""

    since: float = 0.0
    steps: int = 0  # trained
    first: list[Record] = field(default_factory=list)
    last: deque[Record] = field(default_factory=lambda: deque(maxlen=END_STEPS))
    unbiased: int = 0
    first_unbiased: list[Record] = field(default_factory=list)
    last_unbiased: deque[Record] = field(default_factory=lambda: deque(maxlen=END_STEPS))
    evals: dict[str, Record] = field(default_factory=dict)
    used_up: str = ""  # why the prompts ended before the planned steps
    recoveries: int = 0
    phases: list[tuple[str, float]] = field(default_factory=list)  # (phase, unix seconds it began)
    answer_tokens: float = 0.0
    answer_tokens_now: float = 0.0  # since ``since``
    steps_now: int = 0  # trained since ``since``
    seconds: dict[str, Mean] = field(default_factory=lambda: {part: Mean() for part in (*TIME_PARTS, "total")})
    tokens_per_s: Mean = field(default_factory=Mean)
    staleness: Mean = field(default_factory=Mean)
    most_stale: float | None = None
    by_staleness: Counter[int] = field(default_factory=Counter)  # sequences
    dropped_stale: float = 0.0
    dropped_filtered: float = 0.0
    too_old: Mean = field(default_factory=Mean)  # share of a step's sampled tokens that staleness took from training
    without_signal: int = 0  # steps
    verdict_failures: Counter[str] = field(default_factory=Counter)  # cause -> completions

    @classmethod
    def of(cls, records: Iterable[Record], since: float = 0.0) -> Self:
        """Add up ``records``, none of which a later record undoes."""
        totals = cls(since)
        for record in records:
            totals.add(record)
        return totals

    def add(self, record: Record) -> None:
        match record.get("kind"):
            case "phase":
                began = number(record, "time")
                if began is not None and began >= self.since:
                    self.phases.append((str(record.get("phase", "?")), began))
            case "train":
                self.steps += 1
                if len(self.first) < END_STEPS:
                    self.first.append(record)
                self.last.append(record)
                if not is_length_biased(record):
                    self.unbiased += 1
                    if len(self.first_unbiased) < END_STEPS:
                        self.first_unbiased.append(record)
                    self.last_unbiased.append(record)
                tokens = number(record, "answer_tokens") or 0.0
                self.answer_tokens += tokens
                if (number(record, "time") or 0.0) >= self.since:
                    self.answer_tokens_now += tokens
                    self.steps_now += 1
                for part, seconds in self.seconds.items():
                    seconds.add(number(record, "seconds", part))
                self.tokens_per_s.add(number(record, "train_tokens_per_s"))
                self.staleness.add(number(record, "staleness", "mean"))
                self.most_stale = max(self.most_stale or 0.0, number(record, "staleness", "max") or 0.0)
                staleness = record.get("staleness")
                counts = staleness.get("histogram") if isinstance(staleness, Mapping) else None
                for versions, count in (counts or {}).items():
                    self.by_staleness[int(versions)] += int(count)
                self.dropped_stale += number(record, "dropped_stale") or 0.0
                self.dropped_filtered += number(record, "dropped_filtered") or 0.0
                lost = [number(record, "untrained", reason) for reason in ("stale", "masked")]
                self.too_old.add(sum(share or 0.0 for share in lost))
                self.without_signal += number(record, "stats", "grad_norm_max") == 0.0
                failures = record.get("verdict_failures")
                for cause in failures if isinstance(failures, Mapping) else {}:
                    self.verdict_failures[str(cause)] += int(number(failures, cause) or 0)
            case "eval":
                self.evals[str(record.get("eval_id", "?"))] = without_incomplete(record)
            case kind if kind == USED_UP:
                self.used_up = str(record.get("reason", "?"))
            case kind if kind == RECOVERED:
                self.recoveries += 1

    def phase_seconds(self, end: float) -> dict[str, float]:
        """Wall seconds spent in each phase since ``since``; a phase entered twice is summed."""
        seconds: dict[str, float] = {}
        stops = [*(began for _, began in self.phases[1:]), end]
        for (name, start), stop in zip(self.phases, stops, strict=False):  # without any phase, `stops` is longer
            if name != "done":
                seconds[name] = seconds.get(name, 0.0) + max(0.0, stop - start)
        return seconds


def averaged_ends(steps: int) -> int:
    """Return how many of ``steps`` steps are averaged at either end of a run, so that the two do not overlap."""
    return max(1, min(END_STEPS, steps // 2))


def is_length_biased(record: Record) -> bool:
    """Return True for a step whose batch had other lengths than the policy samples: its means mislead."""
    return record.get("length_biased") is True


def curve_points(records: Iterable[Record], steps: int) -> Iterator[dict[str, float]]:
    """Yield the numbers of the curves by name, for each of ``steps`` train steps; ``step`` is always one of them.

    With more than CURVE_POINTS steps, a point has the means of several steps, and the extremes of their staleness.
    Length-biased steps are left out of the means; a point of such steps alone has ``length_biased``.
    """
    trained = (record for record in records if record.get("kind") == "train" and number(record, "step") is not None)
    width = max(1, math.ceil(steps / CURVE_POINTS))
    while some := list(islice(trained, width)):
        yield {name: value for name, value in _point(some).items() if value is not None}


def _point(some: list[Record]) -> dict[str, float | None]:
    lows, highs = ([number(r, "staleness", end) for r in some] for end in ("min", "max"))
    usual = [record for record in some if not is_length_biased(record)]
    known: dict[str, float | None] = {name: mean(usual or some, *path) for name, path in _CURVES.items()}
    seconds = {part: mean(some, "seconds", part) for part in ("total", *TIME_PARTS)}
    if seconds["total"] is not None:
        known |= {f"seconds/{part}": value for part, value in time_parts(seconds).items()}
        known["seconds/total"] = seconds["total"]
    untrained = [shares for record in some if isinstance(shares := record.get("untrained"), Mapping)]
    lost = [sum(number(shares, reason) or 0.0 for reason in shares) for shares in untrained]
    known["untrained"] = sum(lost) / len(lost) if lost else None
    known["kl_ref"] = known["kl_ref"] or mean(some, "stats", "advantages/kl_ref_mean")  # kl.place=reward
    known["length_biased"] = None if usual else 1.0
    known["stale_mean"] = mean(some, "staleness", "mean")
    known["stale_min"] = min((low for low in lows if low is not None), default=None)
    known["stale_max"] = max((high for high in highs if high is not None), default=None)
    return known
