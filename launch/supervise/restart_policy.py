"""Decides what a death means: restart one worker, restart the trainer, or end the run. Pure: no process, no file.

    RolloutWorker, GenerationServer, GserverManager,            restart alone
    reward service, own etcd
    ModelWorkers, MasterWorker: the trainer                     restart together, from the last checkpoint
    same defect twice in a row, no restarts left                the run continues without a spare worker, or ends
    permanent failure                                           end of the run

`spare`: a GenerationServer, a RolloutWorker or a reward service, if others of its kind have run for much longer than it
did. So one bad GPU does not end a run that has others, and a fault that all of them share does.

`same-defect`: an exception of the same type with the same stack, twice in a row, would come a third time.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from realsys.cluster.children.child_process import HEALTHY_AFTER_S, Backoff, how_it_ended
from realsys.errors import ConfigError
from realsys.launch.nodes.orders import ProcessId

NO_CHECKPOINT = -1  # step of the newest checkpoint before the first one
# The sockets of a killed process close before its memory is freed and its parent learns of the death. In between its
# peers may have reported that they lost it.
KILL_HEARD_AFTER_S = 5.0
_SHOWN = 300  # characters of an exception in a restart line


@dataclass(frozen=True, slots=True)
class Death:
    """Unrequested end of a process. ``error``: last error line of its log, "" if it was killed or wrote none."""

    name: str
    process: ProcessId
    returncode: int
    time: float  # unix seconds
    log: Path
    error: str = ""
    defect: tuple[str, ...] = ()  # see Cause.defect
    lost: str = ""  # why its node counts as dead, if the process ended with it

    @property
    def killed(self) -> bool:
        """True for SIGKILL: something outside of the run killed it, not the failure of another process."""
        return self.returncode == -signal.SIGKILL

    @property
    def how(self) -> str:
        if self.lost:
            return self.lost
        if self.returncode == 0:
            return "exited with code 0, before its work was done"
        return how_it_ended(self.returncode) + (" (out of memory?)" if self.killed else "")


@dataclass(frozen=True, slots=True)
class Cause:
    """First failure among processes that ended together."""

    name: str
    process: ProcessId
    time: float  # unix seconds
    how: str  # end of the process, or "failed" if only the exception is known
    problem: str  # the exception, "" if none is known
    log: Path
    exit_code: int = 1  # the realsys command returns it; 2 for bad input
    defect: tuple[str, ...] = ()  # type and stack of the exception; () if a restart may help

    def __str__(self) -> str:
        """Return one line for the screen."""
        return f"{self.name} {self.how}" + (f": {self.problem:.{_SHOWN}}" if self.problem else "")


@dataclass(slots=True)
class TrialOutcome:
    """End of a run: its status, its reason, and the deaths in it."""

    status: Literal["done", "failed", "interrupted"]
    reason: str
    signal: int | None = None
    deaths: list[Death] = field(default_factory=list)
    restarted: list[Death] = field(default_factory=list)  # deaths that were followed by a restart
    recovered: frozenset[ProcessId] = frozenset()  # those whose failure a restart repaired, so no cause of a later one
    given_up: list[str] = field(default_factory=list)  # names of workers without which the run continued
    killed: list[str] = field(default_factory=list)  # names of processes that did not stop in time
    refused: ConfigError | None = None  # why the run could not begin
    no_machine: bool = False  # a machine is missing that the run cannot do without: it can continue on another one


@dataclass(frozen=True, slots=True)
class Failure:
    """End of one worker, or of the trainer as a whole."""

    who: str  # restart budgets are kept by this name
    deaths: Sequence[Death]
    processes: frozenset[ProcessId]  # all of them, including those that were killed because of the deaths
    ran_s: float
    cause: Cause
    permanent: bool = False  # a restart would fail in the same way
    checkpoint: int = NO_CHECKPOINT  # step of the newest complete one
    spare: bool = False  # the run can do without it


@dataclass(frozen=True, slots=True)
class Restart:
    """Decision to restart. ``number`` counts restarts in a row."""

    delay_s: float
    number: int


@dataclass(frozen=True, slots=True)
class EndDecision:
    """Decision to end the run. The cause is among ``deaths``."""

    reason: str
    deaths: Sequence[Death]


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Decision to continue without a worker that cannot stay up."""

    why: str


Decision = Restart | GiveUp | EndDecision


def is_spare(ran_s: float, others_s: Sequence[float], planned: int, min_share: float) -> bool:
    """Return True if the run can do without a worker that ran for ``ran_s``.

    ``others_s``: for how long each other worker of its kind has run by now; ``planned``: their number with this one.
    ``min_share`` of them, and at least one, must have run for more than twice as long: else the fault may be theirs.
    """
    steady = sum(other_s > 2 * ran_s for other_s in others_s)
    return steady >= max(1, math.ceil(min_share * planned))


@dataclass(slots=True)
class _Row:
    """Failures of one worker, or of the trainer, without progress in between."""

    backoff: Backoff
    checkpoint: int = NO_CHECKPOINT  # newest ever
    deaths: list[Death] = field(default_factory=list)
    processes: set[ProcessId] = field(default_factory=set)
    defect: tuple[str, ...] = ()  # defect of the last failure


class RestartPolicy:
    """Keeps the restart budgets: ``max_restarts`` in a row, each with twice the delay of the one before.

    A row ends when the restarted processes ran for HEALTHY_AFTER_S, or completed a newer checkpoint than any before.
    A checkpoint that is written again after it was set aside as damaged is not newer.
    """

    def __init__(self, max_restarts: int, first_backoff_s: float) -> None:
        self._max_restarts = max_restarts
        self._first_backoff_s = first_backoff_s
        self._rows: dict[str, _Row] = {}
        self._recovered: set[ProcessId] = set()

    @property
    def recovered(self) -> frozenset[ProcessId]:
        """Processes whose failure a restart repaired."""
        return frozenset(self._recovered)

    def decide(self, failure: Failure) -> Decision:
        """Return what to do about a failure, and count it."""
        row = self._rows.get(failure.who)
        newest = max(failure.checkpoint, row.checkpoint if row else NO_CHECKPOINT)
        if row is None or failure.ran_s > HEALTHY_AFTER_S or newest > row.checkpoint:
            row = self._rows[failure.who] = _Row(Backoff(self._max_restarts, self._first_backoff_s), newest)
        cause = failure.cause
        ended = f"{cause.name} {cause.how}"
        repeated = bool(cause.defect) and cause.defect == row.defect
        row.defect = cause.defect
        row.deaths += failure.deaths
        row.processes |= failure.processes
        if failure.permanent:
            return EndDecision(ended, failure.deaths)
        delay = None if repeated else row.backoff.next_delay(failure.ran_s)
        why = f"after {row.backoff.restarts} restarts (cluster.max_restarts)"
        if repeated:
            why = f"twice in a row with the same exception at {cause.defect[-1]}"
        if delay is None and failure.spare:
            self._recovered |= row.processes
            return GiveUp(why)
        if repeated:
            return EndDecision(f"{ended}, {why}", failure.deaths)
        if delay is None:
            self._recovered -= row.processes  # the restarts did not help: the cause is the first of the row
            return EndDecision(f"{ended}, {why}", row.deaths)
        self._recovered |= failure.processes
        return Restart(delay, row.backoff.restarts)
