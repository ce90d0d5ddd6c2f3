"""Amounts per second over a sliding window, in one-second buckets."""

from __future__ import annotations

from collections import deque


class RateWindow:
    """Amounts of the last ``window_s`` seconds. Memory is bounded by the window, not by the number of calls."""

    def __init__(self, window_s: int = 30) -> None:
        self._window_s = window_s
        self._buckets: deque[list[int]] = deque()  # [second, amount]
        self._started: float | None = None
        self.total = 0

    def add(self, amount: int, now: float) -> None:
        self._started = now if self._started is None else self._started
        self.total += amount
        second = int(now)
        if self._buckets and self._buckets[-1][0] >= second:
            self._buckets[-1][1] += amount
        else:
            self._buckets.append([second, amount])
        self._expire(now)

    def rate(self, now: float) -> float:
        """Return the amount per second over the window, or since the first call if that is shorter."""
        if self._started is None:
            return 0.0
        self._expire(now)
        return sum(amount for _, amount in self._buckets) / max(1.0, min(self._window_s, now - self._started))

    def _expire(self, now: float) -> None:
        while self._buckets and self._buckets[0][0] <= now - self._window_s:
            self._buckets.popleft()
