"""What is known of a run: step records and the manager's status folded into one state. Pure.

Fields that a record or the status lacks stay None; a display must never be what stops a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from realsys.telemetry.steps import undone

Record = Mapping[str, Any]

#: The parts a train step's time is split into, in the order they happen.
TIME_PARTS = ("wait", "inf", "train", "save", "publish")


@dataclass(slots=True)
class Progress:
    """The state of a run as the launcher knows it."""

    since: float = 0.0  # unix seconds; what came before belongs to earlier starts of the trial
    phase: str = "starting"
    phase_since: float | None = None
    phases: list[tuple[str, float]] = field(default_factory=list)  # (phase, unix seconds it began)
    warmup: list[Record] = field(default_factory=list)
    train: list[Record] = field(default_factory=list)
    recoveries: list[Record] = field(default_factory=list)
    arrived: list[Record] = field(default_factory=list)  # everything in its order, undone or not
    evals: dict[str, Record] = field(default_factory=dict)
    status: Record = field(default_factory=dict)  # GET /status of the manager
    address: str | None = None  # of the manager

    def add(self, records: Iterable[Record]) -> None:
        for record in records:
            self.arrived.append(record)
            match record.get("kind"):
                case "phase":
                    self.phase = str(record.get("phase", "?"))
                    self.phase_since = number(record, "time")
                    if self.phase_since is not None:
                        self.phases.append((self.phase, self.phase_since))
                case "warmup":
                    self.warmup.append(record)
                case "train":
                    if self.train:
                        _thin(self.train[-1])
                    self.train.append(record)
                case "eval":
                    self.evals[str(record.get("eval_id", "?"))] = record
                case "recovered":
                    self._go_back(record)

    def _go_back(self, recovered: Record) -> None:
        """What was undone is forgotten: it will happen again."""
        self.recoveries.append(recovered)
        self.train = [record for record in self.train if not undone(record, recovered)]
        self.warmup = [record for record in self.warmup if not undone(record, recovered)]
        self.evals = {name: record for name, record in self.evals.items() if not undone(record, recovered)}

    @property
    def step(self) -> tuple[int, int]:
        """(steps done, steps in all) of the phase that has steps."""
        last = self.train[-1] if self.train else self.warmup[-1] if self.warmup else {}
        return int(number(last, "step") or 0), int(number(last, "total") or 0)

    def phase_seconds(self, end: float) -> dict[str, float]:
        """Wall seconds spent in each phase since this start; a phase entered twice is summed."""
        seconds: dict[str, float] = {}
        phases = [(name, began) for name, began in self.phases if began >= self.since]
        stops = [*(began for _, began in phases[1:]), end]
        for (name, start), stop in zip(phases, stops, strict=False):  # without any phase `end` stands alone
            if name != "done":
                seconds[name] = seconds.get(name, 0.0) + max(0.0, stop - start)
        return seconds


def _thin(record: Record) -> None:
    """Most of a train record is shown of the newest one only; it would fill the memory of a long run's launcher."""
    if isinstance(record, dict):
        for name in ("tickets", "agreement", "call_seconds"):
            record.pop(name, None)
        record["stats"] = {"grad_norm_max": number(record, "stats", "grad_norm_max")}


def number(record: object, *path: str) -> float | None:
    """The number at ``path`` of nested mappings, or None where there is none."""
    for key in path:
        if not isinstance(record, Mapping):
            return None
        record = record.get(key)
    return float(record) if isinstance(record, int | float) and not isinstance(record, bool) else None


def mean(records: Iterable[Record], *path: str) -> float | None:
    """Mean over the records that have a number at ``path``."""
    values = [v for v in (number(r, *path) for r in records) if v is not None]
    return sum(values) / len(values) if values else None
