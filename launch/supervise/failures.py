"""Finds the first failure, and what its log has about it. The loudest failure is seldom the first one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import site
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from realsys.cluster.aio import FULL, full_disk
from realsys.cluster.process import ErrorRecord
from realsys.launch.nodes.orders import ProcessId
from realsys.launch.supervise.restart_policy import KILL_HEARD_AFTER_S, Cause, Death, TrialOutcome
from realsys.observe.screen.text_figures import size_text

_LOG_LINES = 15
_TAIL_BYTES = 1 << 16
_PROBLEM = 1000  # characters of a line of a log
_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_LOGGED = re.compile(r" (?:ERROR|CRITICAL) \S+: (.*)")
_LIBRARIES = (sysconfig.get_path("stdlib"), *site.getsitepackages())
#: exceptions that another process, the lease or the load of the machine causes: the next start may be spared them
_FROM_OUTSIDE = {
    *("Fenced", "WaitTimeout", "NameStoreError", "KeyMissing", "KeyExists", "StreamError", "WorkerLost"),
    *("TimeoutError", "ConnectionError", "ConnectionResetError", "ConnectionRefusedError", "BrokenPipeError"),
    *("OutOfMemoryError", "DistBackendError", "DistNetworkError", "DistStoreError"),
}


@dataclass(frozen=True, slots=True)
class FirstFailure:
    """The cause of a failed run."""

    process: str
    pid: int
    time: float
    problem: str
    log: Path
    log_tail: list[str]
    exit_code: int = 1  # 2 if a worker found that the user's input is wrong


def first_failure(outcome: TrialOutcome, errors: Iterable[ErrorRecord], logs: Path) -> FirstFailure | None:
    """Return the cause of a failed run, or None if there is neither a death nor an error file.

    Errors of processes that were restarted do not count: the run continued after them.
    """
    left = [error for error in errors if process_of(error) not in outcome.recovered]
    cause = first_cause(outcome.deaths, left, lambda name: logs / f"{name.replace('/', '-')}.log")
    if cause is None:
        return None
    named = any(process_of(error) == cause.process for error in left)
    problem = cause.problem if named else ": ".join(part for part in (cause.how, cause.problem) if part)
    lines = [] if FULL in problem else tail(cause.log, _LOG_LINES)  # a traceback says no more about a full disk
    return FirstFailure(cause.name, cause.process.pid, cause.time, problem, cause.log, lines, cause.exit_code)


def process_of(error: ErrorRecord) -> ProcessId:
    """Return the process that wrote the record."""
    return ProcessId(error.host, error.pid)


def first_cause(deaths: Iterable[Death], errors: Iterable[ErrorRecord], log_of: Callable[[str], Path]) -> Cause | None:
    """Return the earliest of all error files, and of all deaths without one."""
    ends = {death.process: death for death in deaths}
    causes: list[tuple[float, Cause]] = []
    for error in errors:
        process = process_of(error)
        death = ends.pop(process, None)
        how = "failed" if death is None else death.how
        problem = f"{error.type}: {error.message}"
        defect = defect_of(error.type, error.traceback)
        log = log_of(error.worker) if death is None else death.log
        causes.append(
            (error.time, Cause(error.worker, process, error.time, how, problem, log, error.exit_code, defect))
        )
    for death in ends.values():
        cause = Cause(death.name, death.process, death.time, death.how, death.error, death.log, 1, death.defect)
        causes.append((death.time - KILL_HEARD_AFTER_S * death.killed, cause))
    return min(causes, key=lambda timed: timed[0])[1] if causes else None


def defect_of(kind: str, traceback: str) -> tuple[str, ...]:
    """Return the type and stack of an exception, innermost frame last; () if its cause lies outside the process.

    Frames of libraries do not count, unless there are no others. A full disk lies outside: a user may make room.
    """
    if FULL in traceback:
        return ()
    frames = _FRAME.findall(traceback)
    own = [frame for frame in frames if not frame[0].startswith((*_LIBRARIES, "<frozen"))] or frames
    if not own or kind.rpartition(".")[2] in _FROM_OUTSIDE:
        return ()
    return (kind, *(f"{file}:{line}" for file, line in own))


def last_error(text: str) -> tuple[str, tuple[str, ...]]:
    """Return the last exception in the log of a process, or else its last ERROR line, and the defect.

    A full disk wins over both, because it explains them and may have kept the error file from being written.
    """
    exception, traceback, logged, full = "", "", "", ""
    frames: list[str] | None = None
    for line in text.splitlines():
        if line == _TRACEBACK:
            frames = []
        elif frames is not None and line[:1].isspace():
            frames.append(line)
        elif frames is not None and line:
            exception, traceback, frames = line, "\n".join(frames), None
        elif match := _LOGGED.search(line):
            logged = match[1]
        if FULL in line:
            full = next(text for text in (exception, logged, line) if FULL in text)
    problem = full or exception or logged
    return problem.strip()[:_PROBLEM], () if full else defect_of(exception.partition(":")[0], traceback)


def no_room(folder: Path, need: int, others: Sequence[Path] = ()) -> str:
    """Return that the disk of ``folder`` has less room than ``need`` bytes, or that one of ``others`` is full; else
    "".
    """
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return ""
    if free < need:
        return f"{FULL}: a step needs about {size_text(need)}, {folder} has {size_text(free)}"
    return next(filter(None, map(full_disk, others)), "")


def log_since(log: Path, start: int) -> str:
    """Return the end of a log that was written after byte ``start``, or after the log was emptied since."""
    try:
        size = log.stat().st_size
    except OSError:
        return ""
    new = size - start if size >= start else _TAIL_BYTES
    return ending(log, min(new, _TAIL_BYTES)).decode("utf-8", "replace")


def tail(path: Path, lines: int) -> list[str]:
    """Return the last lines of a log; [] without a log."""
    return list(deque(ending(path, _TAIL_BYTES).decode("utf-8", "replace").splitlines(), maxlen=lines))


# ---- the log of a process and its descendants over all restarts, within a bound
#
#     model_worker-0.log         current output
#     model_worker-0.log.1       output before that
#     model_worker-0.log.died    last output of the first process of the run that was restarted
#
# All writers (a worker, an engine that it started, a library that prints) have the file open for appending. So the
# node does not replace the file: it copies the content and truncates the file (copytruncate in logrotate), and the
# next line of each writer goes to its beginning.


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
