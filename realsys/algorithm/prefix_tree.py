"""Beginnings that rows share, computed once: the prompt of a group, the history of turns and branches.

    row 0   p p p p a a a        beginning 0: p p p p           segments   p p p p | a a a | b | c c c
    row 1   p p p p b c c c      beginning 1: p p p p b                    row 0 = 0, 1    row 1 = 0, 2, 3
    row 2   p p p p b            (row 2 has nothing of its own)            row 2 = 0, 2

A DP head finds the beginnings of a group when it arrives (``shared_beginnings``). Their numbers are metadata of the
rows, so every rank makes the same tree of any set of rows without their tokens. Pure: no tensors.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from realsys.algorithm.balance import CostFunction
from realsys.types import I32, SequenceRef

#: (number of the beginning in its group, its tokens), the shortest first
Beginnings = list[tuple[int, int]]

#: Attention gathers all keys of a row in a tree. This many keys count as one token of the micro-batch.
KEYS_PER_TOKEN = 8
#: beginnings of a row at most: more turns than nearly all conversations have
MOST_BEGINNINGS = 64


def shared_beginnings(rows: Sequence[I32]) -> list[Beginnings]:
    """Return for each row of a group the beginnings that it shares with others. Tokens are compared, not hashes.

    A row gets the MOST_BEGINNINGS shortest ones, so the time and the metadata grow with the number of rows only.
    """
    found: list[Beginnings] = [[] for _ in rows]
    order = sorted(range(len(rows)), key=lambda k: rows[k].tobytes())  # any order in which like rows are neighbours
    common = [_common(rows[a], rows[b]) for a, b in pairwise(order)]
    runs = [(0, len(rows) - 1)] if len(rows) > 1 else []  # first and last of neighbours that may share more
    number = 0
    for _ in range(MOST_BEGINNINGS):
        for first, last in runs:
            if length := min(common[first:last]):
                for k in order[first : last + 1]:
                    found[k].append((number, length))
                number += 1
        runs = [part for first, last in runs for part in _parts(common, first, last)]
    return found


def _parts(common: Sequence[int], first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of neighbours that share more than all of ``first`` to ``last`` do."""
    least = min(common[first:last])
    for k in range(first, last + 1):
        if k == last or common[k] == least:
            if k > first:
                yield first, k
            first = k + 1


def _common(a: I32, b: I32) -> int:
    """Return the number of tokens with which both rows begin."""
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size


class TreeSegment(NamedTuple):
    """Tokens ``begin`` to before ``end`` of row ``row``. ``parents``: the segments before it in the row, in order."""

    row: int
    begin: int
    end: int
    parents: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.end - self.begin


class RowTree(NamedTuple):
    """Rows as segments, each of which is computed once. Segments without parents come first, the longest first.

    ``chains``: for each row its segments, from its start on.
    """

    segments: list[TreeSegment]
    chains: list[tuple[int, ...]]

    @property
    def tokens(self) -> int:
        return sum(segment.size for segment in self.segments)


def row_tree(refs: Sequence[SequenceRef]) -> RowTree:
    """Return the tree of ``refs``. A row of a group that does not pay is one segment (``unit_size``).

    The same refs give the same tree on every rank.
    """
    groups: dict[int, list[SequenceRef]] = defaultdict(list)
    for ref in refs:
        groups[ref.group].append(ref)
    pay = {group for group, rows in groups.items() if _Room(rows).pays}
    members = Counter((ref.group, node) for ref in refs if ref.group in pay for node, _ in ref.shared)
    places: dict[tuple[int, int], tuple[int, int, int]] = {}  # (group, beginning) -> row, begin, end of its segment
    paths: list[list[tuple[int, int, int]]] = []  # of each row
    for row, ref in enumerate(refs):
        path, begin = [], 0
        for (node, end), (deeper, _) in zip(ref.shared, [*ref.shared[1:], (-1, 0)], strict=False):
            count = members[ref.group, node]
            if count > 1 and count > members[ref.group, deeper]:  # else the deeper one has the same rows
                path.append(places.setdefault((ref.group, node), (row, begin, end)))
                begin = end
        if begin < ref.length:
            path.append((row, begin, ref.length))
        paths.append(path)
    return _ordered(paths)


def _ordered(paths: list[list[tuple[int, int, int]]]) -> RowTree:
    before = {place: path[:k] for path in paths for k, place in enumerate(path)}

    def size(place: tuple[int, int, int]) -> int:
        return place[2] - place[1]

    # Neighbours of similar size share a bucket of the attention, also if they have the same or similar parents.
    roots = sorted((place for place, above in before.items() if not above), key=lambda p: (-size(p), p))
    others = sorted((place for place, above in before.items() if above), key=lambda p: (-p[1], before[p], -size(p), p))
    number = {place: k for k, place in enumerate([*roots, *others])}
    segments = [TreeSegment(*place, tuple(number[above] for above in before[place])) for place in number]
    return RowTree(segments, [tuple(number[place] for place in path) for path in paths])


class _Room:
    """Tokens of a micro-batch that rows take as they are added.

    rows   tokens of the rows
    size   tokens of their tree, and a share of the keys that attention gathers for the rows
    nodes  (group, beginning) of the rows
    """

    def __init__(self, unit: Iterable[SequenceRef] = ()) -> None:
        self.rows = 0
        self.size = 0
        self.nodes: set[tuple[int, int]] = set()
        self.add(unit)

    def add(self, unit: Iterable[SequenceRef]) -> None:
        for ref in unit:
            saved = max((end for node, end in ref.shared if (ref.group, node) in self.nodes), default=0)
            self.nodes.update((ref.group, node) for node, _ in ref.shared)
            self.rows += ref.length
            self.size += ref.length - saved + (-(-ref.length // KEYS_PER_TOKEN) if ref.shared else 0)

    @property
    def pays(self) -> bool:
        return self.size < self.rows

    @property
    def taken(self) -> int:
        return min(self.size, self.rows)


def unit_size(unit: Sequence[SequenceRef]) -> int:
    """Return the tokens that a unit takes of a micro-batch: those of its tree if that pays, else those of its rows."""
    return _Room(unit).taken


def tree_units(units: Sequence[list[SequenceRef]], capacity: int = 0) -> list[list[SequenceRef]]:
    """Join the units of each group whose tree pays into units that fit into ``capacity`` tokens (0: no limit).

    A unit of ``row_units`` stays whole. Units of groups that do not pay stay in their order, before the others.
    """
    groups: dict[int, list[list[SequenceRef]]] = defaultdict(list)
    for unit in units:
        groups[unit[0].group].append(unit)
    trees = {group for group, own in groups.items() if _Room(ref for unit in own for ref in unit).pays}
    joined = [unit for unit in units if unit[0].group not in trees]
    for group in sorted(trees):
        # Branches of one beginning are neighbours.
        own = sorted(groups[group], key=lambda unit: ([node for node, _ in unit[0].shared], unit[0].sample_id))
        room = _Room()
        for number, unit in enumerate(own):
            room.add(unit)
            if number and (not capacity or room.taken <= capacity):
                joined[-1].extend(unit)
            else:
                joined.append(list(unit))
                room = _Room(unit)
    return joined


def tree_cost(unit: Sequence[SequenceRef], cost: CostFunction) -> float:
    """Return the cost of a unit, whose beginnings are computed once."""
    segments = row_tree(unit).segments
    return sum(cost([segment.end for segment in segments])) - sum(cost([segment.begin for segment in segments]))
