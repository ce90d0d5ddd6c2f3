"""Run a trial, on this machine or over several (cluster.nodes): make its folder, start its processes, show it, report.

The same command again continues a trial that was stopped or died.

    words ──> RunOptions, overrides ──realsys.launch.run──> the trial's exit code

Imports nothing heavy: its help is what a new user reads first.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from realsys.launch.commands.options import add_config_dir, add_while_stdin, preload_workers, stop_after_stdin

if TYPE_CHECKING:
    from realsys.launch.run import RunOptions


def add_arguments(parser: ArgumentParser) -> None:
    add_run_options(parser)
    parser.add_argument("--plain", action="store_true", help="one line per step instead of the live display")
    add_while_stdin(parser)


def add_run_options(parser: ArgumentParser) -> None:
    """Add the arguments that ``RunOptions`` reads, but for ``--plain``."""
    parser.add_argument(
        "overrides", nargs="*", metavar="OVERRIDE", help="experiment=NAME, group=OPTION or field.path=value"
    )
    parser.add_argument("--trial", metavar="NAME", help="name of the trial (default: date and time)")
    add_config_dir(parser, "your configuration files (DIR/experiment/*.yaml)")
    parser.add_argument(
        "--dry-run", action="store_true", help="check settings, data, model and machine, print the plan, start nothing"
    )


def run_options(args: Namespace) -> RunOptions:
    """Return what ``add_run_options`` read. Without ``--plain`` in the arguments, lines are plain."""
    from realsys.launch.run import RunOptions

    return RunOptions(
        args.trial, args.config_dir, args.dry_run, getattr(args, "plain", True), getattr(args, "while_stdin", False)
    )


def run(args: Namespace) -> int:
    """Run one trial and return the exit code. Raises RealsysError for bad input."""
    from realsys.launch.run import plan_run, run_planned

    preload_workers(args)
    stop_after_stdin(args)
    return run_planned(plan_run(args.overrides, run_options(args)), dry_run=args.dry_run, plain=args.plain)
