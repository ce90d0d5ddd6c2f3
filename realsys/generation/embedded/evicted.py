"""Memory of the sequences whose keys gave way to others: it tells how much more rows of the cache would have saved."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from realsys.generation.embedded.prefill import Part

log = logging.getLogger(__name__)

#: requests that missed their keys, and share of the computed tokens, from which a server warns
_WARN_REQUESTS, _WARN_SHARE = 32, 0.25
#: sequences that are remembered; a fingerprint takes about 100 bytes
_REMEMBERED = 1 << 14


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

    def count(self, parts: Iterable[Part], prefilled: int, rows: int) -> None:
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
