"""Reader of the step log: one JSON object per line, written by the MasterWorker and followed by the launcher.

Kinds of records: ``phase``, ``warmup``, ``train``, ``eval``, ``used_up``, ``recovered``. A line is read once it ends
with a newline, so a reader never gets half a record. A record that a crash cut off is skipped and counted.

The log is only appended to. A ``recovered`` record means that training rolled back to its ``step`` (-1: to the start).
It undoes the earlier records of later steps. ``surviving_steps`` leaves these out. A reader that follows the log gets
the ``recovered`` record and uses ``undone`` to find them.

A log grows with the run, so ``records`` and ``surviving_steps`` return one record at a time.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import msgspec

from realsys.observe.step_fields import CURVES

StepRecord = dict[str, Any]

RECOVERED = "recovered"
USED_UP = "used_up"  # the prompts of all epochs ended before ``step``, for ``reason``


class StepTail:
    """Follower of a step log that may not exist yet."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        """``offset``: bytes at the beginning that are not read."""
        self._path = path
        self.offset = offset  # bytes that were read, up to the end of a line
        self.skipped = 0  # lines that were not records

    def read(self) -> list[StepRecord]:
        """Return the records that were completed since the last call, in order, including undone ones."""
        return list(self.records())

    def records(self) -> Iterator[StepRecord]:
        """Yield the same records one by one. The next call yields those that the caller did not take."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.offset += len(line)
                record = _decoded(line)
                if record is not None:
                    yield record
                else:
                    self.skipped += bool(line.strip())


def last_records(path: Path, most_bytes: int) -> list[StepRecord]:
    """Return the records in the last ``most_bytes`` of a step log, including undone ones; [] without a log."""
    try:
        with path.open("rb") as file:
            begin = max(0, file.seek(0, os.SEEK_END) - most_bytes)
            file.seek(begin)
            lines = file.read(most_bytes).split(b"\n")
    except FileNotFoundError:
        return []
    # The first line may have lost its begin, the last one has no newline yet.
    return [record for line in lines[begin > 0 : -1] if (record := _decoded(line)) is not None]


def _decoded(line: bytes) -> StepRecord | None:
    try:
        record = msgspec.json.decode(line)  # records share the strings of field names, which saves memory
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("kind"), str) else None


def read_steps(path: Path) -> list[StepRecord]:
    """Return all records of a step log that were not undone; [] if the file does not exist."""
    return list(surviving_steps(path))


def surviving_steps(path: Path) -> Iterator[StepRecord]:
    """Yield the same records one by one. Reads the log twice; ignores lines appended after the first pass."""
    return surviving(lambda: StepTail(path).records())


def surviving(read: Callable[[], Iterable[StepRecord]]) -> Iterator[StepRecord]:
    """Yield the records that no later ``recovered`` record undid. Each ``read()`` starts at the first record.

    Only the recovery that goes back furthest matters for a record before it. The first pass keeps a queue of
    recoveries with ascending steps, because a later recovery to the same or an earlier step makes the ones before it
    irrelevant. The head of the queue is then the recovery that goes back furthest.
    """
    total = 0
    recoveries = deque[tuple[int, StepRecord]]()  # (number of the record, recovered record), steps ascending
    for record in read():
        if record["kind"] == RECOVERED and isinstance(record.get("step"), int):
            while recoveries and recoveries[-1][1]["step"] >= record["step"]:
                recoveries.pop()
            recoveries.append((total, record))
        total += 1
    for number, record in enumerate(islice(read(), total)):
        while recoveries and recoveries[0][0] <= number:
            recoveries.popleft()
        if not (recoveries and undone(record, recoveries[0][1])):
            yield record


def undone(record: Mapping[str, Any], recovered: Mapping[str, Any]) -> bool:
    """Return True if the later record ``recovered`` undid ``record``, a step or an evaluation of lost weights.

    The weights of an evaluation may be newer than the step after which it was due. The supervised warm-up precedes
    version 0. Phases are clock times and are never undone. A record without a readable step is not undone either,
    because a display must not fail on it.
    """
    last_kept, step = recovered.get("step"), record.get("step")
    if not isinstance(last_kept, int) or not isinstance(step, int):
        return False
    version = record.get("version")
    if record.get("kind") == "eval" and isinstance(version, int):
        step = max(step, version)
    match record.get("kind"):
        case "train" | "eval" | "used_up":
            return step > last_kept
        case "warmup":
            return last_kept < 0
        case _:
            return False


