"""Statistics of finished rollouts: tokens and groups per second, verdicts, reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TypeVar

from realsys.algorithm.batch.token_losses import FAILED, rounded_length
from realsys.manager.ledger.columns import bounded
from realsys.manager.messages import FinishRequest
from realsys.manager.routing.placement import Reservation
from realsys.observe.rate import RateWindow

Size = TypeVar("Size", int, float)  # bytes


class Throughput:
    """Statistics of finished rollouts. They decide nothing."""

    def __init__(self) -> None:
        self.tokens = RateWindow()
        self.groups = RateWindow()
        self.by_server: dict[str, RateWindow] = {}
        self.finish_reasons: Counter[str] = Counter()
        self.verdicts: dict[str, tuple[int, int]] = {}  # worker -> completions that wait for one, and without one
        self.memory: dict[str, int] = {}  # RolloutWorker -> its resident memory in bytes, as it reported it last
        self.verdict_failures: Counter[str] = Counter()  # cause -> completions
        self.last_failure = ""  # why the last group that failed did, in the words of its worker
        self.lost_tokens: Counter[str] = Counter()  # reason -> tokens of episodes that are not trained
        self.lost_lengths: Counter[int] = Counter()  # rounded tokens of those that did not fail -> episodes

    def count(self, request: FinishRequest, released: list[Reservation], now: float) -> None:
        """Add one finish. Without its own count per server, its tokens are those of the first released place."""
        tokens = sum(answer.length for answer in request.answers)
        self.tokens.add(tokens + sum(map(sum, request.lost_tokens.values())), now)
        self.groups.add(1, now)
        self.verdicts[request.worker] = request.verdicts_waiting, request.verdicts_undecided
        self.observe_memory(request.worker, request.memory_bytes)
        self.verdict_failures.update(request.verdict_failures)
        if request.outcome in ("failed", "rejected"):
            self.last_failure = request.reason or ""
        for reason, lengths in request.lost_tokens.items():
            name = bounded(self.lost_tokens, reason)
            self.lost_tokens[name] += sum(lengths)
            if name != FAILED:
                self.lost_lengths.update(map(rounded_length, lengths))
        self.finish_reasons.update(answer.finish_reason for answer in request.answers)
        for server, count in (request.servers or {place.server: tokens for place in released[:1]}).items():
            if server in self.by_server:
                self.by_server[server].add(count, now)

    def observe_memory(self, worker: str, size: int) -> None:
        """Note the memory of a RolloutWorker; 0: it does not say."""
        if size:
            self.memory[worker] = size

    def observe_servers(self, present: list[str], lost: list[str]) -> None:
        """Keep the windows of ``present`` servers, without the counts from before a restart (``lost``)."""
        for name in lost:
            self.by_server.pop(name, None)
        self.by_server = {name: self.by_server.get(name) or RateWindow() for name in present}


def memory_sums(memory: Mapping[str, Size]) -> dict[str, Size]:
    """Return the largest and the whole memory of servers and of RolloutWorkers, by the names of the step log.

    ``memory``: process -> bytes. A kind without any is left out.
    """
    sums: dict[str, Size] = {}
    for kind, name in (("generation_server", "server"), ("rollout_worker", "worker")):
        if sizes := [size for process, size in memory.items() if process.partition("/")[0] == kind]:
            sums |= {f"{name}_bytes": max(sizes), f"{name}s_bytes": sum(sizes)}
    return sums
