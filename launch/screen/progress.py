"""State of a running trial for the display, from step records and the manager's status. Pure.

It keeps the newest records only, whatever the length of the run; the report reads the step log again. A field that a
record or the status lacks is None: a display must never stop a run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from realsys.evaluation.eval_records import without_incomplete
from realsys.telemetry.steps import StepTail, undone

Record = Mapping[str, Any]

#: The parts a train step's time is split into, in the order they happen.
TIME_PARTS = ("wait", "inf", "train", "save", "publish", "checkpoint")
OTHER = "other"  # time of a step that belongs to no part

WINDOW = 192  # steps that are shown: 8 for each character of a sparkline
SHOWN_EVALS = 5  # of each data set: the first and the newest


@dataclass(slots=True)
class Progress:
    """The state of a run as the launcher knows it: constant memory."""

    phase: str = "starting"
    phase_since: float | None = None
    warmup: deque[Record] = field(default_factory=lambda: deque(maxlen=WINDOW))
    train: deque[Record] = field(default_factory=lambda: deque(maxlen=WINDOW))
    evals: dict[str, Record] = field(default_factory=dict)
    status: Record = field(default_factory=dict)  # GET /status of the manager
    address: str | None = None  # address of the manager
    key: str = ""  # what the manager's pages ask for; shown on a terminal only
    _trained: tuple[int, int] | None = None  # (steps done, all steps) after the first step; for the warm-up:
    _warmed_up: tuple[int, int] = (0, 0)

    @property
    def page(self) -> str:
        """Address of the status page."""
        return f"{self.address}/" + (f"#key={self.key}" if self.key else "")

    def read(self, steps: Path) -> None:
        """Add all records of a step log that may not exist."""
        self.add(StepTail(steps).records())

    def add(self, records: Iterable[Record]) -> None:
        for record in records:
            match record.get("kind"):
                case "phase":
                    self.phase = str(record.get("phase", "?"))
                    self.phase_since = number(record, "time")
                case "warmup":
                    self.warmup.append(record)
                    self._warmed_up = _count(record)
                case "train":
                    self.train.append(record)
                    self._trained = _count(record)
                case "eval":
                    self.evals[str(record.get("eval_id", "?"))] = without_incomplete(record)
                    same = [name for name, each in self.evals.items() if each.get("set") == record.get("set")]
                    if len(same) > SHOWN_EVALS:
                        del self.evals[same[1]]
                case "recovered":
                    self._go_back(record)

    def _go_back(self, recovered: Record) -> None:
        """Remove the records that a recovery undid: the steps happen again. Steps before the window stay done."""
        self.train = deque((record for record in self.train if not undone(record, recovered)), WINDOW)
        self.warmup = deque((record for record in self.warmup if not undone(record, recovered)), WINDOW)
        self.evals = {name: record for name, record in self.evals.items() if not undone(record, recovered)}
        back = recovered.get("step")
        if isinstance(back, int) and self._trained is not None:
            self._trained = (min(self._trained[0], back), self._trained[1]) if back > 0 else None
        if not self.warmup:
            self._warmed_up = (0, 0)

    @property
    def step(self) -> tuple[int, int]:
        """Return (steps done, all steps) of the current phase."""
        return self._warmed_up if self._trained is None else self._trained


def _count(record: Record) -> tuple[int, int]:
    return int(number(record, "step") or 0), int(number(record, "total") or 0)


def number(record: object, *path: str) -> float | None:
    """Return the number at ``path`` of nested mappings, or None."""
    for key in path:
        if not isinstance(record, Mapping):
            return None
        record = record.get(key)
    if not isinstance(record, int | float) or isinstance(record, bool):
        return None
    try:
        return float(record)
    except OverflowError:
        return None


def time_parts(seconds: Mapping[str, float | None]) -> dict[str, float]:
    """Return the parts of a step's ``seconds`` without ``total``, and OTHER: together they are the total."""
    known = {part: value for part in (*TIME_PARTS, *seconds) if (value := seconds.get(part)) is not None}
    total = known.pop("total", 0.0)  # the rest is parts
    return known | {OTHER: max(0.0, total - sum(known.values()))} if known else {}


def mean(records: Iterable[Record], *path: str) -> float | None:
    """Return the mean over the records that have a number at ``path``."""
    values = [v for v in (number(r, *path) for r in records) if v is not None]
    return sum(values) / len(values) if values else None
