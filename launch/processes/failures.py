"""Which failure came first, and what its log says. The loudest failure is seldom the first one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from realsys.launch.processes.logs import ending
from realsys.launch.processes.verdict import KILL_HEARD_AFTER_S, Outcome

_LOG_LINES = 15
_TAIL_BYTES = 1 << 16


class ErrorRecord(Protocol):
    """What an error file of a process says (realsys.cluster.failure)."""

    @property
    def time(self) -> float: ...
    @property
    def kind(self) -> str: ...
    @property
    def index(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def type(self) -> str: ...
    @property
    def message(self) -> str: ...
    @property
    def exit_code(self) -> int: ...


@dataclass(frozen=True, slots=True)
class FirstFailure:
    """The cause of a failed run."""

    process: str
    pid: int
    time: float
    problem: str
    log: Path
    log_tail: list[str]
    exit_code: int = 1  # 2 where a worker found that the user's input is wrong


def first_failure(outcome: Outcome, errors: Iterable[ErrorRecord], logs: Path) -> FirstFailure | None:
    """The earliest of all error files and all deaths without one.

    Errors of processes that were restarted are no cause: the run went on after them.
    """
    mended = outcome.mended
    found = [
        FirstFailure(f"{e.kind}/{e.index}", e.pid, e.time, f"{e.type}: {e.message}", _log(e, logs), [], e.exit_code)
        for e in errors
        if e.pid not in mended
    ]
    explained = {failure.pid for failure in found}
    silent = [d for d in outcome.deaths if d.pid not in explained]
    killed = {d.pid for d in silent if d.killed}
    found += [FirstFailure(d.name, d.pid, d.time, d.how, d.log, []) for d in silent]
    if not found:
        return None
    first = min(found, key=lambda failure: failure.time - KILL_HEARD_AFTER_S * (failure.pid in killed))
    return replace(first, log_tail=tail(first.log, _LOG_LINES))


def _log(error: ErrorRecord, logs: Path) -> Path:
    return logs / f"{error.kind}-{error.index}.log"


def tail(path: Path, lines: int) -> list[str]:
    """The last lines of a log; empty when there is none."""
    return list(deque(ending(path, _TAIL_BYTES).decode("utf-8", "replace").splitlines(), maxlen=lines))
