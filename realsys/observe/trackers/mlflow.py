"""Tracker ``mlflow``: a run of MLflow. ``tracker_args``: tracking_uri, experiment, tags.

Without ``tracking_uri`` and MLFLOW_TRACKING_URI, the run is in ``mlflow.db`` in the folder of the trial. MLflow keeps
every value that it got: after a roll-back a step has two.
"""

from __future__ import annotations

import importlib
import os
import re
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from realsys.observe.step_fields import CURVES
from realsys.observe.trackers.contract import Point, Run, Tracker

RUN_ID = "run_id"  # entry of ``Run.state``: the run has its parameters
START = "start"  # entry of ``Run.state``, and tag of the run: it may exist, if the start of the tracker failed
_START_TAG = "realsys.start"
_ENDS = {"done": "FINISHED", "failed": "FAILED"}
_MOST_METRICS = 1000  # metrics in one request
_MOST_PARAMETERS = 100
_LONGEST = 6000  # characters of a parameter's value
_LONGEST_NAME = 250
#: MLflow refuses the whole request for one such name: another character, an empty part of a path
_NOT_IN_NAMES = re.compile(r"[^\w./ :-]|/(?=/|$)")


class MlflowTracker(Tracker):
    """One run of MLflow for the trial, over all of its starts."""

    package = "mlflow"
    install = "realsys[mlflow]"

    def __init__(self, run: Run, tracking_uri: str = "", experiment: str = "", tags: Mapping[str, str] = {}) -> None:
        super().__init__(run)
        self._entities: Any = importlib.import_module("mlflow.entities")
        uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.folder / 'mlflow.db'}"
        self._client: Any = importlib.import_module("mlflow.tracking").MlflowClient(tracking_uri=uri)
        if run_id := run.state.get(RUN_ID):
            self._id = run_id
            self._client.update_run(self._id, "RUNNING")
        else:
            self._id = run.state[RUN_ID] = self._begin(experiment or run.experiment, tags)
        self._since = {kind: self._last(kind) for kind in CURVES} if run_id else {}

    def log(self, point: Point) -> None:
        stamp = int(point.time * 1000)
        if stamp <= self._since.get(point.kind, 0):
            return  # delivered before, and not noted
        values = {f"{point.kind}/step": float(point.step), **point.metrics}
        metrics = [self._entities.Metric(_named(name), value, stamp, point.step) for name, value in values.items()]
        for first in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[first : first + _MOST_METRICS])

    def close(self, status: str) -> None:
        self._client.set_terminated(self._id, _ENDS.get(status, "KILLED"))

    def _begin(self, experiment: str, tags: Mapping[str, str]) -> str:
        """Make the run, with the configuration as its parameters. Returns its id.

        If a start failed in here, its run is continued: else it would stay in MLflow without any curve.
        """
        found = self._client.get_experiment_by_name(experiment)
        number = found.experiment_id if found else self._client.create_experiment(experiment)
        run = self._left_by_a_start(number) or self._new_run(number, tags)
        had = run.data.params  # MLflow refuses another value for one of them
        texts = {_named(name): text[:_LONGEST] for name, text in _flat(self.run.config)}
        parameters = [self._entities.Param(name, text) for name, text in texts.items() if name not in had]
        for first in range(0, len(parameters), _MOST_PARAMETERS):
            self._client.log_batch(run.info.run_id, params=parameters[first : first + _MOST_PARAMETERS])
        return str(run.info.run_id)

    def _left_by_a_start(self, experiment: str) -> Any:
        """Return the run that a failed start of this tracker made; None without one."""
        if (start := self.run.state.get(START)) is None:
            return None
        found = self._client.search_runs([experiment], f"tags.`{_START_TAG}` = '{start}'", max_results=1)
        return found[0] if found else None

    def _new_run(self, experiment: str, tags: Mapping[str, str]) -> Any:
        start = self.run.state.setdefault(START, uuid.uuid4().hex)  # before the call: MLflow may make the run and fail
        own = {_START_TAG: start, "realsys.folder": str(self.run.folder), "realsys.version": self.run.version}
        return self._client.create_run(experiment, run_name=self.run.trial, tags={**tags, **own})

    def _last(self, kind: str) -> int:
        """Return the time of the newest point of ``kind`` that MLflow has, in unix milliseconds."""
        stamps = (value.timestamp for value in self._client.get_metric_history(self._id, f"{kind}/step"))
        return max(stamps, default=0)


def _named(name: str) -> str:
    """Return ``name`` as MLflow takes it: metrics of users and data sets may have any name."""
    return _NOT_IN_NAMES.sub("_", name)[:_LONGEST_NAME]


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        elif value not in ("", None, [], {}):
            yield f"{prefix}{key}", str(value)
