"""Statistics of finished rollouts: tokens and groups per second, verdicts, reasons."""

from __future__ import annotations

from collections import Counter

from realsys.manager.messages import FinishRequest
from realsys.manager.routing.placement import Reservation
from realsys.telemetry.rate import RateWindow


class Throughput:
    """Statistics of finished rollouts. They decide nothing."""

    def __init__(self) -> None:
        self.tokens = RateWindow()
        self.groups = RateWindow()
        self.by_server: dict[str, RateWindow] = {}
        self.finish_reasons: Counter[str] = Counter()
        self.verdicts: dict[str, tuple[int, int]] = {}  # worker -> completions that wait for one, and without one
        self.verdict_failures: Counter[str] = Counter()  # cause -> completions
        self.lost_tokens = 0  # sampled for episodes that failed

    def count(self, request: FinishRequest, released: list[Reservation], now: float) -> None:
        """Add one finish. Without its own count per server, its tokens are those of the first released place."""
        tokens = sum(answer.length for answer in request.answers)
        self.tokens.add(tokens, now)
        self.groups.add(1, now)
        self.verdicts[request.worker] = request.verdicts_waiting, request.verdicts_undecided
        self.verdict_failures.update(request.verdict_failures)
        self.lost_tokens += request.lost_tokens
        self.finish_reasons.update(answer.finish_reason for answer in request.answers)
        for server, count in (request.servers or {place.server: tokens for place in released[:1]}).items():
            if server in self.by_server:
                self.by_server[server].add(count, now)

    def observe_servers(self, present: list[str], lost: list[str]) -> None:
        """Keep the windows of ``present`` servers, without the counts from before a restart (``lost``)."""
        for name in lost:
            self.by_server.pop(name, None)
        self.by_server = {name: self.by_server.get(name) or RateWindow() for name in present}
