"""Plan of the next prefill pass: which positions to compute, and which to copy. Pure bookkeeping, no torch.

Prompts of new completions, and prompts with the tokens so far of interrupted ones, wait in one line. A pass takes from
its front as much as the budget allows, so that decoding continues between two passes. Tokens that two sequences share
are computed once: by the completions of one request, by continued completions of one prompt, or by prompts with a
common beginning, and by the turns of a conversation: the keys of a completion that has ended are retained (rows.py).
A completion that shares more with one of the same pass than with one that decodes already waits for
the next pass, and copies.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from realsys.generation.embedded.scheduler import LiveCompletion
from realsys.types import I32

#: number of shared tokens that justifies waiting for another completion, unless nothing else is to compute
MIN_SHARED = 16
_KEY = attrgetter("key")


class Donor(Protocol):
    """A sequence whose first positions are in row ``row``: of ``tokens``, at most length - 1.

    ``key`` sorts sequences by their tokens. ``kv_version``: version that computed the first position.
    """

    row: int
    kv_version: int

    @property
    def tokens(self) -> I32: ...

    @property
    def key(self) -> bytes: ...

    @property
    def length(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Part:
    """Positions start..stop-1 of a completion, to be computed.

    The positions before ``start`` are cached, if ``donor`` is set in its row.
    """

    completion: LiveCompletion
    start: int
    stop: int
    donor: Donor | None

    @property
    def completes(self) -> bool:
        """True if the completion can decode after this part."""
        return self.stop == self.completion.length - 1


class PrefixIndex:
    """Sequences in lexicographic order of their tokens.

    The one that shares most tokens with a given one is therefore next to its place.
    """

    def __init__(self, sequences: Iterable[Donor] = ()) -> None:
        self._sequences = sorted(sequences, key=_KEY)

    def add(self, sequence: Donor) -> None:
        self._sequences.insert(self._place(sequence.key), sequence)

    def remove(self, sequence: Donor) -> None:
        place = self._place(sequence.key)
        while self._sequences[place] is not sequence:  # equal ones are next to each other
            place += 1
        del self._sequences[place]

    def longest(self, completion: LiveCompletion) -> tuple[Donor | None, int]:
        """Find the sequence that shares most prompt tokens with ``completion``.

        Returns it, and the number of its cached positions that are valid for ``completion`` too.
        """
        best, most = None, 0
        place = self._place(completion.key)
        for neighbour in self._sequences[max(place - 1, 0) : place + 1]:
            common = _common(completion.tokens, neighbour.tokens)
            # The last token of a sequence is not cached yet, on either side.
            shared = min(common, neighbour.length - 1, completion.length - 1)
            if shared > most:
                best, most = neighbour, shared
        return best, most

    def _place(self, key: bytes) -> int:
        return bisect_left(self._sequences, key, key=_KEY)


def plan_pass(
    waiting: Sequence[LiveCompletion],
    decoding: Iterable[LiveCompletion],
    budget: int,
    retained: PrefixIndex | None = None,
) -> list[Part]:
    """Plan one pass: at least one part, together at most ``budget`` tokens.

    Only the first in line is ever cut, so at most one completion is cached in part. ``decoding`` and ``retained``:
    sequences whose keys may be used.
    """
    # Only completions that decode are donors. The rows of this pass are filled while it runs.
    cached = PrefixIndex(decoding)
    this_pass = PrefixIndex()
    parts: list[Part] = []
    for completion in waiting:
        start, stop, donor = completion.cached, completion.length - 1, None
        # Of two equally good ones the retained: its row is taken over without a copy.
        for index in (retained, cached) if retained is not None else (cached,):
            neighbour, shared = index.longest(completion)
            if shared > start:
                start, donor = shared, neighbour
        shared_soon = this_pass.longest(completion)[1]
        if shared_soon > start and shared_soon >= min(start + MIN_SHARED, stop):
            continue  # the next pass copies these tokens instead of computing them again
        if stop - start > budget:
            if parts:
                break  # a second cut would need a second extra row
            stop = start + budget
        budget -= stop - start
        parts.append(Part(completion, start, stop, donor))
        this_pass.add(completion)
    return parts


def _common(a: I32, b: I32) -> int:
    """Return the length of the common beginning."""
    length = min(len(a), len(b))
    differ = a[:length] != b[:length]
    return int(differ.argmax()) if differ.any() else length
