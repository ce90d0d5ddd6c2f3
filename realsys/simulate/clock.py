"""Virtual clock: a queue of events, ordered by time, then by the order in which they were added."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

Act = Callable[..., object]


class Clock:
    """Time stands still while an event runs, and then jumps to the next one. ``now`` is in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0  # events that ran
        self._queue: list[tuple[float, int, Act, tuple[Any, ...]]] = []
        self._added = 0

    def at(self, time: float, act: Act, *args: Any) -> None:
        """Call ``act(*args)`` at ``time``; now if that is over."""
        self._added += 1
        heapq.heappush(self._queue, (max(time, self.now), self._added, act, args))

    def after(self, seconds: float, act: Act, *args: Any) -> None:
        """Call ``act(*args)`` in ``seconds``."""
        self.at(self.now + seconds, act, *args)

    def step(self) -> bool:
        """Run the next event. Returns False if the queue is empty."""
        if not self._queue:
            return False
        self.now, _, act, args = heapq.heappop(self._queue)
        self.events += 1
        act(*args)
        return True
