"""Load of a recorded run at each moment: completions that run, tokens in the cache, trainer at work.

A completion is taken to be sampled at an even rate, and the longest one of a group until the group ends. So the others
end at their share of the group's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from realsys.planner.recorded_run import GroupTime, Recording

Series = Any  # an array with one number per moment
_MOMENTS_PER_GROUP = 40  # moments in the median time of a group
_MOST_MOMENTS = 200_000


@dataclass(frozen=True, slots=True)
class Load:
    """Series over the time of the recorded steps, at moments ``grid`` seconds apart.

    completions   completions that run on all servers
    cached        tokens that they have sampled so far
    training      1 while the trainer computes, else 0
    """

    begin: float
    grid: float
    completions: Series
    cached: Series
    training: Series

    def moment(self, time: float) -> int:
        """Return the index of the moment at ``time``."""
        return int(min(max(0.0, (time - self.begin) / self.grid), len(self.training) - 1))

    def mean(self, series: Series, begin: float, end: float) -> float:
        """Return the mean of a series between two times."""
        first = self.moment(begin)
        return float(series[first : max(first + 1, self.moment(end))].mean())


def load_of(recording: Recording) -> Load:
    """Return the load of a recorded run."""
    steps, groups = recording.steps, recording.groups
    begin, end = steps[0].begin, steps[-1].end
    median = float(np.median([group.seconds for group in groups])) if groups else 1.0
    grid = max(median / _MOMENTS_PER_GROUP, (end - begin) / _MOST_MOMENTS, 1e-4)
    moments = int((end - begin) / grid) + 2
    load = Load(begin, grid, np.zeros(moments), np.zeros(moments), np.zeros(moments))
    typical = typical_lengths(recording)
    for group in groups:
        _add(load, group, group.lengths or typical)
    for step in steps:
        first = load.moment(step.begin + step.wait)
        load.training[first : max(first + 1, load.moment(step.begin + step.wait + step.busy))] = 1.0
    return load


def typical_lengths(recording: Recording) -> tuple[int, ...]:
    """Return the lengths of a group that no record has: the mean of each place, in ascending order."""
    ordered = [sorted(lengths) for lengths in recording.lengths]
    if not ordered:
        rows = recording.config.train.batch_groups * recording.config.rollout.group_size
        mean = sum(step.sampled for step in recording.steps) / len(recording.steps) / rows
        return (max(1, round(mean)),) * recording.config.rollout.group_size
    size = min(map(len, ordered))
    return tuple(max(1, round(float(np.mean([lengths[k] for lengths in ordered])))) for k in range(size))


def _add(load: Load, group: GroupTime, lengths: Sequence[int]) -> None:
    longest = max(lengths)
    for length in lengths:
        end = group.granted + group.seconds * length / longest
        if end <= load.begin:
            continue
        first, last = load.moment(group.granted), load.moment(end) + 1
        load.completions[first:last] += 1.0
        before = length * max(0.0, load.begin - group.granted) / (end - group.granted)
        load.cached[first:last] += np.linspace(before, length, last - first)
