"""Gate: lets requests start in their order, as RateLimits allows."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable

from realsys.reward.judge.rate_limits import RateLimits, Start


class Gate:
    """Queue before an endpoint, for one event loop."""

    def __init__(self, limits: RateLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.waiting = 0  # requests that have not started
        self._limits = limits
        self._clock = clock
        self._turn = asyncio.Lock()  # first come, first served: held by the request that starts next
        self._ended = asyncio.Event()

    async def enter(self, tokens: int) -> Start:
        """Wait until a request of ``tokens`` may start, and start it.

        The wait is bounded: running requests have a time limit, pauses a longest time, and windows end.
        """
        self.waiting += 1
        try:
            async with self._turn:
                while (wait_s := self._limits.wait_s(self._clock(), tokens)) > 0:
                    await self._wait(wait_s)
                return self._limits.start(self._clock(), tokens)
        finally:
            self.waiting -= 1

    async def _wait(self, seconds: float) -> None:
        """Wait until a request has ended, for at most ``seconds``."""
        self._ended.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if math.isinf(seconds) else seconds):
                await self._ended.wait()

    def leave(self, started: Start, used: int | None) -> None:
        """End a request. ``used``: its tokens, None if not known."""
        self._limits.end(started, used)
        self._ended.set()

    def pause(self, seconds: float) -> None:
        """Let nothing start for ``seconds``."""
        self._limits.pause(self._clock(), seconds)
