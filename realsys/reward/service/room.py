"""Room of a reward service: a bound on the items that it holds and on the bytes of their requests. Pure.

    request ──bytes──> full? ── no ──> items ──> full? ── no ──> held until decided or until the caller has left
                         └── yes ─────────────────┴── yes ──> 503 with Retry-After

bounded-room   it holds at most ``max_items`` and ``max_bytes``, or one request that is larger than that
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

from realsys.cluster.http_server import RefusedRequest
from realsys.observe.rate import RateWindow

MAX_BYTES = 512 << 20  # bytes of the requests that a service holds
_FIRST_S, _LAST_S = 1, 10  # bounds on the wait that a full service asks for


class Room:
    """Items and bytes that a service holds, and its rate of decisions. ``clock`` returns seconds."""

    def __init__(self, max_items: int, clock: Callable[[], float], max_bytes: int = MAX_BYTES) -> None:
        self.items = 0
        self.bytes = 0
        self.refused = 0  # requests
        self.decided = RateWindow()
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._clock = clock

    @contextlib.contextmanager
    def body(self, size: int) -> Iterator[None]:
        """Hold the ``size`` bytes of a request. Raises Refused."""
        if self.bytes and self.bytes + size > self._max_bytes:
            raise self._full(f"{self.bytes} bytes of requests are held, at most {self._max_bytes}", self.items)
        self.bytes += size
        try:
            yield
        finally:
            self.bytes -= size

    def enter(self, count: int) -> None:
        """Hold ``count`` more items; each must ``leave``. Raises Refused."""
        if self.items and self.items + count > self._max_items:
            excess = self.items + count - self._max_items
            raise self._full(f"{self.items} completions are held, at most {self._max_items}", excess)
        self.items += count

    def leave(self, decided: bool) -> None:
        """Let one item go. ``decided``: it was not given up by its caller."""
        self.items -= 1
        if decided:
            self.decided.add(1, self._clock())

    def rate(self) -> float:
        """Return items decided per second."""
        return self.decided.rate(self._clock())

    def _full(self, problem: str, excess: int) -> RefusedRequest:
        """Return the refusal, with the time in which ``excess`` items are decided."""
        self.refused += 1
        rate = self.rate()
        wait_s = min(_LAST_S, max(_FIRST_S, math.ceil(excess / rate))) if rate else _LAST_S
        return RefusedRequest(503, f"the reward service is full: {problem}", retry_after_s=wait_s)
