"""What a death means: restart the one, restart the training side, or the end of the run. Pure: nothing is touched.

RolloutWorker, GenerationServer, GserverManager, own etcd     restarted one by one
ModelWorker, MasterWorker                                     the training side restarts from the last checkpoint
a failure that would come again (bad input), a spent budget   the end; the first death of the row is the cause
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

HEALTHY_AFTER_S = 300.0  # what ran this long gets its restart budget back
LONGEST_BACKOFF_S = 30.0
NO_CHECKPOINT = -1  # the step before the first: there is none
# The sockets of a killed process close before its memory is given back and its parent hears of it; meanwhile its peers
# may have written their complaints.
KILL_HEARD_AFTER_S = 5.0


@dataclass(frozen=True, slots=True)
class Death:
    """A process that ended though nobody asked it to."""

    name: str
    pid: int
    returncode: int
    time: float  # unix seconds
    log: Path

    @property
    def killed(self) -> bool:
        """By SIGKILL: from outside, and never because another process failed."""
        return self.returncode == -signal.SIGKILL

    @property
    def how(self) -> str:
        if self.returncode >= 0:
            early = "" if self.returncode else ", before its work was done"
            return f"exited with code {self.returncode}{early}"
        hint = " (out of memory?)" if self.killed else ""
        try:
            return f"was killed by {signal.Signals(-self.returncode).name}{hint}"
        except ValueError:
            return f"was killed by signal {-self.returncode}"


@dataclass(slots=True)
class Outcome:
    """How the run ended. ``restarted`` holds the deaths that were followed by a restart."""

    status: Literal["done", "failed", "interrupted"]
    reason: str
    signal: int | None = None
    deaths: list[Death] = field(default_factory=list)
    restarted: list[Death] = field(default_factory=list)
    mended: frozenset[int] = frozenset()  # pids of processes whose end a restart made good: no cause of a later failure
    killed: list[str] = field(default_factory=list)  # what had to be killed, because it did not stop in time


def first_of(deaths: Iterable[Death]) -> Death:
    """The death that caused the others."""
    return min(deaths, key=lambda death: death.time - KILL_HEARD_AFTER_S * death.killed)


@dataclass(frozen=True, slots=True)
class Loss:
    """Processes that are gone together: one worker, or the training side.

    ``deaths``: those that nobody asked for. ``pids``: of all, also those that were stopped because of them.
    """

    who: str  # budgets are kept by this
    deaths: Sequence[Death]
    pids: frozenset[int]
    ran_s: float
    permanent: bool  # a restart would meet the same end
    checkpoint: int = NO_CHECKPOINT  # step of the newest complete one


@dataclass(frozen=True, slots=True)
class Restart:
    delay_s: float
    number: int  # of restarts in a row
    cause: Death


@dataclass(frozen=True, slots=True)
class End:
    """``deaths``: where the cause is looked for."""

    reason: str
    deaths: Sequence[Death]


@dataclass(slots=True)
class _Row:
    """Restarts of one loss after the other without progress between them."""

    restarts: int = 0
    deaths: list[Death] = field(default_factory=list)
    pids: set[int] = field(default_factory=set)
    checkpoint: int = NO_CHECKPOINT  # the newest there ever was


class Judge:
    """Keeps the restart budgets: ``max_restarts`` in a row, with twice the delay each time.

    A row ends when what was restarted ran for HEALTHY_AFTER_S, or has completed a newer checkpoint than any before it:
    one that was set aside as damaged, or is written again after that, is no progress.
    """

    def __init__(self, max_restarts: int, first_backoff_s: float) -> None:
        self._max_restarts, self._first_backoff_s = max_restarts, first_backoff_s
        self._rows: dict[str, _Row] = {}
        self._mended: set[int] = set()

    @property
    def mended(self) -> frozenset[int]:
        return frozenset(self._mended)

    def judge(self, loss: Loss) -> Restart | End:
        cause = first_of(loss.deaths)
        row = self._rows.setdefault(loss.who, _Row())
        newest = max(loss.checkpoint, row.checkpoint)
        if loss.ran_s > HEALTHY_AFTER_S or newest > row.checkpoint:
            row = self._rows[loss.who] = _Row(checkpoint=newest)
        row.deaths += loss.deaths
        row.pids |= loss.pids
        if loss.permanent:
            return End(f"{cause.name} {cause.how}", loss.deaths)
        if row.restarts >= self._max_restarts:
            self._mended -= row.pids  # the restarts did not help: the cause is the first of the row
            return End(f"{cause.name} {cause.how}, after {row.restarts} restarts (cluster.max_restarts)", row.deaths)
        delay = min(LONGEST_BACKOFF_S, self._first_backoff_s * 2**row.restarts)
        row.restarts += 1
        self._mended |= loss.pids
        return Restart(delay, row.restarts, cause)
