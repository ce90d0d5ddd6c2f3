"""The section ``telemetry``: trackers of metrics, and the timeline (docs/trackers.md, docs/timeline.md)."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from realsys.config.fields import NonNegativeFloat, Positive, Section


class TelemetryConfig(Section):
    """Trackers that get the metrics of a run, its curves, and the timeline of its processes."""

    trackers: list[str] = Field(
        ["file", "tensorboard"],
        description="where the launcher writes the metrics of the step log: file, tensorboard, wandb, mlflow, trackio,"
        " or package.module:Class",
    )
    tracker_args: dict[str, dict[str, Any]] = Field({}, description="name of a tracker -> its keyword arguments")
    tracker_finish_s: Positive = Field(
        10, description="seconds that the trackers have at the end of a run to deliver what is left"
    )
    curves_every_s: NonNegativeFloat = Field(
        300.0,
        description="seconds between two drawings of curves.png while the run lasts, in a process of the lowest"
        " priority; one more is made at its end. 0: none",
    )
    spans: bool = Field(True, description="write the timeline of every process, which `realsys trace` and `why` read")
    span_mib: Positive = Field(
        32, description="size in MiB of the timeline of one process; the oldest spans are removed"
    )
