"""Tracker ``trackio``: a local database, shown by ``trackio show``. ``tracker_args``: those of ``trackio.init``.

Trackio keeps every point that it got: after a roll-back a step has two.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from realsys.observe.trackers.contract import Point, Run, Tracker, argument_problem

STARTED = "started"  # entry of ``Run.state``


class TrackioTracker(Tracker):
    """One run of trackio for the trial, over all of its starts."""

    package = "trackio"
    install = "realsys[trackio]"

    @classmethod
    def problem(cls, arguments: Mapping[str, Any]) -> str:
        return argument_problem("trackio", "__init__.py", arguments, ("name", "resume", "embed"))

    def __init__(self, run: Run, **arguments: Any) -> None:
        super().__init__(run)
        resume = "allow" if run.state.get(STARTED) else "never"
        defaults = {"project": run.experiment, "config": dict(run.config), "auto_log_gpu": False, "auto_log_cpu": False}
        trackio: Any = importlib.import_module("trackio")
        self._run: Any = trackio.init(**{**defaults, **arguments, "name": run.trial, "resume": resume, "embed": False})
        run.state[STARTED] = True

    def log(self, point: Point) -> None:
        self._run.log({f"{point.kind}/step": point.step, **point.metrics}, step=point.index)

    def close(self, status: str) -> None:
        self._run.finish()
