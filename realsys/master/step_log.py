"""Writing the step log that `realsys.telemetry.steps` reads: one JSON record a line, whole or absent."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec


class StepLog:
    """Appends records; one writer per file."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        if os.fstat(self._fd).st_size and not path.read_bytes().endswith(b"\n"):
            os.write(self._fd, b"\n")  # close the line that a predecessor left torn

    def append(self, record: Mapping[str, Any]) -> None:
        # One write call: a follower never meets two records mixed into one another.
        os.write(self._fd, msgspec.json.encode(record) + b"\n")

    def close(self) -> None:
        os.close(self._fd)
