"""The workers of a trial as their heartbeat keys show them, and statistics of what they have finished."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Protocol, TypeVar

import msgspec

from realsys.algorithm.token_losses import FAILED, rounded_length
from realsys.errors import MALFORMED
from realsys.manager.ledger.ticket_history import bounded
from realsys.manager.messages import FinishRequest
from realsys.manager.routing.placement import Reservation
from realsys.observe.rate import RateWindow


class WorkerHeartbeat(msgspec.Struct):
    """Value of a heartbeat key.

    ``value``: its text. ``since``: first sight of this incarnation. ``changed``: last change of the value.
    """

    kind: str = ""
    index: int = 0
    host: str = ""
    pid: int = 0
    incarnation: str = ""
    state: str = ""
    counters: dict[str, int] = {}  # messages that the worker refused, by cause
    value: str = ""
    since: float = 0.0
    changed: float = 0.0


class HeldAttempt(Protocol):
    """A running ticket of either kind: its worker, and the last news of it."""

    worker: str
    incarnation: str
    news_at: float


def observe(values: Mapping[str, str], before: Mapping[str, WorkerHeartbeat], now: float) -> dict[str, WorkerHeartbeat]:
    """Return the new table of all heartbeat keys (worker name -> JSON). An unreadable value keeps the old row.

    Only values that have changed are decoded.
    """
    table: dict[str, WorkerHeartbeat] = {}
    for name, value in values.items():
        old = before.get(name)
        if old is not None and old.value == value:
            table[name] = old
            continue
        try:
            new = msgspec.json.decode(value, type=WorkerHeartbeat)
        except MALFORMED:
            new = old or WorkerHeartbeat(state="unreadable heartbeat")
        same = old is not None and old.incarnation == new.incarnation
        new.since = old.since if old is not None and same else now
        new.value, new.changed = value, now
        table[name] = new
    return table


def renewed(before: Mapping[str, WorkerHeartbeat], after: Mapping[str, WorkerHeartbeat]) -> set[str]:
    """Return the workers that are new or gone, or have another incarnation than before."""
    same = {name for name, beat in after.items() if name in before and before[name].incarnation == beat.incarnation}
    return (before.keys() | after.keys()) - same


def incarnation_of(worker: str, workers: Mapping[str, WorkerHeartbeat]) -> str:
    """Return the incarnation that the heartbeat of ``worker`` shows, "" without a heartbeat."""
    heartbeat = workers.get(worker)
    return heartbeat.incarnation if heartbeat else ""


def is_lost(held: HeldAttempt, workers: Mapping[str, WorkerHeartbeat]) -> bool:
    """Return True if the worker that holds this ticket is gone or has restarted.

    A ticket that was granted before its worker's first heartbeat is bound to the first incarnation that appears.
    """
    heartbeat = workers.get(held.worker)
    if not held.incarnation:
        held.incarnation = incarnation_of(held.worker, workers)
        return False
    return heartbeat is None or heartbeat.incarnation != held.incarnation


# ---- statistics of finished rollouts: tokens and groups per second, verdicts, reasons


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
