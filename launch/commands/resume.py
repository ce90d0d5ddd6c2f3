"""Continue a trial that was stopped or has failed, with the settings in its folder and the changes that are given."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from datetime import datetime

from realsys.config.schema import Config
from realsys.launch.commands.options import (
    add_newest_trial,
    add_while_stdin,
    find_trial,
    preload_workers,
    stop_after_stdin,
)
from realsys.launch.prepare import resolve, stored_config
from realsys.launch.run import check_script, plan_of, run_planned


def add_arguments(parser: ArgumentParser) -> None:
    add_newest_trial(parser)
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="changes: field.path=value")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the plan, start nothing")
    parser.add_argument("--plain", action="store_true", help="one line per step instead of the live display")
    add_while_stdin(parser)


def run(args: Namespace) -> int:
    """Continue a trial. Returns the exit code. Raises RealsysError."""
    preload_workers(args)
    stop_after_stdin(args)
    trial_dir, overrides = args.trial_dir, args.overrides
    if trial_dir is not None and "=" in str(trial_dir) and not trial_dir.exists():  # the first word is an override
        trial_dir, overrides = None, [str(trial_dir), *overrides]
    config = stored_config(find_trial(trial_dir, trains=True), overrides)
    check_script(config, waits=args.while_stdin)
    planned = plan_of(resolve(config, now=datetime.now()), {*Config.model_fields})
    return run_planned(planned, dry_run=args.dry_run, plain=args.plain)
