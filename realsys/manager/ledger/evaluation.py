"""Progress of one evaluation: which completions wait, what the others add up to, and whether its numbers may be shown.

Which events change it, and when, is decided in ``evaluations``.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

import msgspec

from realsys.manager.ledger.events import EvalAnswered, EvalStarted, EvaluationState
from realsys.manager.messages import EvaluationReply

#: Size of a block of attempt numbers. An evaluation that begins anew, is started again or meets another manager takes
#: the next block, so attempt numbers are never reused.
ATTEMPTS = 1 << 16


@dataclass(slots=True)
class Evaluation:
    """Progress of one evaluation. ``saved`` is the part that a snapshot of the journal keeps."""

    saved: EvaluationState
    waiting: deque[int] = field(default_factory=deque)  # units
    attempts: dict[int, int] = field(default_factory=dict)  # unit -> attempts granted so far
    failures: dict[int, int] = field(default_factory=dict)  # unit -> failed attempts
    pinned: int | None = None  # version of all its completions
    cause: str = ""  # error of the last failed problem; not in the journal

    @property
    def started(self) -> EvalStarted:
        return self.saved.started

    @property
    def units(self) -> int:
        """Number of its completions."""
        return self.started.total * self.started.samples

    @property
    def is_finished(self) -> bool:
        """True when every completion has its end, or when its version was lost."""
        return bool(self.saved.lost) or len(self.saved.done) == self.units

    @property
    def newest_version(self) -> int:
        """The version that its completions are of; without any, the one at which it was requested."""
        return max(self.started.version, self.saved.version_max)

    def unit(self, prompt_index: int, sample: int) -> int:
        return prompt_index * self.started.samples + sample

    def incomplete(self) -> str:
        """Return why its numbers must not be shown, "" if they may."""
        saved, failed = self.saved, self.saved.failed
        if saved.lost:
            return saved.lost
        if not self.is_finished:
            return f"{len(saved.done)} of {self.units} have ended"
        if failed > self.started.max_failed or failed == self.units:
            return f"{failed} of {self.units} failed" + (f", the last one: {self.cause}" if self.cause else "")
        if saved.version_min != saved.version_max:  # only in journals of older versions
            return f"versions {saved.version_min} to {saved.version_max} are mixed"
        return ""

    def reply(self) -> EvaluationReply:
        saved, incomplete = self.saved, self.incomplete()
        completed = len(saved.done) - saved.failed
        tallies = self.tallies()
        shares = [right / judged for judged, right in tallies if judged]
        is_shown = not incomplete
        metrics = {name: total / count for name, (total, count) in sorted(saved.metrics.items())}
        return EvaluationReply(
            done=completed,
            total=self.units,
            failed=saved.failed,
            accuracy=sum(shares) / len(shares) if is_shown and shares else None,
            reward_mean=saved.reward / completed if is_shown else None,
            length_mean=saved.length / completed if completed else 0.0,
            version_min=saved.version_min,
            version_max=saved.version_max,
            metrics=metrics if is_shown else {},
            ended=self.is_finished,
            incomplete=incomplete,
            problems=self.started.total,
            samples=self.started.samples,
            set=self.started.set,
            restarts=saved.restarts,
            tallies=[(*tally, count) for tally, count in sorted(Counter(tallies).items())] if self.is_finished else [],
            accepted=self._accepted() if self.is_finished else [],
        )

    def tallies(self) -> list[tuple[int, int]]:
        """Return (judged, right) completions of each problem that has a completion."""
        saved = self.saved
        if saved.tallies or not saved.done:
            return list(saved.tallies.values())
        # A snapshot of an older version has sums; then each problem has one completion.
        judged = len(saved.done) - saved.failed - saved.unjudged
        return [(1, 1)] * saved.correct + [(1, 0)] * (judged - saved.correct) + [(0, 0)] * saved.unjudged

    def _accepted(self) -> list[tuple[int, int, int]]:
        samples = self.started.samples
        return [(*divmod(unit, samples), attempt) for unit, attempt in sorted(self.saved.accepted.items())]

    def count(self, event: EvalAnswered) -> None:
        saved, unit = self.saved, self.unit(event.prompt_index, event.sample)
        saved.done.append(unit)
        if event.failed:
            saved.failed += 1
            return
        judged, right = saved.tallies.get(event.prompt_index, (0, 0))
        saved.tallies[event.prompt_index] = judged + (event.correct is not None), right + (event.correct is True)
        saved.accepted[unit] = event.attempt
        saved.correct += event.correct is True
        saved.unjudged += event.correct is None
        saved.length += event.length
        saved.reward += event.reward
        for name, value in event.metrics.items():
            total, number = saved.metrics.get(name, (0.0, 0))
            saved.metrics[name] = (total + value, number + 1)
        oldest = saved.version_min
        saved.version_min = event.version_min if oldest < 0 else min(oldest, event.version_min)
        saved.version_max = max(saved.version_max, event.version_max)
        self.pinned = saved.version_min if self.pinned is None else self.pinned


def next_block(saved: EvaluationState) -> int:
    """Return the first attempt number of the next block."""
    return (saved.first_attempt // ATTEMPTS + 1) * ATTEMPTS


def restored(saved: EvaluationState) -> Evaluation:
    """Return an evaluation of which nothing runs."""
    pinned = saved.held.version if saved.held is not None else saved.version_min
    evaluation = Evaluation(saved, pinned=pinned if pinned >= 0 else None)
    if not saved.lost:
        done = set(saved.done)
        evaluation.waiting.extend(unit for unit in range(evaluation.units) if unit not in done)
    return evaluation


def copied(saved: EvaluationState) -> EvaluationState:
    return msgspec.structs.replace(
        saved,
        done=list(saved.done),
        metrics=dict(saved.metrics),
        tallies=dict(saved.tallies),
        accepted=dict(saved.accepted),
    )
