"""`realsys resume`: continues a trial with the configuration in its folder, and the changes that are given."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from realsys.config.compose import with_overrides
from realsys.config.dump import read_config
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.errors import ConfigError
from realsys.launch.commands.finding import find_trial
from realsys.launch.prepare import resolve
from realsys.launch.run import plan_of, run_planned

_OF_THE_FOLDER = ("experiment", "trial", "fileroot", "recover")


def resume_trial(trial_dir: Path | None, overrides: Sequence[str], *, dry_run: bool, plain: bool) -> int:
    """Continue a trial, the newest one without a folder. Returns the exit code. Raises RealsysError."""
    config = stored_config(find_trial(trial_dir, trains=True), overrides)
    planned = plan_of(resolve(config, now=datetime.now()), {*Config.model_fields})
    return run_planned(planned, dry_run=dry_run, plain=plain)


def stored_config(paths: TrialPaths, overrides: Sequence[str]) -> Config:
    """Return the configuration of a trial with ``overrides``. A folder that was moved keeps its trial.

    Raises ConfigError.
    """
    for name in (text.partition("=")[0].lstrip("+") for text in overrides):
        if name in _OF_THE_FOLDER:
            raise ConfigError(name, "", "belongs to the folder of the trial: leave it out, or use realsys run")
    config = with_overrides(read_config(paths.config), overrides)
    if (config.experiment, config.trial) != (paths.root.parent.name, paths.root.name):
        problem = f"is trial {config.experiment}/{config.trial}: give its folder this name again"
        raise ConfigError("TRIAL_DIR", str(paths.root), problem)
    recover = "resume" if config.recover == "off" else config.recover
    return config.model_copy(update={"fileroot": str(paths.root.parent.parent), "recover": recover})
