"""Tracker ``file``: one JSON object per point in ``metrics.jsonl``, for pandas, jq and the like.

    {"kind": "train", "step": 7, "time": 1795404291.9, "train/reward_mean": 0.81, ...}

A roll-back removes the lines that it undoes, so the file has each step once.
"""

from __future__ import annotations

import os

import msgspec

from realsys.observe.step_log import undone
from realsys.observe.trackers.contract import Point, Run, Tracker

SIZE = "bytes"  # entry of ``Run.state``: size of the file at the last flush


class FileTracker(Tracker):
    """Writer of ``metrics.jsonl`` in the folder of the trial."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._path = run.folder / "metrics.jsonl"
        self._file = self._path.open("ab")
        size = min(int(run.state.get(SIZE, 0)), self._file.tell())
        self._file.truncate(size)  # lines after it are delivered again
        self._file.seek(size)

    def log(self, point: Point) -> None:
        line = {"kind": point.kind, "step": point.step, "time": point.time, **point.metrics}
        self._file.write(msgspec.json.encode(line) + b"\n")

    def roll_back(self, step: int) -> None:
        self._file.close()
        staged = self._path.with_suffix(".tmp")
        recovered = {"step": step}
        with self._path.open("rb") as lines, staged.open("wb") as kept:
            kept.writelines(line for line in lines if not undone(msgspec.json.decode(line), recovered))
        os.replace(staged, self._path)
        self._file = self._path.open("ab")

    def flush(self) -> None:
        self._file.flush()
        self.run.state[SIZE] = self._file.tell()

    def close(self, status: str) -> None:
        self._file.close()
