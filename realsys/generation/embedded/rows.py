"""Rows of the KV cache: rows of completions in progress, and of ended ones for the next turn. Pure bookkeeping.

    admitted ──assign──> its row ──end──> Retained ──assign──> the row of the next turn, without a copy
                                             └──> evicted, if a completion needs the row: the one used longest ago

Invariants
    progress-first  A retained row is free: it is evicted before a completion waits for a row, and gives way when the
                    running completions need rows 0..n-1. So there are always enough rows.
    oldest-first    The positions of a row were computed in order, so its first key is the oldest. Everyone who uses
                    keys of a row uses the first. One version therefore stamps a row: the version of its first key.
    bounded-reuse   No completion gets keys that are older than ``KvPolicy.reuse_versions``: ``EngineCore`` forgets
                    such rows at an update, and takes no running completion with such keys as a donor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from realsys.generation.embedded.evicted import EvictedKeys
from realsys.generation.embedded.prefill import Part, PrefixIndex
from realsys.generation.embedded.scheduler import LiveCompletion
from realsys.generation.protocol import UNSYNCED
from realsys.types import I32

#: Fewer positions are computed again in less time than keeping them takes, which short completions would all pay.
MIN_RETAINED = 32
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

    def assign(self, parts: Sequence[Part], active: Iterable[LiveCompletion], version: int) -> list[Copy]:
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

    def leave_extra(self, parts: Iterable[Part], active: Iterable[LiveCompletion]) -> list[Copy]:
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

    def _use(self, part: Part) -> None:
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
