"""Reading the step log: one JSON object a line, appended by the MasterWorker, followed by the launcher.

Kinds: ``phase``, ``warmup``, ``train``, ``eval``. A line counts once its newline is there, so a reader never sees half
a record; a record torn by a crash is skipped and counted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

StepRecord = dict[str, Any]


class StepTail:
    """Follows a step log that may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.skipped = 0  # lines that were no record

    def read(self) -> list[StepRecord]:
        """The records that were completed since the last call."""
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
                record = json.loads(line)
            except ValueError:
                record = None
            if isinstance(record, dict) and isinstance(record.get("kind"), str):
                records.append(record)
            else:
                self.skipped += bool(line.strip())
        return records


def read_steps(path: Path) -> list[StepRecord]:
    """All complete records of a step log; none if there is no such file."""
    return StepTail(path).read()
