"""Cached keys and values by row, and their reuse for sequences with a common beginning. Pure bookkeeping, no torch.

    waiting ──plan_pass──> parts: positions to compute, and a donor of the positions before them
    admitted ──assign──> its row ──end──> Retained ──assign──> the row of the next turn, without a copy
                                             └──> evicted, if a completion needs the row: the one used longest ago

Prompts of new completions, and prompts with the tokens so far of interrupted ones, wait in one line. A pass takes from
its front as much as the budget allows, so that decoding continues between two passes. Tokens that two sequences share
are computed once: by the completions of one request, by continued completions of one prompt, by prompts with a common
beginning, and by the turns of a conversation, whose keys are retained when a completion ends. A completion that shares
more with one of the same pass than with one that decodes already waits for the next pass, and copies.

Invariants
    progress-first  A retained row is free: it is evicted before a completion waits for a row, and gives way when the
                    running completions need rows 0..n-1. So there are always enough rows.
    oldest-first    The positions of a row were computed in order, so its first key is the oldest. Everyone who uses
                    keys of a row uses the first. One version therefore stamps a row: the version of its first key.
    bounded-reuse   No completion gets keys that are older than ``KvPolicy.reuse_versions``: ``EngineCore`` forgets
                    such rows at an update, and takes no running completion with such keys as a donor.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

import numpy as np

from realsys.generation.embedded.scheduler import LiveCompletion
from realsys.generation.protocol import UNSYNCED
from realsys.types import I32

log = logging.getLogger(__name__)

#: Fewer positions are computed again in less time than keeping them takes, which short completions would all pay.
MIN_RETAINED = 32
#: number of shared tokens that justifies waiting for another completion, unless nothing else is to compute
MIN_SHARED = 16
#: requests that missed their keys, and share of the computed tokens, from which a server warns
_WARN_REQUESTS, _WARN_SHARE = 32, 0.25
#: sequences that are remembered; a fingerprint takes about 100 bytes
_REMEMBERED = 1 << 14
_KEY = attrgetter("key")
#: (source row, target row, positions)
Copy = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class KvPolicy:
    """Use of cached keys and values after a weight update, and after the end of their completion.

    keep            at an update they stay; otherwise all are computed again
    reuse_versions  with ``keep``: versions by which keys that a completion gets may be older than the weights
    retain          at the end they stay; otherwise a short completion costs up to 4.4 % less, if no turn follows
    """

    keep: bool = False
    reuse_versions: int = 0
    retain: bool = True

    def outlives(self, before: int, after: int) -> bool:
        """Return True if keys stay when the weights of version ``after`` replace those of ``before``."""
        # A trainer that has recovered may publish other weights under an earlier version: no older key is of use.
        # Keys of weights without a version have no stamp that a row could carry.
        return self.keep and UNSYNCED < before < after

    def oldest(self, version: int) -> int:
        """Return the version of the oldest keys that a completion may get from others under weights ``version``."""
        return version - self.reuse_versions


@dataclass(slots=True, eq=False)
class Retained:
    """Cached positions of an ended completion: keys and values of all ``tokens``, in row ``row``.

    ``kv_version``: version that computed the first of them.
    """

    tokens: I32
    key: bytes
    row: int
    kv_version: int

    @property
    def length(self) -> int:
        # Of a sequence in progress the last token is not cached; here it is the token that comes next.
        return len(self.tokens) + 1

    @property
    def cached(self) -> int:
        return len(self.tokens)


class CacheRows:
    """Owner of the retained rows. It decides which row a completion gets.

    There are ``count`` rows for whole sequences, and after them the ``extra`` one for the completion that is cut.
    """

    def __init__(self, count: int) -> None:
        self.extra = count
        self.index = PrefixIndex()  # holds the retained rows
        self.evicted = EvictedKeys()
        self._retained: list[Retained] = []  # the first one was used longest ago

    @property
    def tokens(self) -> int:
        """Number of retained positions."""
        return sum(entry.cached for entry in self._retained)

    # ---- rows of a prefill pass

    def assign(self, parts: Sequence[PrefillPart], active: Iterable[LiveCompletion], version: int) -> list[Copy]:
        """Give rows to the completions of a pass. Returns the copies to make, all together, before the pass."""
        # First, so that no row that a part takes over is evicted for another part.
        for part in parts:
            self._use(part)
        free = self._free(active)
        copies = []
        for part in parts:
            completion, donor = part.completion, part.donor
            if completion.row < 0:
                # plan_pass cuts at most one completion, so one extra row is enough. It leaves the other
                # rows to completions that can decode.
                completion.row = next(free) if part.completes else self.extra
            if donor is not None:
                completion.kv_version = donor.kv_version
                # The row of a donor may be evicted in this pass, even for its own user: then nothing is to copy.
                # Copies of a pass read before they write, so another target is no danger to them.
                if donor.row != completion.row:
                    copies.append((donor.row, completion.row, part.start))
            elif completion.cached == 0:
                completion.kv_version = version
            completion.cached = part.stop
        return copies

    def leave_extra(self, parts: Iterable[PrefillPart], active: Iterable[LiveCompletion]) -> list[Copy]:
        """Move the completion that a pass has completed out of the extra row, which the next cut one needs."""
        copies = []
        for part in parts:
            if part.completes and part.completion.row == self.extra:
                part.completion.row = next(self._free(active))
                copies.append((self.extra, part.completion.row, part.stop))
        return copies

    def make_room(self, running: int, prefilling: Iterable[LiveCompletion]) -> list[Copy]:
        """Move all that does not run out of rows 0..running-1. Returns the moves, which belong to those of a layout."""
        others: list[Retained | LiveCompletion] = [*self._retained]
        others += [completion for completion in prefilling if completion.row >= 0]
        moving = [other for other in others if other.row < running]
        if not moving:
            return []
        taken = {other.row for other in others}
        homes = (row for row in range(running, self.extra) if row not in taken)
        moves = []
        for other in moving:
            home = next(homes)
            moves.append((other.row, home, other.cached))
            other.row = home
        return moves

    # ---- ended completions

    def retain(self, completion: LiveCompletion, sampled: I32, cached: int) -> None:
        """Retain the first ``cached`` positions of a completion that has ended with ``sampled`` after its prompt.

        Not without a sampled token: its log-prob is the sign that the keys are finite.
        """
        if cached < MIN_RETAINED or not len(sampled) or completion.row == self.extra:
            return
        tokens = np.concatenate([completion.tokens, sampled])[:cached]
        key = completion.key + sampled.astype(">i4").tobytes()
        entry = Retained(tokens, key[: 4 * cached], completion.row, completion.kv_version)
        self._retained.append(entry)
        self.index.add(entry)

    def forget(self, oldest: int | None = None) -> None:
        """Free the retained rows whose first key is older than version ``oldest``; None: all."""
        for entry in [e for e in self._retained if oldest is None or e.kv_version < oldest]:
            self._remove(entry)
        self.evicted.forget(oldest)

    def relabel(self, old: int, new: int) -> None:
        """Stamp rows of version ``old`` as ``new``, which has the same weights."""
        for entry in self._retained:
            if entry.kv_version == old:
                entry.kv_version = new
        self.evicted.relabel(old, new)

    # ---- parts

    def _use(self, part: PrefillPart) -> None:
        """Give the row of a retained donor to its user if this uses all of it; else the user copies."""
        donor = part.donor
        if not isinstance(donor, Retained) or donor not in self._retained:
            return  # a second user copies from the row of the first, which has the same beginning
        self._retained.remove(donor)
        if part.completion.row < 0 and part.start == donor.cached:
            self.index.remove(donor)
            part.completion.row = donor.row
        else:
            self._retained.append(donor)  # used last

    def _free(self, active: Iterable[LiveCompletion]) -> Iterator[int]:
        """Yield free rows, then those of retained sequences, used longest ago first."""
        taken = {completion.row for completion in active} | {entry.row for entry in self._retained}
        yield from (row for row in range(self.extra) if row not in taken)
        while self._retained:
            entry = self._retained[0]
            self._remove(entry)
            self.evicted.add(entry.key, entry.cached, entry.kv_version)
            yield entry.row

    def _remove(self, entry: Retained) -> None:
        self._retained.remove(entry)
        self.index.remove(entry)


# ---- plan of a prefill pass: what to compute, and what to copy


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
class PrefillPart:
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
            length = min(len(completion.tokens), len(neighbour.tokens))
            differ = completion.tokens[:length] != neighbour.tokens[:length]
            common = int(differ.argmax()) if differ.any() else length
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
) -> list[PrefillPart]:
    """Plan one pass: at least one part, together at most ``budget`` tokens.

    Only the first in line is ever cut, so at most one completion is cached in part. ``decoding`` and ``retained``:
    sequences whose keys may be used.
    """
    # Only completions that decode are donors. The rows of this pass are filled while it runs.
    cached = PrefixIndex(decoding)
    this_pass = PrefixIndex()
    parts: list[PrefillPart] = []
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
        parts.append(PrefillPart(completion, start, stop, donor))
        this_pass.add(completion)
    return parts


# ---- evicted sequences: how much more rows would have saved


class EvictedKeys:
    """Fingerprints of evicted sequences, each of its first 2^k tokens, with the version of its first key.

    ``tokens``: tokens that were computed again because their row was needed, of ``requests`` requests.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.requests = 0
        self._warned = False
        self._versions: dict[int, int] = {}  # the first one was evicted longest ago

    def add(self, key: bytes, cached: int, kv_version: int) -> None:
        """Remember the first half or more of ``cached`` tokens. ``key``: tokens of 4 bytes."""
        mark = _fingerprint(key, 1 << (cached.bit_length() - 1))
        self._versions.pop(mark, None)
        self._versions[mark] = kv_version
        if len(self._versions) > _REMEMBERED:
            del self._versions[next(iter(self._versions))]

    def longest(self, key: bytes, cached: int) -> int:
        """Return how many of the first ``cached`` tokens an evicted sequence had, at least."""
        if not self._versions:
            return 0
        lengths = [1 << power for power in range(cached.bit_length())]
        return max((length for length in lengths if _fingerprint(key, length) in self._versions), default=0)

    def count(self, parts: Iterable[PrefillPart], prefilled: int, rows: int) -> None:
        """Count what more than ``rows`` rows would have saved; warn once if it is a large share of ``prefilled``."""
        for part in parts:
            completion = part.completion
            if completion.cached:
                continue  # counted with its first part
            missing = self.longest(completion.key, completion.length - 1) - part.start
            if missing > 0:
                self.tokens += missing
                self.requests += 1
        if not self._warned and self.requests >= _WARN_REQUESTS and self.tokens > _WARN_SHARE * prefilled:
            self._warned = True
            log.warning(
                "%d of %d prompt tokens were computed again, because other conversations needed the rows of their "
                "keys: raise generation.embedded.cache_rows or max_running (%d rows now)",
                *(self.tokens, prefilled, rows),
            )

    def forget(self, oldest: int | None) -> None:
        """Forget the sequences older than version ``oldest``, which no request could use; None: all."""
        versions = self._versions.items()
        self._versions = {} if oldest is None else {mark: v for mark, v in versions if v >= oldest}

    def relabel(self, old: int, new: int) -> None:
        self._versions = {mark: new if version == old else version for mark, version in self._versions.items()}


def _fingerprint(key: bytes, tokens: int) -> int:
    return hash(key[: 4 * tokens])
