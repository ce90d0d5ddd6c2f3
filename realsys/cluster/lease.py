"""A worker's lease: its heartbeat key, the threads that notice its loss, and the check before each visible act.

    beat thread      every heartbeat_s: renew the lease, which a successor would have ended; every fifth of the lease,
                     and before it writes a changed value: check that the key is still ours
    deadline thread  waits until the lease must have lapsed by our own clock; a good beat moves that moment

    check()          any thread, before an act that others see: raises once that moment has passed

The key exists as long as the lease is renewed, so a beat changes nothing that others see: the manager of 1,000 workers
sleeps until one of them starts, ends or changes its state. Counters of a worker under attack change with each beat; the
value shows them every 30 s.

Two threads, because the beat may hang inside the store (a dead file server, an unreachable etcd) for longer than the
lease; all other processes then treat this worker as dead, and it must stop. The thread that finds the loss first calls
``on_lost``, once. A thread that holds the GIL for a whole lease (no known library does) would look dead too. In a
process that wakes up after a suspension neither thread need be the first to run: hence ``check``.

    Heartbeat.check ── the one implementation of CheckAlive; ``ctx.check_alive`` in a worker
    unleased        ── for parts that run without a lease: tools, benchmarks, tests

Every visible act checks the lease first: publishing weights, completing a checkpoint, writing shards, pushing and
acknowledging groups, appending to the journal, calling the manager, replying over HTTP. The check and the act are two
steps. If a process is suspended exactly between them, the receiver refuses the act (``monotonic``): manager, ledger and
weight folders are ordered by incarnation and attempt, and refuse everything older than the newest that they have seen.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from realsys.cluster.names.contract import NameStore
from realsys.errors import Fenced, KeyMissing, NameStoreError

if TYPE_CHECKING:
    from realsys.config.schema_cluster import ClusterConfig

log = logging.getLogger(__name__)

LOOKS_PER_LEASE = 5  # reading the key costs the store as much as a renewal
#: a value with other counters is written at most this often: each write wakes all that watch the heartbeats
COUNTERS_S = 30.0


#: Returns while the lease holds; else raises Fenced, and ends the process if it is a worker.
CheckAlive = Callable[[], None]


def unleased() -> None:
    """Return at every call: a part without a lease cannot lose it."""


def lease_clock(cluster: ClusterConfig) -> Callable[[], float]:
    """Return the clock by which this process's lease lapses, in seconds.

    If all processes are on this machine and their name store is a folder, they are suspended with it, so the clock
    stops. Else others count the time of a suspension, too.
    """
    alone = cluster.name_store.backend == "file" and cluster.machines <= 1
    return time.monotonic if alone else lambda: time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """Settings of a worker's lease.

    clock  lapses the lease, in seconds
    last   file with the greatest incarnation so far at this index, which outlives the key
    """

    lease_s: float
    heartbeat_s: float
    clock: Callable[[], float] = time.monotonic
    last: Path | None = None


class Heartbeat:
    """Owns the lease and the key of one worker; ``on_lost`` must end the process."""

    def __init__(
        self,
        store: NameStore,
        key: str,
        kind: str,
        index: int,
        terms: LeaseTerms,
        on_lost: Callable[[Fenced], None],
    ) -> None:
        """Take the lease and write the key, over one of a predecessor, whose lease ends. Raises NameStoreError."""
        self._store = store
        self._key = key
        self._identity = {"kind": kind, "index": index, "host": socket.gethostname(), "pid": os.getpid()}
        self._beat_s = terms.heartbeat_s
        self._clock = terms.clock
        self._on_lost = on_lost
        self._counters: Callable[[], Mapping[str, int]] = dict
        self._shown: dict[str, int] = {}  # counters in the value
        self._state = "starting"
        self._written = ""
        self._last = terms.last
        # one more than a predecessor's if the clock was set back
        incarnation = max(time.time_ns(), self._newest(self._holder()) + 1)
        if self._last is not None:
            self._last.parent.mkdir(exist_ok=True)
            staged = self._last.with_name(f"{self._last.name}.tmp")
            staged.write_bytes(b"%d" % incarnation)
            staged.replace(self._last)
        self._incarnation = incarnation
        self._due = threading.Event()
        self._condition = threading.Condition()
        self._stopping = False
        self._lost = False
        # A predecessor that still runs is fenced by its next renewal.
        store.end_lease_of(key)
        began = self._clock()
        self.lease = store.lease(terms.lease_s)
        # Counted from before the call: the store's own lease can only end later than this.
        self._deadline = began + self.lease.ttl_s
        self._look_at = began
        self._count_at = began
        self._write(self._value())
        self._threads = [
            threading.Thread(target=self._beat_loop, name="heartbeat", daemon=True),
            threading.Thread(target=self._deadline_loop, name="heartbeat deadline", daemon=True),
        ]

    @property
    def incarnation(self) -> str:
        """Greater than that of any earlier process at this index; usable in a file name."""
        return f"{self._incarnation:019d}"

    def start(self) -> None:
        """Start both threads."""
        for thread in self._threads:
            thread.start()

    def set_state(self, state: str) -> None:
        """Show ``state`` in the heartbeat's value; a change is written immediately."""
        if state != self._state:
            self._state = state
            self._due.set()

    def count(self, counters: Callable[[], Mapping[str, int]]) -> None:
        """Show the result of ``counters`` in the value: a change within ``COUNTERS_S``, usually in the next beat.

        It is called at each beat, on the beat thread.
        """
        self._shown = dict(counters())
        self._counters = counters

    def check(self) -> None:
        """Raise Fenced once the lease must have lapsed; ``on_lost`` is called first.

        It only reads the clock, so that every act that others see can call it.
        """
        if self._lost:
            raise Fenced(f"{self._key}: this worker has lost its lease; it must stop")
        if self._clock() >= self._deadline:
            reason = self._lapsed()
            self._lose(reason)
            raise reason

    def stop(self) -> None:
        """Stop both threads: no beat and no loss after this. The lease still runs; revoke it to remove the keys."""
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        self._due.set()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(self.lease.ttl_s)

    def _newest(self, holder: int | None) -> int:
        """Return the greatest incarnation so far: that of the key, or of a process that has not written it yet."""
        return max(holder or 0, 0 if self._last is None else _read_last(self._last))

    def _holder(self) -> int | None:
        """Return the incarnation that holds the key, or None."""
        try:
            value = self._store.get(self._key)
        except KeyMissing:
            return None
        try:
            return incarnation_in(value)
        except ValueError:
            problem = f"name store: {self._key} holds {value[:80]!r}, which is not a heartbeat: delete the key"
            raise NameStoreError(problem) from None

    def _value(self) -> str:
        return json.dumps(
            {**self._identity, "incarnation": self.incarnation, "state": self._state, "counters": self._shown}
        )

    def _write(self, value: str) -> None:
        self._store.add(self._key, value, lease=self.lease, replace=True)
        self._written = value

    def _beat_loop(self) -> None:
        """Wait for the next beat or a change of state; end with ``stop`` or a loss."""
        while not self._stopping:
            self._due.wait(self._beat_s)
            self._due.clear()
            if self._stopping:
                return
            try:
                self._beat()
            except Fenced as exc:
                self._lose(exc)
                return
            except NameStoreError as exc:
                left = self._deadline - self._clock()
                log.warning("heartbeat failed, trying again; the lease lapses in %.1f s: %s", left, exc)

    def _beat(self) -> None:
        began = self._clock()
        try:
            self.lease.keep_alive()
        except Fenced:
            # A successor ends this lease before it writes the key.
            self._refuse_successor(self._newest(self._holder()))
            raise
        counters = dict(self._counters())
        if counters != self._shown and began >= self._count_at:
            self._shown = counters
            self._count_at = began + COUNTERS_S
        if (value := self._value()) != self._written or began >= self._look_at:
            self._look(value)
            self._look_at = began + self.lease.ttl_s / LOOKS_PER_LEASE
        with self._condition:
            self._deadline = began + self.lease.ttl_s
            self._condition.notify_all()

    def _refuse_successor(self, newest: int) -> None:
        if newest > self._incarnation:
            raise Fenced(f"{self._key} was taken over by incarnation {newest}; this one ({self.incarnation}) must stop")

    def _look(self, value: str) -> None:
        """Read the key and write ``value`` if it has changed. Raises Fenced if the key is no longer ours."""
        holder = self._holder()
        if holder is None:
            self._refuse_successor(self._newest(holder))
            raise Fenced(f"{self._key} was removed: this worker was declared dead; it must stop")
        self._refuse_successor(holder)
        if value != self._written:
            self._write(value)

    def _deadline_loop(self) -> None:
        """Wait for the deadline, which a good beat moves; end with ``stop`` or a loss."""
        with self._condition:
            while not (self._stopping or self._lost):
                left = self._deadline - self._clock()
                if left <= 0:
                    break
                self._condition.wait(left)
            if self._stopping or self._lost:
                return
        self._lose(self._lapsed())

    def _lapsed(self) -> Fenced:
        return Fenced(
            f"{self._key}: no heartbeat for the whole lease of {self.lease.ttl_s:g} s (process paused, or the name "
            "store not reachable); this worker must stop"
        )

    def _lose(self, reason: Fenced) -> None:
        with self._condition:
            if self._lost or self._stopping:
                return
            self._lost = True
            self._condition.notify_all()
        self._on_lost(reason)


def _read_last(path: Path) -> int:
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return 0
    if not text.isdigit():  # a power cut may leave it empty
        log.warning("%s holds %r, which is not an incarnation: only the clock counts", path, text[:80])
        return 0
    return int(text)


def incarnation_in(value: str) -> int:
    """Return the incarnation in a heartbeat's value. Raises ValueError if it has none."""
    try:
        incarnation = json.loads(value)["incarnation"]
        if isinstance(incarnation, str):
            return int(incarnation)
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"not a heartbeat: {error}") from None
    raise ValueError(f"not a heartbeat: incarnation={incarnation!r:.80}")
