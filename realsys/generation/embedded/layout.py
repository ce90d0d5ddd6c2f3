"""Layout of the KV cache: rows grouped by length. Pure numpy.

Attention of a decode step reads rows x (longest row) positions, and this reading dominates the step. Completions have
heavy-tailed lengths, so one long completion would make all others pay. Rows are therefore cut into groups of similar
length, and each group is read up to its own longest row. All completions grow alike, so a layout stays good until some
end or join.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]

#: cost of moving a position (read and write), in positions read by attention
_MOVE_COST = 4
#: steps over which a re-arrangement must pay for its moves: completions end or join about that often
_HORIZON = 8
#: every group is a separate kernel call per layer
_MAX_GROUPS = 12


@dataclass(slots=True)
class RowGroup:
    """Rows start..stop-1; the longest has ``length`` positions, and all have if ``equal``.

    ``length`` grows by one with every step.
    """

    start: int
    stop: int
    length: int
    equal: bool


@dataclass(frozen=True, slots=True)
class Layout:
    """Plan of rows: rows[i] is the row of the i-th completion.

    Rows ``sources`` of the cache move to ``targets`` together: a target may be the source of another
    move. The first ``moved_length`` positions of each are valid or stale, never more.
    """

    rows: I64
    sources: I64
    targets: I64
    moved_length: int
    groups: list[RowGroup]


@dataclass(frozen=True, slots=True)
class LayoutPlanner:
    """Planner of rows and groups. ``overhead``: positions whose reading costs as much as one more group."""

    overhead: int

    def plan(self, current: I64, lengths: I64) -> Layout:
        """Plan rows for completions of ``lengths``, now in rows ``current`` (-1: not cached yet).

        Either keeps the rows and only fills the holes, or sorts by length if that saves more reading over
        the next steps than the moves cost.
        """
        keep = self._keep(current, lengths)
        tidy = self._tidy(current, lengths)
        gain = (self._cost(keep.groups) - self._cost(tidy.groups)) * _HORIZON
        price = _MOVE_COST * (_moved(keep, lengths) - _moved(tidy, lengths))
        return tidy if gain + price > 0 else keep

    def _keep(self, current: I64, lengths: I64) -> Layout:
        """Keep the completions in rows 0..n-1; give the others, longest first, the free rows."""
        # Rows n and above must move even here: a step works on the slice 0..n-1.
        stays = (current >= 0) & (current < len(current))
        rows = np.where(stays, current, -1)
        _fill(rows, lengths, np.setdiff1d(np.arange(len(rows)), current[stays]))
        return self._layout(current, lengths, rows)

    def _tidy(self, current: I64, lengths: I64) -> Layout:
        """Group as if sorted by length; keep the completions whose row is within their group's range."""
        order = np.argsort(-lengths, kind="stable")
        rows = np.full(len(current), -1)
        for start, stop in self.split(lengths[order]):
            members = order[start:stop]
            # The order within a group does not matter, so a completion in its range saves a move.
            stays = members[(current[members] >= start) & (current[members] < stop)]
            rows[stays] = current[stays]
            free = np.setdiff1d(np.arange(start, stop), current[stays])
            rows[members[rows[members] < 0]] = free
        return self._layout(current, lengths, rows)

    def _layout(self, current: I64, lengths: I64, rows: I64) -> Layout:
        moving = (current >= 0) & (current != rows)
        by_row = np.empty(len(rows), np.int64)
        by_row[rows] = lengths
        groups = []
        for start, stop in self.split(by_row):
            longest = int(by_row[start:stop].max())
            groups.append(RowGroup(start, stop, longest, longest == int(by_row[start:stop].min())))
        moved_length = int(lengths[moving].max()) if moving.any() else 0
        return Layout(rows, current[moving], rows[moving], moved_length, groups)

    def _cost(self, groups: list[RowGroup]) -> int:
        return sum((group.stop - group.start) * group.length + self.overhead for group in groups)

    def split(self, lengths: I64) -> list[tuple[int, int]]:
        """Cut rows, in this order, into ranges while a cut saves more than one more group costs."""
        ranges: list[tuple[int, int]] = []
        todo = [(0, len(lengths))] if len(lengths) else []
        while todo:
            start, stop = todo.pop()
            part = lengths[start:stop]
            cut = self._best_cut(part) if len(ranges) + len(todo) + 1 < _MAX_GROUPS else 0
            if cut:
                todo += [(start + cut, stop), (start, start + cut)]
            else:
                ranges.append((start, stop))
        return ranges

    def _best_cut(self, part: I64) -> int:
        """Return how many rows the first of two ranges should have; 0 if no cut is worth it."""
        if len(part) < 2:
            return 0
        # left[i], right[i]: longest row of either range if the first has i + 1 rows.
        left = np.maximum.accumulate(part)[:-1]
        right = np.maximum.accumulate(part[::-1])[::-1][1:]
        counts = np.arange(1, len(part))
        costs = counts * left + (len(part) - counts) * right
        best = int(costs.argmin())
        whole = len(part) * int(part.max())
        return best + 1 if whole - int(costs[best]) > self.overhead else 0


def _moved(layout: Layout, lengths: I64) -> int:
    """Return the number of positions that a layout copies."""
    return layout.moved_length * len(layout.sources)


def _fill(rows: I64, lengths: I64, free: I64) -> None:
    """Give the ``free`` rows, in order, to the completions without a row (-1), longest first."""
    without_row = np.flatnonzero(rows < 0)
    rows[without_row[np.argsort(-lengths[without_row], kind="stable")]] = free
