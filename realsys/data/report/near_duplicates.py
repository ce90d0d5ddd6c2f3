"""Train prompts that are nearly a held-out prompt: their sets of word triples have a Jaccard similarity of 0.8 or more.

    similarity = triples in both / triples in either

A pair that similar shares at least 0.8 n of the n triples of the held-out prompt. So it shares one of any
``n - ceil(0.8 n) + 1`` of them. Only that many are indexed, the rarest ones: no pair is missed, and few are compared.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import NamedTuple

SIMILAR = 0.8
_WORDS = 3  # words of a shingle
_TOKEN = re.compile(r"\w+|[^\w\s]")


class Near(NamedTuple):
    """A held-out prompt that is like a train prompt."""

    where: str
    similarity: float


class NearDuplicates:
    """Index of held-out prompts: first ``add`` all of them, then ask for the ``nearest`` of each train prompt."""

    def __init__(self) -> None:
        self._held_out: list[tuple[str, frozenset[int]]] = []
        self._index: dict[int, list[int]] | None = None

    def __len__(self) -> int:
        return len(self._held_out)

    def add(self, where: str, text: str) -> None:
        """Add a held-out prompt."""
        self._held_out.append((where, shingles(text)))
        self._index = None

    def nearest(self, text: str) -> Near | None:
        """Return the most similar held-out prompt; None if none is as similar as ``SIMILAR``."""
        if self._index is None:
            self._index = self._make_index()
        own = shingles(text)
        best: Near | None = None
        for number in {number for shingle in own for number in self._index.get(shingle, ())}:
            where, other = self._held_out[number]
            both = len(own & other)
            similarity = both / (len(own) + len(other) - both)
            if similarity >= SIMILAR and (best is None or similarity > best.similarity):
                best = Near(where, similarity)
        return best

    def _make_index(self) -> dict[int, list[int]]:
        counts = Counter(shingle for _, own in self._held_out for shingle in own)
        index: dict[int, list[int]] = {}
        for number, (_, own) in enumerate(self._held_out):
            needed = len(own) - math.ceil(SIMILAR * len(own)) + 1
            for shingle in sorted(own, key=lambda shingle: (counts[shingle], shingle))[:needed]:
                index.setdefault(shingle, []).append(number)
        return index


def shingles(text: str) -> frozenset[int]:
    """Return hashes of all runs of three words; a shorter text is one run. They are valid in this process only."""
    words = _TOKEN.findall(text.casefold())
    last = max(1, len(words) - _WORDS + 1)
    return frozenset(hash(tuple(words[start : start + _WORDS])) for start in range(last))
