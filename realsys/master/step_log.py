"""Writes the step log that `realsys.observe.step_log` reads: one JSON record a line, a whole line or
none.

The log grows with every step of a run, so lines are short: numbers keep the digits that mean
something, and tickets are written as ranges.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from realsys.cluster.lease import CheckAlive, unleased
from realsys.errors import RealsysError
from realsys.manager.ledger.tickets import ticket_ranges

DIGITS = 7  # significant digits: the precision of float32
DECIMALS = 3  # minimum number of decimals: unix seconds keep their milliseconds


class StepLog:
    """Writer of a step log. A file has one writer."""

    def __init__(self, path: Path, check_alive: CheckAlive = unleased) -> None:
        """Open the log for appending.

        ``check_alive`` is called before each record; ``append`` raises its errors.
        """
        self._path = path
        self._check_alive = check_alive
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        with path.open("rb") as file:
            if file.seek(0, os.SEEK_END) and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
                os.write(self._fd, b"\n")  # a crashed predecessor may have left half a line

    def append(self, record: Mapping[str, Any]) -> None:
        """Append ``record``.

        Raises RealsysError if the disk does not take all of it; then nothing of it stays in the
        file.
        """
        line = msgspec.json.encode(short(record)) + b"\n"
        self._check_alive()
        # One write call, so that a reader never sees two records mixed.
        try:
            written = os.write(self._fd, line)
        except OSError as error:
            raise RealsysError(f"cannot write the step log {self._path}: {error.strerror}") from error
        if written < len(line):  # a file system with little space left writes a part
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            problem = f"cannot write the step log {self._path}: only {written} of {len(line)} bytes were written"
            raise RealsysError(f"{problem}: free space on this disk")

    def close(self) -> None:
        os.close(self._fd)


def short(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``record`` with rounded numbers, and with ranges for its list of ``tickets``."""
    rounded = {name: _rounded(value) for name, value in record.items()}
    return rounded | {"tickets": ticket_ranges(rounded["tickets"])} if "tickets" in rounded else rounded


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, float) and value and math.isfinite(value):
        return round(value, max(DECIMALS, DIGITS - 1 - math.floor(math.log10(abs(value)))))
    return value
