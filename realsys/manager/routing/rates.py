"""Tokens and groups per second over a sliding window, in one-second buckets."""

from __future__ import annotations

from collections import Counter, deque

from realsys.buffer.token_losses import FAILED, rounded_length
from realsys.manager.ledger.columns import bounded
from realsys.manager.messages import FinishRequest
from realsys.manager.routing.placement import Reservation


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


class Throughput:
    """Statistics of finished rollouts. They decide nothing."""

    def __init__(self) -> None:
        self.tokens = RateWindow()
        self.groups = RateWindow()
        self.by_server: dict[str, RateWindow] = {}
        self.finish_reasons: Counter[str] = Counter()
        self.verdicts: dict[str, tuple[int, int]] = {}  # worker -> completions that wait for one, and without one
        self.verdict_failures: Counter[str] = Counter()  # cause -> completions
        self.lost_tokens: Counter[str] = Counter()  # reason -> tokens of episodes that are not trained
        self.lost_lengths: Counter[int] = Counter()  # rounded tokens of those that did not fail -> episodes

    def count(self, request: FinishRequest, released: list[Reservation], now: float) -> None:
        """Add one finish. Without its own count per server, its tokens are those of the first released place."""
        tokens = sum(answer.length for answer in request.answers)
        self.tokens.add(tokens + sum(map(sum, request.lost_tokens.values())), now)
        self.groups.add(1, now)
        self.verdicts[request.worker] = request.verdicts_waiting, request.verdicts_undecided
        self.verdict_failures.update(request.verdict_failures)
        for reason, lengths in request.lost_tokens.items():
            name = bounded(self.lost_tokens, reason)
            self.lost_tokens[name] += sum(lengths)
            if name != FAILED:
                self.lost_lengths.update(map(rounded_length, lengths))
        self.finish_reasons.update(answer.finish_reason for answer in request.answers)
        for server, count in (request.servers or {place.server: tokens for place in released[:1]}).items():
            if server in self.by_server:
                self.by_server[server].add(count, now)

    def observe_servers(self, present: list[str], lost: list[str]) -> None:
        """Keep the windows of ``present`` servers, without the counts from before a restart (``lost``)."""
        for name in lost:
            self.by_server.pop(name, None)
        self.by_server = {name: self.by_server.get(name) or RateWindow() for name in present}
