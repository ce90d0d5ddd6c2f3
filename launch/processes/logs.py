"""The log of a process: everything that it and what descends from it say, over its restarts, within a bound.

    model_worker-0.log         what is said now
    model_worker-0.log.1       what was said before that
    model_worker-0.log.died    what the first process of the run that was restarted had said last

Whoever writes has the file open for appending, be it a worker, an engine that it started or a library that knows of no
logging. So the launcher does not exchange the file: it copies what is there and empties it (what logrotate calls
copytruncate), and the next line of everybody goes to its beginning.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

_LOOK_S = 1.0
_LAST_WORDS = 1 << 16  # bytes


def before(log: Path) -> Path:
    """Where what was in ``log`` is, since it was emptied."""
    return log.with_name(f"{log.name}.1")


def last_words(log: Path) -> Path:
    return log.with_name(f"{log.name}.died")


async def keep_bounded(logs: Sequence[Path], limit: int) -> None:
    """Look at the logs once a second, until cancelled: none gets much longer than ``limit`` bytes."""
    while True:
        await asyncio.to_thread(_shorten, logs, limit)
        await asyncio.sleep(_LOOK_S)


def _shorten(logs: Sequence[Path], limit: int) -> None:
    for log in logs:
        with contextlib.suppress(OSError):  # a full disk, a folder that is gone: no reason to end a run
            shorten(log, limit)


def shorten(log: Path, limit: int) -> None:
    """If ``log`` has more than ``limit`` bytes, put all of them in the place of what was there before, and empty it.

    What is written between the last look at its size and the cut, some microseconds, is lost. Raises OSError, with
    the log as it was.
    """
    if not log.exists() or log.stat().st_size <= limit:
        return
    with log.open("rb+") as file, before(log).open("wb") as copy:
        while os.fstat(file.fileno()).st_size > copy.tell():
            shutil.copyfileobj(file, copy)
            copy.flush()
        os.ftruncate(file.fileno(), 0)


def ending(log: Path, size: int) -> bytes:
    """The last ``size`` bytes of a log, as far as they are there, also when it was emptied since."""
    text = b""
    for path in (log, before(log)):
        with contextlib.suppress(OSError), path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - (size - len(text))))
            text = file.read() + text
    return text


def keep_last_words(log: Path) -> None:
    """Before the first restart: the successors may say so much that nobody finds why the first process died."""
    with contextlib.suppress(OSError):
        last_words(log).write_bytes(ending(log, _LAST_WORDS))
