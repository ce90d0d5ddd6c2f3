"""One reward service, as a client sees it. Pure: time and randomness are arguments.

    well ──full──> left alone ──delay──> one Send on trial ──accepted──> well
      └───failed──────^  ^                      │ full, failed
                         └──────────────────────┘

bounded-window   a service has at most ``WINDOW`` items of this client
left-alone       a service that was full, died or cannot judge gets nothing until its delay is over, and then one Send,
                 until that is accepted
"""

from __future__ import annotations

from dataclasses import dataclass

from realsys.reward.frames import MAX_ITEMS

WINDOW = 2 * MAX_ITEMS  # items of one client at one service
FIRST_DELAY_S, LAST_DELAY_S = 0.5, 10.0  # a service is left alone for this time, which doubles


@dataclass(eq=False, slots=True)
class Instance:
    """State of one service. ``jitter``: random, from 0 to 1, so that clients do not try again at the same moment."""

    name: str
    url: str
    incarnation: str
    outstanding: int = 0  # items
    refusals: int = 0  # refusals in a row
    failures: int = 0  # failures in a row
    blocked_until: float = 0.0
    trial: int = -1  # number of the Send on trial
    problem: str = ""  # last refusal or failure

    def is_away(self, now: float) -> bool:
        """Return True if it died or cannot judge, and its delay is not over."""
        return self.failures > 0 and now < self.blocked_until

    def room(self, now: float) -> int:
        """Return how many more items it may get."""
        if now < self.blocked_until or self.trial >= 0:
            return 0
        return max(0, WINDOW - self.outstanding)

    def begin(self, send: int, items: int) -> None:
        """It gets these items."""
        self.outstanding += items
        if self.refusals or self.failures:
            self.trial = send

    def accept(self, send: int) -> None:
        """It has begun to answer a Send."""
        self.failures = 0
        if self.trial == send:
            self.trial = -1
            self.refusals = 0

    def end(self, send: int, items: int) -> None:
        """A Send is over. ``items``: those that were not decided."""
        self.outstanding -= items
        if self.trial == send:
            self.trial = -1

    def full(self, retry_after_s: float, problem: str, now: float, jitter: float) -> None:
        """It has refused a Send for load."""
        if now >= self.blocked_until:  # else this is another answer to the same load
            self.refusals += 1
        self._leave_alone(self.refusals, retry_after_s, problem, now, jitter)

    def fail(self, problem: str, now: float, jitter: float) -> None:
        """It died, is silent, or has said that it cannot judge."""
        if not self.is_away(now):
            self.failures += 1
        self._leave_alone(self.failures, 0.0, problem, now, jitter)

    def _leave_alone(self, times: int, least_s: float, problem: str, now: float, jitter: float) -> None:
        delay_s = min(LAST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(times - 1, 16))
        self.blocked_until = max(self.blocked_until, now + max(least_s, delay_s) * (1.0 + jitter / 2))
        self.problem = problem
