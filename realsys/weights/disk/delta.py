"""Difference between two versions of a tensor, element by element and without loss. numpy only.

After a small optimizer step most bf16 elements round to their old value, and the others move by a unit
or two in the last place. So a delta holds two bytes for every changed element: the number of unchanged
elements before it, and the difference of the two bit patterns, taken as integers:

    counts    3 x uint64   lengths of the three streams
    wide      uint16/32    new bit patterns of elements whose difference does not fit in a byte
    steps     uint8        unchanged elements before the next changed one; 255: 255 unchanged elements,
                           and no changed one after them
    moves     int8         new - old, modulo the word; -128: take the next element of ``wide``

A run of 255 unchanged elements costs one byte.
"""

from __future__ import annotations

import itertools
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from realsys.errors import WeightsError

Bytes: TypeAlias = npt.NDArray[np.uint8]

#: elements that are compared or changed at a time; few enough to stay in the cache
_BLOCK = 1 << 18
_SKIP, _WIDE = 255, -128
#: largest useful size of a delta, as a share of the tensor: applying takes longer than reading
WORTH = 0.5
_WORDS: dict[int, tuple[type[np.unsignedinteger[Any]], type[np.signedinteger[Any]]]] = {
    2: (np.uint16, np.int16),
    4: (np.uint32, np.int32),
}
_COUNTS = np.dtype("<u8")


def encode(old: Bytes, new: Bytes, itemsize: int) -> Bytes | None:
    """Return the delta from ``old`` to ``new``, two tensors of one size as bytes; None if it is not worth it.

    ``itemsize``: bytes of an element; only elements of 2 and 4 bytes have deltas.
    """
    if itemsize not in _WORDS or old.size != new.size:
        return None
    unsigned, signed = _WORDS[itemsize]
    before, after = old.view(unsigned), new.view(unsigned)
    steps: list[Bytes] = []
    moves: list[npt.NDArray[np.int8]] = []
    wide: list[npt.NDArray[Any]] = []
    last = -1  # position of the last changed element
    size = 0
    for start in range(0, before.size, _BLOCK):
        a, b = before[start : start + _BLOCK], after[start : start + _BLOCK]
        at = np.flatnonzero(a != b)
        if not at.size:
            continue
        steps.append(_steps(np.diff(at, prepend=last - start) - 1))
        last = start + int(at[-1])
        values = b[at]
        difference = (values - a[at]).view(signed)
        narrow = difference.astype(np.int8)
        far = (narrow != difference) | (narrow == _WIDE)
        narrow[far] = _WIDE
        moves.append(narrow)
        wide.append(values[far])
        size += steps[-1].nbytes + narrow.nbytes + wide[-1].nbytes
        if size > WORTH * new.nbytes:
            return None
    streams = [np.concatenate(stream) if stream else np.empty(0, np.uint8) for stream in (wide, steps, moves)]
    counts = np.array([stream.size for stream in streams], _COUNTS)
    return np.concatenate([counts.view(np.uint8), *(stream.view(np.uint8) for stream in streams)])


def apply(tensor: Bytes, delta: Bytes, itemsize: int) -> None:
    """Change ``tensor`` in place. Raises WeightsError if the delta is malformed; the tensor is then spoilt."""
    if itemsize not in _WORDS:
        raise WeightsError(f"a delta of elements of {itemsize} bytes: must be 2 or 4")
    unsigned, signed = _WORDS[itemsize]
    words = tensor.view(unsigned)
    wide, steps, moves = _streams(delta, itemsize)
    last = -1
    moved = widened = 0
    for start in range(0, steps.size, _BLOCK):
        part = steps[start : start + _BLOCK]
        changes = part != _SKIP
        at = np.cumsum(part + changes.astype(np.intp))
        at += last
        last = int(at[-1])
        at = at[changes]
        move = moves[moved : moved + at.size]
        moved += at.size
        if last >= words.size or move.size != at.size:
            break
        values = words[at] + move.astype(signed).view(unsigned)
        far = np.flatnonzero(move == _WIDE)
        replacement = wide[widened : widened + far.size]
        widened += far.size
        if replacement.size != far.size:
            break
        values[far] = replacement
        words[at] = values
    if last >= words.size or (moved, widened) != (moves.size, wide.size):
        raise WeightsError(f"the delta does not fit a tensor of {words.size} elements")


def _steps(skipped: npt.NDArray[np.intp]) -> Bytes:
    """Encode the numbers of unchanged elements before each changed one as bytes."""
    if skipped.max() < _SKIP:
        return skipped.astype(np.uint8)
    full, rest = np.divmod(skipped, _SKIP)
    steps = np.full(skipped.size + int(full.sum()), _SKIP, np.uint8)
    steps[np.arange(skipped.size) + np.cumsum(full)] = rest
    return steps


def _streams(delta: Bytes, itemsize: int) -> tuple[npt.NDArray[Any], Bytes, npt.NDArray[np.int8]]:
    head = 3 * _COUNTS.itemsize
    if delta.size < head:
        raise WeightsError(f"a delta of {delta.size} bytes is too short")
    n_wide, n_steps, n_moves = (int(count) for count in delta[:head].view(_COUNTS))
    # The counts are Python integers: sums of uint64 could wrap around to the right total.
    ends = np.cumsum([head, n_wide * itemsize, n_steps, n_moves])
    if int(ends[-1]) != delta.size:
        raise WeightsError(f"a delta of {delta.size} bytes has a header for {ends[-1]} bytes")
    wide, steps, moves = (delta[a:b] for a, b in itertools.pairwise(ends))
    return wide.view(_WORDS[itemsize][0]), steps, moves.view(np.int8)
