"""Which server reads a version from the shared storage, and which from a host that has it. Pure.

    a server of its host has or reads it      ──> now: the servers of a host share one copy
    its host sends an older version           ──> wait: that copy must stay as it is until it has arrived
    a host has it and sends it to none        ──> from there
    fewer hosts than allowed read storage     ──> from storage
    otherwise                                 ──> wait, until one of these is so

A host sends to one host at a time, at full speed: the number of hosts that have the version doubles in each round.

``no-wait-for-the-dead``: a reader of the storage counts for ``patience_s``, and so does a transfer of an older version.
So a reader that hangs is replaced by one other, not by all that wait.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from realsys.types import PublishedVersion

if TYPE_CHECKING:  # the servers import this module
    from realsys.manager.routing.servers import Server

STORAGE: tuple[str, ...] = ()  # sources of a server that reads the shared storage


@dataclass(frozen=True, slots=True)
class FanOut:
    """Limits of the way of a version to the hosts.

    storage_readers  hosts that read a version from the shared storage at a time; 0: all of them
    patience_s       time after which a host does not wait for a reader of the storage, or for its own transfer
    """

    storage_readers: int = 0
    patience_s: float = 60.0

    def sources(
        self, server: Server, servers: Iterable[Server], published: PublishedVersion, now: float
    ) -> tuple[str, ...] | float:
        """Return the URLs of the copies that a server may read, ``STORAGE`` for none.

        If it must wait: the time at which it must ask again, unless something changes before.
        """
        host, servers = server.address.host, list(servers)
        if not self.storage_readers or not server.address.copies:
            return STORAGE
        copies: dict[str, str] = {}  # host that has the version -> URL of its copy
        reading: dict[str, Server] = {}  # host that reads it -> the first of its servers that do
        for other in servers:
            if other.verified == published and other.address.copies and not other.quarantined:
                copies.setdefault(other.address.host, other.address.copies)
            elif other.target == published:
                reading.setdefault(other.address.host, other)
        if host in copies or host in reading:
            return STORAGE
        if (until := self.sends_older(servers, published, now).get(host, now)) > now:
            return until
        free = sorted(set(copies.values()) - {reader.source for reader in reading.values()})
        if free:
            return (free[0],)
        ends = [reader.reads_since + self.patience_s for reader in reading.values() if not reader.source]
        ends = [end for end in ends if end > now]
        return min(ends) if len(ends) >= self.storage_readers else STORAGE

    def sends_older(self, servers: Iterable[Server], published: PublishedVersion, now: float) -> dict[str, float]:
        """Return the hosts that send another version than ``published``, with the time until which they should."""
        servers = list(servers)
        transfers = {
            other.source: other.reads_since + self.patience_s
            for other in servers
            if other.source and other.target is not None and other.target != published
        }
        ends = ((other.address.host, transfers.get(other.address.copies, now)) for other in servers)
        return {host: end for host, end in ends if end > now}


# ---- times of weight updates: the last ones for the status page, all of them as histograms


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
