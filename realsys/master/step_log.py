"""Writing the step log that `realsys.telemetry.steps` reads: one JSON record a line, whole or absent.

The log is the one thing that grows with every step of a run, so a line is kept short: numbers with the digits that
mean something, tickets as ranges.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from realsys.cluster.fence import CheckAlive, unleased
from realsys.errors import RealsysError
from realsys.manager.ledger.tickets import ticket_ranges

DIGITS = 7  # significant ones: what single precision has
DECIMALS = 3  # at least: of a time, in unix seconds, the milliseconds


class StepLog:
    """Appends records; one writer per file."""

    def __init__(self, path: Path, check_alive: CheckAlive = unleased) -> None:
        """``check_alive``: asked before each record; ``append`` raises what it raises."""
        self._path, self._check_alive = path, check_alive
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        with path.open("rb") as file:
            if file.seek(0, os.SEEK_END) and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
                os.write(self._fd, b"\n")  # close the line that a predecessor left torn

    def append(self, record: Mapping[str, Any]) -> None:
        """Raises RealsysError when the disk takes none of it, or only a part: that is then taken back."""
        line = msgspec.json.encode(short(record)) + b"\n"
        self._check_alive()
        # One write call: a follower never meets two records mixed into one another.
        try:
            written = os.write(self._fd, line)
        except OSError as error:
            raise RealsysError(f"step log {self._path} cannot be written: {error.strerror}") from error
        if written < len(line):  # what a file system does that has room for that much
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            raise RealsysError(f"step log {self._path} cannot be written: {written} of {len(line)} bytes; disk full?")

    def close(self) -> None:
        os.close(self._fd)


def short(record: Mapping[str, Any]) -> dict[str, Any]:
    """``record`` with rounded numbers and, for its list of ``tickets``, their ranges."""
    found = {name: _rounded(value) for name, value in record.items()}
    return found | {"tickets": ticket_ranges(found["tickets"])} if "tickets" in found else found


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, float) and value and math.isfinite(value):
        return round(value, max(DECIMALS, DIGITS - 1 - math.floor(math.log10(abs(value)))))
    return value