# ---- the newest records of a step log that grows: those that ``/metrics`` and a status show


MAX_BYTES = 8 << 20  # bytes at the end of the log that are read at first


class LatestRecords:
    """The last warm-up step, train step and evaluation of each data set that hold.

    Each read takes what the log has got since the one before. The first one begins at most MAX_BYTES before the end,
    so a long log delays no reader.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tail: StepTail | None = None
        self._records: dict[str, StepRecord] = {}  # kind, or data set of an evaluation -> record
        self._lock = threading.Lock()

    def read(self) -> list[StepRecord]:
        """Return the newest records. Blocks for the disk, unless another thread reads: then they may be older."""
        if self._lock.acquire(blocking=False):  # a disk that hangs holds one thread, not all that ask
            try:
                self._follow()
            finally:
                self._lock.release()
        return list(self._records.values())

    def _follow(self) -> None:
        if self._tail is None:
            size = self._path.stat().st_size if self._path.exists() else 0
            # In the middle of a line: the rest of it is no record and is skipped.
            self._tail = StepTail(self._path, max(0, size - MAX_BYTES))
        for record in self._tail.records():
            kind = record["kind"]
            if kind == RECOVERED:
                self._records = {name: held for name, held in self._records.items() if not undone(held, record)}
            elif kind in CURVES:
                name = f"eval {record.get('set')}" if kind == "eval" else kind
                self._records = {**self._records, name: record}  # other threads may read the one before


# ---- events of a trial: one JSON record per line, appended by the launcher to {trial}/events.jsonl
#
#     {"time": 1700000000.0, "kind": "restart", "process": "rollout_worker/0", "text": "was killed by SIGKILL; ..."}
#
# kind      meaning                                      process
# start     the launcher has started this trial          ""
# restart   a process died and is started again          its name
# gave_up   a process died and is not started again      its name
# note      any other line of the launcher               ""
# stop      the run has ended; text: how                 ""
#
# The file is only appended to; a later start of the trial continues it.


EventKind = Literal["start", "restart", "gave_up", "note", "stop"]
#: events after which processes begin anew: marks of a curve
RESTARTS: frozenset[EventKind] = frozenset({"start", "restart"})


class Event(msgspec.Struct, frozen=True):
    """One event. ``time``: unix seconds."""

    time: float
    kind: EventKind
    text: str
    process: str = ""


class EventLog:
    """Writer of a trial's events. A disk that is full or read-only does not end the run: the event is lost."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, kind: EventKind, text: str, process: str = "") -> None:
        line = msgspec.json.encode(Event(time.time(), kind, text, process)) + b"\n"
        try:
            with self._path.open("ab", buffering=0) as file:  # one write: a reader never gets half a line
                file.write(line)
        except OSError:
            return


class EventTail:
    """Follower of a trial's events. Records of another form are left out."""

    def __init__(self, path: Path) -> None:
        self._tail = StepTail(path)

    def read(self) -> list[Event]:
        """Return the events that were added since the last call, in order."""
        events = []
        for record in self._tail.records():
            with contextlib.suppress(msgspec.ValidationError):
                events.append(msgspec.convert(record, Event))
        return events


def read_events(path: Path) -> list[Event]:
    """Return all events in order; [] if the file does not exist."""
    return EventTail(path).read()


def restarts_in_steps(events: Iterable[Event], records: Iterable[Mapping[str, Any]]) -> list[tuple[float, Event]]:
    """Place restarts on an axis of train steps. The first start of a trial is left out.

    ``records``: records of the step log, in order of time. A restart after step 7 and before step 8 is at 7.5.
    """
    trained = [record for record in records if record.get("kind") == "train" and "time" in record and "step" in record]
    ends = [record["time"] for record in trained]
    marks = [event for event in events if event.kind in RESTARTS]
    if marks and marks[0].kind == "start":
        marks = marks[1:]
    befores = [bisect_right(ends, mark.time) for mark in marks]
    return [
        ((trained[before - 1]["step"] if before else 0) + 0.5, mark)
        for before, mark in zip(befores, marks, strict=True)
    ]
