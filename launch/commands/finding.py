"""Finds the trial that a command names."""

from __future__ import annotations

import difflib
from pathlib import Path

from realsys.config.paths import TrialPaths
from realsys.errors import ConfigError
from realsys.launch.slurm.trial_job import trials_in

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
    if (paths := _trial_at(trial_dir)) is not None:
        return paths
    names = [f"{each.root.parent.name}/{each.root.name}" for each in trials_in(RUNS.resolve())]
    near = difflib.get_close_matches(str(trial_dir), names, n=3)
    remedy = f"did you mean {' or '.join(near)}?" if near else "correct the path"
    raise ConfigError("TRIAL_DIR", str(trial_dir), f"is not the folder of a trial: {remedy}")


def is_trial(name: str) -> bool:
    """Return True if ``name`` is the folder of a trial, or EXPERIMENT/TRIAL under runs/."""
    return _trial_at(Path(name)) is not None


def _trial_at(trial_dir: Path) -> TrialPaths | None:
    for folder in (trial_dir, RUNS / trial_dir):
        paths = TrialPaths(folder.resolve())
        if any(file.exists() for file in (paths.config, paths.job, paths.lock, paths.ledger)):
            return paths
    return None
