"""Dynamic micro-batching: packs sequences of very different lengths into few micro-batches of bounded size.

    lengths --pack--> micro-batches of one DP rank --pack_equal--> the same number of micro-batches on every rank

Three packers have one signature: ``fewest_sequences`` is Algorithm 1 of the paper, ``first_fit`` needs fewer
micro-batches, ``balanced`` spreads the tokens evenly over them. ``pack`` is the default; benchmarks/microbatch.py
compares them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from realsys.algorithm.balance import Costs
from realsys.errors import DataError

Lengths = Sequence[int] | npt.NDArray[np.integer]

#: ``balanced`` does not change micro-batches that are filled to 1/_FULL on average.
_FULL = 1.01


class Packer(Protocol):
    """Function that packs sequences into micro-batches of at most ``capacity`` tokens, at least ``k_min`` of them."""

    def __call__(self, lengths: Lengths, capacity: int, k_min: int = 1) -> list[list[int]]: ...


def fewest_sequences(lengths: Lengths, capacity: int, k_min: int = 1) -> list[list[int]]:
    """Pack by Algorithm 1: longest first, each into the fitting micro-batch with the fewest sequences.

    A new micro-batch is opened while there are fewer than ``k_min``, and if none has room. Of several with
    equally few sequences, the one that has had room for the longest time is chosen. Returns indices into
    ``lengths``. DataError names a sequence that is longer than ``capacity`` tokens, or empty.
    """
    order, distinct, starts = _runs_by_length(lengths, capacity)
    batches: list[list[int]] = []
    room: list[int] = []
    # Lengths only fall, so a micro-batch with room keeps it until it is filled further. fitting[c]:
    # micro-batches with c sequences and room for the current length. waking[d]: micro-batches that have
    # room from length distinct[d] on.
    fitting: list[deque[int]] = [deque(), deque()]
    waking: list[list[int]] = [[] for _ in distinct]
    low = 1  # every fitting[c] with c < low is empty
    for d in range(len(distinct) - 1, -1, -1):
        length = distinct[d]
        for b in waking[d]:
            count = len(batches[b])
            fitting[count].append(b)
            low = min(low, count)
        for index in order[starts[d] : starts[d + 1]]:
            while low < len(fitting) and not fitting[low]:
                low += 1
            if len(batches) < k_min or low == len(fitting):
                b, count = len(batches), 1
                batches.append([index])
                room.append(capacity - length)
                low = 1
            else:
                b, count = fitting[low].popleft(), low + 1
                batches[b].append(index)
                room[b] -= length
            if count == len(fitting):
                fitting.append(deque())
            if room[b] >= length:
                fitting[count].append(b)
            elif room[b] >= distinct[0]:
                waking[bisect_right(distinct, room[b], 0, d) - 1].append(b)
    return batches


def first_fit(lengths: Lengths, capacity: int, k_min: int = 1) -> list[list[int]]:
    """Pack by first-fit decreasing: fill one micro-batch at a time with the longest sequence that still fits.

    With fewer than ``k_min`` micro-batches the largest are split. Results and errors are those of
    ``fewest_sequences``.
    """
    order, distinct, starts = _runs_by_length(lengths, capacity)
    left = [starts[d + 1] - starts[d] for d in range(len(distinct))]
    below = list(range(-1, len(distinct) - 1))  # a chain from each used-up length down to one with sequences left

    def longest_left(d: int) -> int:
        """Return the largest d' <= d with sequences left, or -1; shorten the chain on the way."""
        while d >= 0 and not left[d]:
            nearer = below[d]
            if nearer >= 0 and not left[nearer]:
                below[d] = below[nearer]
            d = nearer
        return d

    batches: list[list[int]] = []
    top = len(distinct) - 1
    while top >= 0:
        batch: list[int] = []
        room, d = capacity, top
        while d >= 0:
            length, last = distinct[d], starts[d] + left[d]
            take = room // length
            if take > 1:
                take = min(take, left[d])
            batch += order[last - take : last]
            left[d] -= take
            room -= take * length
            if room < distinct[0]:
                break
            d = bisect_right(distinct, room, 0, d) - 1
            if d >= 0 and not left[d]:
                d = longest_left(d)
        batches.append(batch)
        if not left[top]:
            top = longest_left(top)
    return split_to(batches, lengths, k_min) if len(batches) < k_min else batches


