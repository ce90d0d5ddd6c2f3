"""Virtual clock: a queue of events, ordered by time, then by the order in which they were added."""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

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


# ---- measurements of a simulation: where each sampled token ended, waiting times, lengths, grants
#
# Every token that a server samples is open (its group runs or is buffered), trained, or wasted for a named reason
# (``no-waste``). ``balance`` checks the sum.


def _ints() -> array[int]:
    return array("i")


@dataclass(slots=True)
class Account:
    """Counts of a whole simulation.

    trained     version -> tokens in its loss
    wasted      reason -> sampled tokens that were not trained
    drawn       lengths of the completions of every granted train attempt
    in_loss     lengths of the trained completions
    """

    sampled: int = 0
    evaluated: int = 0  # tokens of evaluations
    trained: Counter[int] = field(default_factory=Counter)
    wasted: Counter[str] = field(default_factory=Counter)
    drawn: array[int] = field(default_factory=_ints)
    in_loss: array[int] = field(default_factory=_ints)
    staleness: Counter[int] = field(default_factory=Counter)  # versions behind of a row's oldest token -> rows
    grants: Counter[str] = field(default_factory=Counter)  # worker -> tickets
    largest_grant: int = 0  # tickets in one reply
    stale_issues: Counter[int] = field(default_factory=Counter)  # prompt -> times that it was issued again
    waits: dict[str, array[float]] = field(default_factory=dict)  # what -> seconds
    #: "completions", "cached tokens" -> sum over the measurements of the (largest, mean) load of a server
    loads: dict[str, tuple[float, float]] = field(default_factory=dict)
    steps: list[dict[str, float]] = field(default_factory=list)
    busy_s: float = 0.0  # seconds in which the trainer computes
    routable_s: float = 0.0  # seconds x servers
    served_s: float = 0.0  # seconds x servers since the first publication
    quarantines: int = 0
    faults: Counter[str] = field(default_factory=Counter)

    def wait(self, what: str, seconds: float) -> None:
        """Add one waiting time."""
        self.waits.setdefault(what, array("d")).append(seconds)

    def measure_loads(self, loads: Sequence[tuple[int, int]]) -> None:
        """Add a measurement of all servers: (completions, cached tokens) of each."""
        for what, amounts in zip(("completions", "cached tokens"), zip(*loads, strict=True), strict=False):
            largest, mean = self.loads.get(what, (0.0, 0.0))
            self.loads[what] = largest + max(amounts), mean + sum(amounts) / len(amounts)

    def balance(self, open_tokens: int) -> str:
        """Return the problem if the sum of the tokens is wrong, else ""."""
        found = self.evaluated + sum(self.trained.values()) + sum(self.wasted.values()) + open_tokens
        if found == self.sampled:
            return ""
        return f"{self.sampled} tokens were sampled, but {found} are trained, wasted or open"

    def roll_back(self, version: int) -> None:
        """Move the tokens of versions later than ``version`` to the wasted ones."""
        for later in [trained for trained in self.trained if trained > version]:
            self.wasted["rolled back"] += self.trained.pop(later)


def spread(values: array[float] | list[float]) -> dict[str, float]:
    """Return mean, median, 95th percentile and maximum; zeros without values."""
    if not len(values):
        return {"mean": 0.0, "p50": 0.0, "p95": 0.0, "max": 0.0}
    numbers: Any = np.asarray(values)
    p50, p95 = np.percentile(numbers, [50, 95])
    return {"mean": float(numbers.mean()), "p50": float(p50), "p95": float(p95), "max": float(numbers.max())}
