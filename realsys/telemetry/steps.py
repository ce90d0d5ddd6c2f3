"""Reading the step log: one JSON object a line, appended by the MasterWorker, followed by the launcher.

Kinds: ``phase``, ``warmup``, ``train``, ``eval``, ``recovered``. A line counts once its newline is there, so a reader
never sees half a record; a record torn by a crash is skipped and counted.

The log is only appended to. A ``recovered`` record says that training went back to its ``step`` (-1: to nothing), and
so undoes what came before it and is later than that. Who reads all at once does not see what was undone; who follows
the log gets the ``recovered`` record, and asks ``undone``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return []
        complete, newline, _ = text.rpartition(b"\n")
        self._offset += len(complete) + len(newline)
        records = []
        for line in complete.splitlines():
            try:
                record = msgspec.json.decode(line)  # shares the names of the fields between the records
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                record = None
            if isinstance(record, dict) and isinstance(record.get("kind"), str):
                records.append(record)
            else:
                self.skipped += bool(line.strip())
        return records


def read_steps(path: Path) -> list[StepRecord]:
    """All complete records of a step log that still hold; none if there is no such file."""
    return surviving(StepTail(path).read())


def surviving(records: Iterable[StepRecord]) -> list[StepRecord]:
    """Without those that a later ``recovered`` undid."""
    kept: list[StepRecord] = []
    for record in records:
        if record["kind"] == RECOVERED:
            kept = [earlier for earlier in kept if not undone(earlier, record)]
        kept.append(record)
    return kept


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
