"""RateLimits: when the next request may start. No I/O and no clock: time is an argument.

    request ──wait_s: 0──> start ──> running ──> end
                 │ more: paused, all slots taken, or a window is full
                 └── ask again after that time, or when a request has ended

Invariants:
    concurrency   never more than ``concurrency`` requests are running
    requests      at most ``requests`` of them start in any WINDOW_S seconds
    tokens        their tokens are at most ``tokens`` in any WINDOW_S seconds, unless one used more than it reserved
    no-standstill a request may start once nothing runs, the pause is over and the window is empty
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

WINDOW_S = 60.0


@dataclass(eq=False, slots=True)
class StartedRequest:
    """A request that has started. ``tokens``: reserved at first, used once it has ended."""

    time: float
    tokens: int


@dataclass(slots=True)
class RateLimits:
    """Limits on the requests of one process. 0 requests or tokens: no such limit."""

    concurrency: int
    requests: int = 0
    tokens: int = 0
    running: int = field(default=0, init=False)
    _starts: deque[StartedRequest] = field(
        default_factory=deque, init=False
    )  # requests of the last WINDOW_S, oldest first
    _paused_until: float = field(default=-math.inf, init=False)

    def wait_s(self, now: float, tokens: int) -> float:
        """Return the seconds until a request of ``tokens`` may start: 0 now, inf once a running one has ended."""
        if now < self._paused_until:
            return self._paused_until - now
        if self.running >= self.concurrency:
            return math.inf
        self._forget(now)
        free_at = max(self._request_free_at(), self._tokens_free_at(self._bounded(tokens)))
        return max(0.0, free_at - now)

    def start(self, now: float, tokens: int) -> StartedRequest:
        """Start a request for which ``wait_s`` is 0. Raises RuntimeError for any other."""
        if (wait_s := self.wait_s(now, tokens)) > 0:
            raise RuntimeError(f"a request started at {now}, {wait_s} s too early")
        started = StartedRequest(now, self._bounded(tokens))
        self._starts.append(started)
        self.running += 1
        return started

    def end(self, started: StartedRequest, used: int | None) -> None:
        """End a request. ``used``: its tokens; None: not known, so those that it reserved."""
        self.running -= 1
        if used is not None:
            started.tokens = used

    def pause(self, now: float, seconds: float) -> None:
        """Start nothing for ``seconds``: the endpoint is busy."""
        self._paused_until = max(self._paused_until, now + seconds)

    def _bounded(self, tokens: int) -> int:
        """Limit a reservation: a request that needs more than the whole window waits for an empty one."""
        return min(tokens, self.tokens) if self.tokens else tokens

    def _forget(self, now: float) -> None:
        while self._starts and self._starts[0].time + WINDOW_S <= now:
            self._starts.popleft()

    def _request_free_at(self) -> float:
        if not self.requests or len(self._starts) < self.requests:
            return -math.inf
        return self._starts[-self.requests].time + WINDOW_S

    def _tokens_free_at(self, tokens: int) -> float:
        """Return when enough tokens have left the window."""
        if not self.tokens:
            return -math.inf
        excess = sum(started.tokens for started in self._starts) + tokens - self.tokens
        free_at = -math.inf
        for started in self._starts:
            if excess <= 0:
                break
            excess -= started.tokens
            free_at = started.time + WINDOW_S
        return free_at


# ---- requests in their order


class RequestGate:
    """Queue before an endpoint, for one event loop."""

    def __init__(self, limits: RateLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.waiting = 0  # requests that have not started
        self._limits = limits
        self._clock = clock
        self._turn = asyncio.Lock()  # first come, first served: held by the request that starts next
        self._ended = asyncio.Event()

    async def enter(self, tokens: int) -> StartedRequest:
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

    def leave(self, started: StartedRequest, used: int | None) -> None:
        """End a request. ``used``: its tokens, None if not known."""
        self._limits.end(started, used)
        self._ended.set()

    def pause(self, seconds: float) -> None:
        """Let nothing start for ``seconds``."""
        self._limits.pause(self._clock(), seconds)
