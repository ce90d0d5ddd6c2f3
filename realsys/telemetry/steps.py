"""Reading the step log: one JSON object a line, appended by the MasterWorker, followed by the launcher.

Kinds: ``phase``, ``warmup``, ``train``, ``eval``, ``recovered``. A line counts once its newline is there, so a reader
never sees half a record; a record torn by a crash is skipped and counted.

The log is only appended to. A ``recovered`` record says that training went back to its ``step`` (-1: to nothing), and
so undoes what came before it and is later than that. Who reads all at once does not see what was undone; who follows
the log gets the ``recovered`` record, and asks ``undone``.

A log grows with the run. ``records`` and ``surviving_steps`` hand out one record at a time, whatever its length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

StepRecord = dict[str, Any]

RECOVERED = "recovered"


class StepTail:
    """Follows a step log that may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.skipped = 0  # lines that were no record

    def read(self) -> list[StepRecord]:
        """The records that were completed since the last call, in order, those that were undone since among them."""
        return list(self.records())

    def records(self) -> Iterator[StepRecord]:
        """The same one by one. What is not taken is there at the next call."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                record = _decoded(line)
                if record is not None:
                    yield record
                else:
                    self.skipped += bool(line.strip())


def _decoded(line: bytes) -> StepRecord | None:
    try:
        record = msgspec.json.decode(line)  # shares the names of the fields between the records
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("kind"), str) else None


def read_steps(path: Path) -> list[StepRecord]:
    """All complete records of a step log that still hold; none if there is no such file."""
    return list(surviving_steps(path))


def surviving_steps(path: Path) -> Iterator[StepRecord]:
    """The same one by one. The log is read twice; what is appended after the first time is left out."""
    return surviving(lambda: StepTail(path).records())


def surviving(read: Callable[[], Iterable[StepRecord]]) -> Iterator[StepRecord]:
    """Without those that a later ``recovered`` undid. ``read`` gives the records from the first on, each time.

    Of the recoveries after a record the one that goes back furthest counts. So the first reading keeps of all of them
    a row in which each goes back less far than those after it, and the second needs only the first of that row.
    """
    total, row = 0, deque[tuple[int, StepRecord]]()  # (number of the record, recovered)
    for record in read():
        if record["kind"] == RECOVERED and isinstance(record.get("step"), int):
            while row and row[-1][1]["step"] >= record["step"]:
                row.pop()
            row.append((total, record))
        total += 1
    for number, record in enumerate(islice(read(), total)):
        while row and row[0][0] <= number:
            row.popleft()
        if not (row and undone(record, row[0][1])):
            yield record


def undone(record: Mapping[str, Any], recovered: Mapping[str, Any]) -> bool:
    """Whether ``recovered``, which comes later, undid ``record``: a step or an evaluation of weights that are gone.

    The supervised warm-up lies before version 0. Phases are times of the clock: they stay. What has no step that can
    be read stays, too: a display must not fail on it.
    """
    back, step = recovered.get("step"), record.get("step")
    if not isinstance(back, int) or not isinstance(step, int):
        return False
    match record.get("kind"):
        case "train" | "eval":
            return step > back
        case "warmup":
            return back < 0
        case _:
            return False
