"""Continue a trial that was stopped or has failed, with the settings in its folder and the changes that are given."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from datetime import datetime

from realsys.config.compose import with_overrides
from realsys.config.paths import TrialPaths, read_config
from realsys.config.schema import Config
from realsys.errors import ConfigError
from realsys.launch.commands.finding import find_trial
from realsys.launch.commands.options import add_newest_trial, preload_workers
from realsys.launch.prepare import resolve
from realsys.launch.run import plan_of, run_planned

_OF_THE_FOLDER = ("experiment", "trial", "fileroot", "recover")


def add_arguments(parser: ArgumentParser) -> None:
    add_newest_trial(parser)
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="changes: field.path=value")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the plan, start nothing")
    parser.add_argument("--plain", action="store_true", help="one line per step instead of the live display")


def run(args: Namespace) -> int:
    """Continue a trial. Returns the exit code. Raises RealsysError."""
    preload_workers(args)
    trial_dir, overrides = args.trial_dir, args.overrides
    if trial_dir is not None and "=" in str(trial_dir) and not trial_dir.exists():  # the first word is an override
        trial_dir, overrides = None, [str(trial_dir), *overrides]
    config = stored_config(find_trial(trial_dir, trains=True), overrides)
    planned = plan_of(resolve(config, now=datetime.now()), {*Config.model_fields})
    return run_planned(planned, dry_run=args.dry_run, plain=args.plain)


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
