"""Checks the trackers of a run before it starts. Imports their modules, and none of their libraries."""

from __future__ import annotations

from importlib.util import find_spec

from realsys.config.doors import TRACKER
from realsys.config.schema import Config
from realsys.errors import ConfigError

FIELD = "telemetry.trackers"


def check_trackers(config: Config) -> None:
    """Raise ConfigError for an unknown tracker, wrong arguments, a package that is not installed, or a missing key."""
    telemetry = config.telemetry
    for name in telemetry.trackers:
        if telemetry.trackers.count(name) > 1:
            raise ConfigError(FIELD, telemetry.trackers, f"names {name!r} twice: remove one of them")
        TRACKER.check(name, telemetry.tracker_args.get(name))
        tracker = TRACKER.load(name)
        if tracker.package and find_spec(tracker.package) is None:
            problem = f"needs the package {tracker.package}: pip install '{tracker.install or tracker.package}'"
            raise ConfigError(FIELD, name, problem)
        with TRACKER.guard(name, "cannot be checked"):
            problem = tracker.problem(telemetry.tracker_args.get(name, {}))
        if problem:
            raise ConfigError(FIELD, name, problem)
    if unused := [name for name in telemetry.tracker_args if name not in telemetry.trackers]:
        problem = f"names {unused[0]!r}, which is not in {FIELD}: add it there, or remove its arguments"
        raise ConfigError("telemetry.tracker_args", telemetry.tracker_args, problem)
