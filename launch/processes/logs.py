"""The log of a process and its descendants over all restarts, within a bound.

    model_worker-0.log         current output
    model_worker-0.log.1       output before that
    model_worker-0.log.died    last output of the first process of the run that was restarted

All writers (a worker, an engine that it started, a library that prints) have the file open for appending. So the
node does not replace the file: it copies the content and truncates the file (copytruncate in logrotate), and the next
line of each writer goes to its beginning.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

_LOOK_S = 1.0
_LAST_WORDS = 1 << 16  # bytes


def before(log: Path) -> Path:
    """Return the file to which the content of ``log`` is moved."""
    return log.with_name(f"{log.name}.1")


def last_words(log: Path) -> Path:
    """Return the file with the last output of the first process that died."""
    return log.with_name(f"{log.name}.died")


async def keep_bounded(limits: Mapping[Path, int]) -> None:
    """Check the logs once a second, until cancelled: none gets much longer than its limit in bytes.

    ``limits`` may get further logs at any time.
    """
    while True:
        await asyncio.to_thread(_shorten, dict(limits))
        await asyncio.sleep(_LOOK_S)


def _shorten(limits: Mapping[Path, int]) -> None:
    for log, limit in limits.items():
        with contextlib.suppress(OSError):  # a full disk or a missing folder must not end a run
            shorten(log, limit)


def shorten(log: Path, limit: int) -> None:
    """If ``log`` has more than ``limit`` bytes, move them to ``before(log)``, over earlier ones.

    Output of the few microseconds between the last check of the size and the truncation is lost. Raises OSError; the
    log is unchanged then.
    """
    if not log.exists() or log.stat().st_size <= limit:
        return
    with log.open("rb+") as file, before(log).open("wb") as copy:
        while os.fstat(file.fileno()).st_size > copy.tell():
            shutil.copyfileobj(file, copy)
            copy.flush()
        os.ftruncate(file.fileno(), 0)


def ending(log: Path, size: int) -> bytes:
    """Return the last ``size`` bytes of a log, or all, including those that were moved to ``before(log)``."""
    text = b""
    for path in (log, before(log)):
        with contextlib.suppress(OSError), path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - (size - len(text))))
            text = file.read() + text
    return text


def keep_last_words(log: Path) -> None:
    """Copy the end of the log. Called at the first restart: later output may bury why the first process died."""
    with contextlib.suppress(OSError):
        last_words(log).write_bytes(ending(log, _LAST_WORDS))
