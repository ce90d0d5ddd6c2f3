"""Events of a trial: one JSON record per line, appended by the launcher to {trial}/events.jsonl.

    {"time": 1700000000.0, "kind": "restart", "process": "rollout_worker/0", "text": "was killed by SIGKILL; ..."}

kind      meaning                                      process
start     the launcher has started this trial          ""
restart   a process died and is started again          its name
gave_up   a process died and is not started again      its name
note      any other line of the launcher               ""
stop      the run has ended; text: how                 ""

The file is only appended to; a later start of the trial continues it.
"""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from realsys.observe.step_log import StepTail

EventKind = Literal["start", "restart", "gave_up", "note", "stop"]
#: events after which processes begin anew: marks of a curve
RESTARTS: frozenset[EventKind] = frozenset({"start", "restart"})


class Event(msgspec.Struct, frozen=True):
    """One event. ``time``: unix seconds."""

    time: float
    kind: EventKind
    text: str
    process: str = ""


class EventLog:
    """Writer of a trial's events. A disk that is full or read-only does not end the run: the event is lost."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, kind: EventKind, text: str, process: str = "") -> None:
        line = msgspec.json.encode(Event(time.time(), kind, text, process)) + b"\n"
        try:
            with self._path.open("ab", buffering=0) as file:  # one write: a reader never gets half a line
                file.write(line)
        except OSError:
            return


class EventTail:
    """Follower of a trial's events. Records of another form are left out."""

    def __init__(self, path: Path) -> None:
        self._tail = StepTail(path)

    def read(self) -> list[Event]:
        """Return the events that were added since the last call, in order."""
        events = []
        for record in self._tail.records():
            with contextlib.suppress(msgspec.ValidationError):
                events.append(msgspec.convert(record, Event))
        return events


def read_events(path: Path) -> list[Event]:
    """Return all events in order; [] if the file does not exist."""
    return EventTail(path).read()


def restarts_in_steps(events: Iterable[Event], records: Iterable[Mapping[str, Any]]) -> list[tuple[float, Event]]:
    """Place restarts on an axis of train steps. The first start of a trial is left out.

    ``records``: records of the step log, in order of time. A restart after step 7 and before step 8 is at 7.5.
    """
    trained = [record for record in records if record.get("kind") == "train" and "time" in record and "step" in record]
    ends = [record["time"] for record in trained]
    marks = [event for event in events if event.kind in RESTARTS]
    if marks and marks[0].kind == "start":
        marks = marks[1:]
    befores = [bisect_right(ends, mark.time) for mark in marks]
    return [
        ((trained[before - 1]["step"] if before else 0) + 0.5, mark)
        for before, mark in zip(befores, marks, strict=True)
    ]
