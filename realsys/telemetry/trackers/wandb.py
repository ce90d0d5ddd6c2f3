"""Tracker ``wandb``: Weights & Biases. ``tracker_args`` are arguments of ``wandb.init``: project, entity, mode, ...

W&B numbers the rows of a run in ascending order and cannot take one back. So a row's number is the point's index, and
charts use ``train/step``, ``eval/step`` or ``warmup/step`` as their axis. After a roll-back both branches are shown.
"""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Mapping
from typing import Any

from realsys.telemetry.points import CURVES
from realsys.telemetry.trackers.base import Point, Run, Tracker
from realsys.telemetry.trackers.signature import argument_problem
from realsys.telemetry.trackers.wandb_key import key_problem

RUN_ID = "run_id"  # entry of ``Run.state``


class WandbTracker(Tracker):
    """One run of W&B for the trial, over all of its starts."""

    package = "wandb"
    install = "realsys[wandb]"

    @classmethod
    def problem(cls, arguments: Mapping[str, Any]) -> str:
        return argument_problem("wandb", "sdk/wandb_init.py", arguments, ("id", "resume")) or key_problem(arguments)

    def __init__(self, run: Run, **arguments: Any) -> None:
        super().__init__(run)
        self._wandb: Any = importlib.import_module("wandb")
        run_id = run.state.setdefault(RUN_ID, f"{run.trial}-{uuid.uuid4().hex[:8]}")
        settings = {"console": "off", "silent": True, "disable_git": True, "x_disable_meta": True}
        self._run: Any = self._wandb.init(
            **{
                "project": run.experiment,
                "name": run.trial,
                "config": {**run.config, "realsys_version": run.version},
                "dir": str(run.folder),
                **arguments,
                "id": run_id,
                "resume": "allow",
                "settings": self._wandb.Settings(**{**settings, **arguments.get("settings", {})}),
            }
        )
        for kind in CURVES:
            self._run.define_metric(f"{kind}/step")
            self._run.define_metric(f"{kind}/*", step_metric=f"{kind}/step")

    def log(self, point: Point) -> None:
        # A point that is delivered twice has an old number, which W&B ignores.
        self._run.log({f"{point.kind}/step": point.step, **point.metrics}, step=point.index)

    def close(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "done" else 1)
        self._wandb.teardown()  # `finish` returns before the process of W&B has written its file
