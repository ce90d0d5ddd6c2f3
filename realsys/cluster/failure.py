"""Error files: one JSON record per failed process, so that the first failure is reported and not the loudest."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
import traceback
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from realsys.errors import MALFORMED

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """Why a process ended. ``time``: of the failure, in unix seconds."""

    time: float
    kind: str
    index: int
    pid: int
    host: str
    type: str
    message: str
    traceback: str
    exit_code: int = 1  # the `realsys` command returns it if this failure ends the run
    permanent: bool = False  # a restart would fail in the same way

    @property
    def worker(self) -> str:
        return f"{self.kind}/{self.index}"

    def __str__(self) -> str:
        return f"{self.worker} (pid {self.pid} on {self.host}): {self.type}: {self.message}"


def record_of(kind: str, index: int, exc: BaseException) -> ErrorRecord:
    """Return the record of ``exc``, as a failure of this process now."""
    lines = str(exc).strip().splitlines() or ["no message"]
    return ErrorRecord(
        time=time.time(),
        kind=kind,
        index=index,
        pid=os.getpid(),
        host=socket.gethostname(),
        type=type(exc).__name__,
        message=lines[0],
        traceback="".join(traceback.format_exception(exc)),
        exit_code=getattr(exc, "exit_code", 1),
        permanent=getattr(exc, "permanent", False),
    )


def write_error(directory: Path, record: ErrorRecord) -> Path:
    """Write ``{kind}-{index}-{pid}.json`` atomically. An earlier process of the same pid keeps its file."""
    directory.mkdir(parents=True, exist_ok=True)
    stem = f"{record.kind}-{record.index}-{record.pid}"
    staged = directory / f".{stem}.{uuid.uuid4().hex}"
    try:
        with staged.open("w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump(asdict(record), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        final = directory / f"{stem}.json"
        try:
            os.link(staged, final)
        except FileExistsError:
            final = directory / f"{stem}-{uuid.uuid4().hex[:8]}.json"
            os.link(staged, final)
        return final
    finally:
        staged.unlink(missing_ok=True)


def read_errors(directory: Path) -> list[ErrorRecord]:
    """Return all records, earliest first. A file that is not a record is logged and skipped."""
    records: list[ErrorRecord] = []
    for path in directory.glob("[!.]*.json"):
        try:
            # Not msgspec's own parser: it refuses lone surrogates, which the text of an exception may hold.
            records.append(msgspec.convert(json.loads(path.read_text(encoding="utf-8")), ErrorRecord))
        except (OSError, ValueError, *MALFORMED) as exc:
            log.warning("%s is not an error record: %s", path, exc)
    return sorted(records, key=lambda record: record.time)
