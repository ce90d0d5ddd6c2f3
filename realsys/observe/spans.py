"""Timeline of a process: spans of its work, with begin, end and unit. No file is written on the caller's thread.

    span("reward", unit) ──append──> [queue in memory] ──every second, a thread──> segment files of one process
    add("decode", begin, end, unit) ──┘  bounded: a full queue drops spans        bounded: the oldest goes

A process calls ``start`` once. Until then, and after ``stop``, ``span`` and ``add`` do nothing. Recording never raises
and never waits: if the disk refuses a segment, the process warns once and records no more.

Times are CLOCK_MONOTONIC, which all processes of a host share and which nothing sets. Each segment begins with the wall
time at one moment of that clock. ``realsys.observe.timeline.clocked_spans`` puts the clocks of several hosts together.

A segment is a file of JSON lines: a Header, then one list of spans for each flush. A reader skips a line that is not
complete, so a killed process loses the spans of its last second only. ``realsys.observe.timeline.clocked_spans`` reads
them.

A span is a part of the work, not a token: a completion has as many decode spans as weight versions sampled it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import msgspec

log = logging.getLogger(__name__)

#: name of a span -> meaning, with the process that records it
SPANS: Mapping[str, str] = MappingProxyType(
    {
        "allocate": "RolloutWorker: waits for tickets, because its capacity is free",
        "rollout": "RolloutWorker: an attempt of a ticket, from its grant to its finish",
        "episode": "RolloutWorker: one episode of an attempt",
        "generate": "RolloutWorker: one call of the engine by an episode, over all servers that it needed",
        "route": "RolloutWorker: asks the manager for a server, and waits until one is routable",
        "tool": "RolloutWorker: a call of a tool",
        "reward": "RolloutWorker: the verdict about a completion",
        "push": "RolloutWorker: a group travels to its DP head and is stored there",
        "finish": "RolloutWorker: the report to the manager",
        "grant": "GserverManager: gives a ticket to a RolloutWorker (a moment)",
        "update": "GserverManager: a server takes over a weight version, from the order to its proof",
        "sleep": "GserverManager: a server that shares devices with ranks releases its memory",
        "wake": "GserverManager: such a server takes its memory again, or starts its engine",
        "stage": "GenerationServer: reads and verifies a weight version while it generates",
        "pause": "GenerationServer: does not generate, because it takes over weights",
        "queue": "GenerationServer: a completion waits for a place",
        "prefill": "GenerationServer: the prompt of a completion is computed",
        "decode": "GenerationServer: tokens of a completion are sampled with one weight version",
        "receive": "ModelWorker: a group arrives and is stored (a moment)",
        "step": "MasterWorker: a train step, from the wait for its batch to its record",
        "wait": "MasterWorker: the batch of the step is not complete yet",
        "switch": "MasterWorker: a batch is ready, and the servers still use the devices",
        "plan": "MasterWorker: minibatches and ranks of a batch are planned",
        "call": "MasterWorker, ModelWorker: a model function call",
        "transfer": "ModelWorker: arrays move between workers",
        "settle": "MasterWorker: waits for the publication of the version before",
        "copy": "MasterWorker, ModelWorker: weights are copied to host memory",
        "write": "ModelWorker: the copy of the weights is written",
        "publish": "MasterWorker: a version is written, checked and published, beside the next step",
        "report": "MasterWorker: the manager is told which tickets were trained",
        "save": "MasterWorker, ModelWorker: a checkpoint",
        "lost": "any process: spans that it could not write in time (a moment)",
        "evaluate": "MasterWorker: an evaluation, from its request to its result",
    }
)

#: seconds between two flushes: what a killed process loses
FLUSH_S = 1.0
#: spans that wait for the next flush
MOST_QUEUED = 50_000
#: A segment has at most this part of the bytes of a process. The oldest ones are removed, so a full folder holds
#: between 7/8 and 8/8 of its limit.
SEGMENTS = 8
#: bytes of the timeline of one process; the oldest spans go
MOST_BYTES = 32 << 20
#: spans of one line, which a death in the middle of its write costs
_LINE = 1000
SUFFIX = ".spans"

#: span of a process that had to drop some; ``spans`` in its facts counts them
LOST = "lost"

#: (name, begin, duration, unit, further facts); times in ns of CLOCK_MONOTONIC
RawSpan = tuple[str, int, int, str, dict[str, Any] | None]

now = time.monotonic_ns


class Header(msgspec.Struct, frozen=True):
    """First line of a segment. ``clock`` names the clock: equal for all processes of one boot of a host."""

    process: str  # kind/index
    incarnation: str
    pid: int
    host: str
    clock: str
    wall_ns: int  # time.time_ns() at ``monotonic_ns``
    monotonic_ns: int


class Recorder:
    """Writer of the spans of one process into ``folder``, in segments of ``limit`` / SEGMENTS bytes."""

    def __init__(self, folder: Path, process: str, incarnation: str, limit: int) -> None:
        self._folder = folder
        self._process = process
        self._incarnation = incarnation
        self._limit = limit
        self._segment_bytes = max(1, limit // SEGMENTS)
        self._room = MOST_QUEUED
        self._queue: deque[RawSpan] = deque()
        self._dropped = 0
        self._file: BinaryIO | None = None
        self._written = 0  # bytes of the open segment
        self._stopped = threading.Event()
        self._flushing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def record(self, span: RawSpan) -> None:
        """Queue a span. Any thread."""
        if len(self._queue) < self._room:
            self._queue.append(span)
        else:
            self._dropped += 1

    def flush(self) -> None:
        """Write all queued spans. After an error of the disk, drop them and all later ones."""
        with self._flushing:
            if self._dropped and self._room:
                dropped, self._dropped = self._dropped, 0
                self._queue.append((LOST, now(), 0, "", {"spans": dropped}))
            while self._queue and not self._stopped.is_set():
                # Not ``list(queue)``: other threads append, and each popleft is atomic.
                spans = [self._queue.popleft() for _ in range(min(_LINE, len(self._queue)))]
                try:
                    self._write(msgspec.json.encode(spans) + b"\n")
                except (OSError, TypeError, ValueError) as error:
                    log.warning("no further spans of this process: %s", error)
                    self._end()

    def stop(self) -> None:
        """Write the queued spans, and end."""
        self.flush()
        with self._flushing:
            self._end()
        if self._thread.is_alive():
            self._thread.join(FLUSH_S)

    def _run(self) -> None:
        while not self._stopped.wait(FLUSH_S):
            self.flush()

    def _write(self, line: bytes) -> None:
        if self._file is None or self._written + len(line) > self._segment_bytes:
            if self._file is not None:
                self._file.close()
            self._folder.mkdir(parents=True, exist_ok=True)
            segments = sorted(self._folder.glob(f"*{SUFFIX}"))
            # By size and not by number: a process that dies often leaves short segments, which must not push out
            # long ones.
            total = sum(map(_size, segments))
            for old in segments:
                if total + self._segment_bytes <= self._limit:
                    break
                total -= _size(old)
                old.unlink(missing_ok=True)
            # Numbers grow over the incarnations of a process: their order is the age.
            number = int(segments[-1].stem) + 1 if segments else 0
            self._file = (self._folder / f"{number:010}{SUFFIX}").open("xb", buffering=0)
            header = Header(
                process=self._process,
                incarnation=self._incarnation,
                pid=os.getpid(),
                host=socket.gethostname(),
                clock=_boot_id(),
                wall_ns=time.time_ns(),
                monotonic_ns=now(),
            )
            first = msgspec.json.encode(header) + b"\n"
            self._file.write(first)
            self._written = len(first)
        assert self._file is not None
        self._file.write(line)  # unbuffered: it is in the page cache, and survives the death of this process
        self._written += len(line)

    def _end(self) -> None:
        self._stopped.set()
        self._room = 0
        self._queue.clear()
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


_recorder: Recorder | None = None


def start(folder: Path, process: str, incarnation: str, limit: int = MOST_BYTES) -> None:
    """Record the spans of this process in ``folder``, at most ``limit`` bytes. ``process``: kind/index."""
    global _recorder
    stop()
    _recorder = Recorder(folder, process, incarnation, limit)
    _recorder.start()


def stop() -> None:
    """Write the queued spans, and record no more."""
    global _recorder
    recorder, _recorder = _recorder, None
    if recorder is not None:
        recorder.stop()


def flush() -> None:
    """Write the queued spans, for a caller that reads them next."""
    if _recorder is not None:
        _recorder.flush()


def add(name: str, begin: int, end: int, unit: str = "", /, **facts: Any) -> None:
    """Record a span that has ended. ``begin``, ``end``: results of ``now()``. ``unit``: see ``span``."""
    if _recorder is not None:
        _recorder.record((name, begin, end - begin, unit, facts or None))


def mark(name: str, unit: str = "", /, **facts: Any) -> None:
    """Record a moment."""
    if _recorder is not None:
        _recorder.record((name, now(), 0, unit, facts or None))


class span:
    """Context manager that records its block, also if that raises or is cancelled.

    ``unit`` names what the work is for, and joins the spans of several processes: ``ticket.attempt`` of a group,
    ``ticket.attempt/episode`` of an episode, the request id of a completion on a server, ``step/N`` of a train step,
    ``version/N`` of weights; "" for none. ``facts`` must be JSON; the block may add to them.
    """

    __slots__ = ("_begin", "_name", "facts", "unit")

    def __init__(self, name: str, unit: str = "", /, **facts: Any) -> None:
        self._name = name
        self.unit = unit
        self.facts = facts

    def __enter__(self) -> span:
        self._begin = now()
        return self

    def __exit__(self, *_: object) -> None:
        if _recorder is not None:
            _recorder.record((self._name, self._begin, now() - self._begin, self.unit, self.facts or None))


class Phases:
    """Consecutive spans of one unit: a phase ends where the next one begins. ``name``: of the current phase."""

    __slots__ = ("_begin", "_unit", "name")

    def __init__(self, unit: str, name: str, begin: int = 0) -> None:
        """``begin``: of the first phase; 0: now."""
        self._unit = unit
        self._begin = begin or now()
        self.name = name

    def enter(self, name: str, /, **facts: Any) -> None:
        """Record the phase until now with ``facts``, and begin phase ``name``; "" if none follows."""
        end = now()
        if self.name:
            add(self.name, self._begin, end, self._unit, **facts)
        self.name, self._begin = name, end


def _size(path: Path) -> int:
    """Return the bytes of a segment; 0 if a predecessor that still ends has removed it."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _boot_id() -> str:
    """Return the id of this boot of the host; its name where the kernel tells none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def _forget() -> None:
    """Stop recording in a forked child: its thread is gone, and the file belongs to the parent."""
    global _recorder
    _recorder = None


os.register_at_fork(after_in_child=_forget)
