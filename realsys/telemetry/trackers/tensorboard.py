"""Tracker ``tensorboard``: event files in the folder ``tensorboard`` of the trial. ``tensorboard --logdir`` reads them.

Each kind of record has its own folder, because a roll-back discards the steps of a folder: training and
evaluations go back, the warm-up does not.
"""

from __future__ import annotations

from realsys.telemetry.trackers.base import Point, Run, Tracker
from realsys.telemetry.trackers.event_files import EventFile


class TensorBoardTracker(Tracker):
    """Writer of event files. A new start or a roll-back begins a new file, which names the steps that it discards."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._files: dict[str, EventFile] = {}
        for kind, step in run.delivered.items():
            self._restart(kind, step + 1)  # points that were written and not noted are delivered again

    def log(self, point: Point) -> None:
        if point.kind not in self._files:
            self._restart(point.kind, 0)  # also over the files of a start that was killed before its first position
        self._files[point.kind].scalars(point.step, point.time, point.metrics)

    def roll_back(self, step: int) -> None:
        for kind in [kind for kind in self._files if kind != "warmup" or step < 0]:
            self._restart(kind, step + 1)

    def flush(self) -> None:
        for file in self._files.values():
            file.flush()

    def close(self, status: str) -> None:
        for file in self._files.values():
            file.close()

    def _restart(self, kind: str, step: int) -> None:
        if kind in self._files:
            self._files[kind].close()
        self._files[kind] = EventFile(self.run.folder / "tensorboard" / kind)
        self._files[kind].restart(max(0, step))
