"""Times of weight updates: the last ones of all servers for the status page, all of them as histograms."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

#: Seconds that a server reports of an update: it stages (reads, verifies, prepares) while it generates, and pauses to
#: load; ``first_token_s`` runs from the swap to the first token of the new weights. Unreported stages are absent.
#: ``total_s`` is measured by the manager, from its call until it has verified that the version is served.
STAGES = ("stage_s", "verify_s", "pause_s", "load_s", "first_token_s", "total_s")
BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
RECENT = 64  # updates on the status page


@dataclass(frozen=True, slots=True)
class UpdateRecord:
    """One update of one server. ``began``: unix seconds. ``error`` is empty when it succeeded."""

    server: str
    version: int
    began: float
    timings: dict[str, float]
    error: str = ""


@dataclass(slots=True)
class Histogram:
    """Counts per bucket; the last bucket is beyond all bounds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    total: float = 0.0  # seconds

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.total += seconds

    def cumulative(self) -> list[tuple[str, int]]:
        """Return Prometheus' (upper bound, observations up to it); the last bound is ``+Inf``."""
        bounds = [*(f"{bound:g}" for bound in BUCKETS_S), "+Inf"]
        return list(zip(bounds, accumulate(self.counts), strict=True))


class UpdateLog:
    """Log of bounded size."""

    def __init__(self) -> None:
        self.recent: deque[UpdateRecord] = deque(maxlen=RECENT)
        self.histograms: dict[str, Histogram] = {}
        self.failures = 0

    def add(self, server: str, version: int, began: float, seconds: float, timings: Mapping[str, float]) -> None:
        """Add an update that succeeded after ``seconds``."""
        reported = {stage: float(timings[stage]) for stage in STAGES if stage in timings} | {"total_s": seconds}
        self.recent.append(UpdateRecord(server, version, began, reported))
        for stage, value in reported.items():
            self.histograms.setdefault(stage, Histogram()).add(value)

    def add_failure(self, server: str, version: int, began: float, error: str) -> None:
        self.recent.append(UpdateRecord(server, version, began, {}, error))
        self.failures += 1
