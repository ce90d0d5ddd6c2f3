"""Delivery of a step log to one tracker: each point once, in order, over all starts of the trial.

    steps.jsonl ──offset──> records ──> points, roll-backs ──> tracker.log, tracker.roll_back
                                                                      └─ flush ──> trackers/NAME.json (offset)

The position is written after the tracker has flushed. If the process is killed in between, the points since the last
position are delivered twice; the built-in trackers discard the second ones where their library lets them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from realsys.observe.points import CURVES, metrics_of, step_of
from realsys.observe.step_log import RECOVERED, StepRecord, StepTail
from realsys.observe.trackers.contract import Point, Run, Tracker

#: records between two positions: few, because a tracker that takes them for a minute is taken for hanging
BATCH = 50

#: Makes the tracker of a run.
Make = Callable[[Run], Tracker]


class Position(msgspec.Struct):
    """Progress of a tracker.

    offset     bytes of the step log that were delivered
    index      number of points
    delivered  kind -> greatest step of the points that hold
    state      ``Run.state``
    """

    offset: int = 0
    index: int = 0
    delivered: dict[str, int] = {}
    state: dict[str, Any] = {}


def read_position(path: Path) -> Position:
    """Return the position in ``path``; the beginning if the file is missing or damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Position)
    except (OSError, msgspec.DecodeError):
        return Position()


class Feed:
    """A tracker and its position in the step log. Belongs to one thread."""

    def __init__(self, steps: Path, position: Path, run: Run, make: Make) -> None:
        """Make the tracker. ``run``: without ``delivered`` and ``state``, which are in the file ``position``.

        Raises what the tracker raises.
        """
        self._file = position
        self._at = read_position(position)
        if steps.exists() and steps.stat().st_size < self._at.offset:
            self._at = Position()  # another step log
        self._tail = StepTail(steps, self._at.offset)
        fields = {name: getattr(run, name) for name in ("experiment", "trial", "folder", "config", "version")}
        self._run = Run(**fields, delivered=dict(self._at.delivered), state=self._at.state)
        try:
            self._tracker = make(self._run)
        finally:
            self._save()  # its state, such as the id of its run: the next try continues it, also if this one failed

    def deliver(self) -> int:
        """Deliver what the step log has got since the last call, at most BATCH records. Returns their number."""
        taken, noted, offset = 0, 0, self._tail.offset
        for record in islice(self._tail.records(), BATCH):
            # A tracker may rewrite its file at a roll-back. So one position is written before the
            # roll-back and one after it: after a crash in between no point is delivered twice.
            is_roll_back = record["kind"] == RECOVERED
            if is_roll_back and taken > noted:
                self._commit(offset)
            self._take(record)
            taken, offset = taken + 1, self._tail.offset
            if is_roll_back:
                self._commit(offset)
                noted = taken
        if taken > noted:
            self._commit(offset)
        return taken

    def _commit(self, offset: int) -> None:
        self._tracker.flush()
        self._at.offset = offset
        self._save()

    def close(self, status: str) -> None:
        """Close the tracker, which may hand over points only then, and save its state."""
        self._tracker.close(status)
        self._save()

    def _take(self, record: StepRecord) -> None:
        kind, step = record["kind"], step_of(record)
        if step is None:
            return
        if kind == RECOVERED:
            self._roll_back(step)
        elif kind in CURVES:
            when = record.get("time")
            time = float(when) if isinstance(when, int | float) else 0.0
            self._tracker.log(Point(kind, step, time, self._at.index, metrics_of(record)))
            self._at.index += 1
            # Evaluations of several sets do not ascend: the one that was due first may have newer weights.
            self._at.delivered[kind] = max(step, self._at.delivered.get(kind, step))

    def _roll_back(self, step: int) -> None:
        self._tracker.roll_back(step)
        for kind, last in list(self._at.delivered.items()):
            if kind == "warmup" and step < 0:
                del self._at.delivered[kind]
            elif kind != "warmup":
                self._at.delivered[kind] = min(last, max(step, -1))

    def _save(self) -> None:
        staged = self._file.with_suffix(".tmp")
        self._file.parent.mkdir(parents=True, exist_ok=True)
        staged.write_bytes(msgspec.json.encode(self._at))
        os.replace(staged, self._file)
