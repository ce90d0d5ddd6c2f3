"""Finds the trial that a command names."""

from __future__ import annotations

from pathlib import Path

from realsys.config.paths import TrialPaths
from realsys.errors import ConfigError
from realsys.launch.trial_job import trials_in

#: folder of the trials, unless another one is named (``fileroot``)
RUNS = Path("runs")
EVALUATIONS = "eval"  # folder of what `realsys eval` makes, in a trial or under runs/


def find_trial(trial_dir: Path | None, *, trains: bool = False) -> TrialPaths:
    """Return the paths of a trial; without a folder, of the newest one under runs/. Raises ConfigError without any.

    EXPERIMENT/TRIAL under runs/ is a trial, too. ``trains``: the newest one that is not a `realsys eval`.
    """
    if trial_dir is None:
        trials = [each for each in trials_in(RUNS.resolve()) if not trains or each.root.parent.name != EVALUATIONS]
        if not trials:
            raise ConfigError("TRIAL_DIR", str(RUNS), "has no trial: name the folder of a trial")
        return trials[0]
    for folder in (trial_dir, RUNS / trial_dir):
        paths = TrialPaths(folder.resolve())
        if any(file.exists() for file in (paths.config, paths.job, paths.lock, paths.ledger)):
            return paths
    raise ConfigError("TRIAL_DIR", str(trial_dir), "is not the folder of a trial: correct the path")
