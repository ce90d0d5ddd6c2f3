"""The newest records of a step log that grows: those that ``/metrics`` and a status show."""

from __future__ import annotations

import threading
from pathlib import Path

from realsys.telemetry.points import CURVES
from realsys.telemetry.steps import RECOVERED, StepRecord, StepTail, undone

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
            self._take(record)

    def _take(self, record: StepRecord) -> None:
        kind = record["kind"]
        if kind == RECOVERED:
            self._records = {name: held for name, held in self._records.items() if not undone(held, record)}
        elif kind in CURVES:
            name = f"eval {record.get('set')}" if kind == "eval" else kind
            self._records = {**self._records, name: record}  # other threads may read the one before