def balanced(lengths: Lengths, capacity: int, k_min: int = 1, costs: Costs | None = None) -> list[list[int]]:
    """Pack into as few micro-batches as ``first_fit``, with the tokens spread evenly if the capacity allows.

    First fit leaves the last micro-batch nearly empty. Spreading the tokens costs no additional forward
    pass, and the largest micro-batch, which determines the peak of memory, becomes smaller. With ``costs``
    (one per sequence) these are spread instead: a stage of a pipeline waits for the most expensive one. Returns
    ``max(count of first_fit, k_min)`` micro-batches, or one per sequence if those are fewer:
    ``pack_equal`` relies on this.
    """
    packed = first_fit(lengths, capacity, k_min)
    total = int(np.sum(lengths))
    if len(packed) * capacity <= total * _FULL:
        return packed  # nearly full: the even split would take long and then overflow
    return _spread(lengths, len(packed), capacity, lengths if costs is None else costs) or packed


pack: Packer = balanced


def pack_equal(
    lengths: Sequence[Lengths], capacity: int, k_min: int = 1, costs: Sequence[Costs] | None = None
) -> list[list[list[int]]]:
    """Pack the sequences of every DP rank into the same number of micro-batches.

    The number is the maximum over ranks, at least ``k_min``. ``lengths[d]`` (and ``costs[d]``, as in
    ``balanced``) belong to rank d, and
    ``result[d][m]`` indexes them. Pipeline schedules and collectives need the same number on every rank.
    A rank with fewer sequences than micro-batches gets empty ones, which it must run on a masked dummy.
    """
    needed = [len(first_fit(rank_lengths, capacity)) for rank_lengths in lengths]
    count = max([k_min, *needed])
    by_rank = zip(lengths, lengths if costs is None else costs, strict=True)
    equal = [balanced(own, capacity, count, own_costs) if len(own) else [] for own, own_costs in by_rank]
    return [batches + [[] for _ in range(count - len(batches))] for batches in equal]


def split_to(batches: list[list[int]], lengths: Lengths, count: int) -> list[list[int]]:
    """Split micro-batches until there are ``count``, or each holds one sequence. No split exceeds a capacity.

    Each time, the one with the most tokens is halved: its sequences, longest first, go to the lighter half.
    """
    tokens = [sum(int(lengths[i]) for i in batch) for batch in batches]
    result = [list(batch) for batch in batches]
    while len(result) < count:
        splittable = [b for b, batch in enumerate(result) if len(batch) > 1]
        if not splittable:
            break
        b = max(splittable, key=tokens.__getitem__)
        halves: tuple[list[int], list[int]] = ([], [])
        sums = [0, 0]
        for index in sorted(result[b], key=lambda i: (-int(lengths[i]), i)):
            side = 0 if sums[0] <= sums[1] else 1
            halves[side].append(index)
            sums[side] += int(lengths[index])
        result[b], tokens[b] = halves[0], sums[0]
        result.append(halves[1])
        tokens.append(sums[1])
    return result


def _spread(lengths: Lengths, count: int, capacity: int, costs: Costs) -> list[list[int]] | None:
    """Put each sequence, most expensive first, into the cheapest micro-batch with room; None if none has room."""
    order = np.argsort(-np.asarray(costs), kind="stable").tolist()
    result: list[list[int]] = [[] for _ in range(count)]
    room = [capacity] * count
    heap = [(0.0, number) for number in range(count)]
    for index in order:
        length, cost = int(lengths[index]), float(costs[index])
        full = []
        while heap and room[heap[0][1]] < length:
            full.append(heappop(heap))
        if not heap:
            return None
        total, number = heap[0]
        result[number].append(index)
        room[number] -= length
        heapreplace(heap, (total + cost, number))
        for entry in full:
            heappush(heap, entry)
    return result


def _runs_by_length(lengths: Lengths, capacity: int) -> tuple[list[int], list[int], list[int]]:
    """Sort the indices by length (ascending, stable): order, distinct lengths, and start of each one's run.

    ``order[starts[d]:starts[d + 1]]`` are the sequences of length ``distinct[d]``.
    """
    array = np.asarray(lengths, np.int64)
    if array.size == 0:
        return [], [], [0]
    longest, shortest = int(array.argmax()), int(array.argmin())
    if array[longest] > capacity:
        raise DataError(
            f"sequence {longest} has {array[longest]} tokens, but a micro-batch holds {capacity}: increase"
            " train.microbatch_tokens or decrease generation.sampling.max_new_tokens"
        )
    if array[shortest] < 1:
        raise DataError(f"sequence {shortest} has {array[shortest]} tokens: an empty sequence cannot be trained")
    order = np.argsort(array, kind="stable")
    ascending = array[order]
    starts = np.flatnonzero(np.diff(ascending, prepend=0))
    return order.tolist(), ascending[starts].tolist(), [*starts.tolist(), array.size]
