"""Contract of a command of `realsys`: one entry in the table of `realsys.launch.cli`.

A module of this package imports nothing heavy, so that `realsys --help` is fast. ``run`` imports what its command
needs. To add a command: write a module here that has COMMANDS, and put it into the table.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

NEWEST = "default: the newest trial under runs/"
TRIAL = "folder of the trial"


@dataclass(frozen=True, slots=True)
class Command:
    """A command.

    name              word after ``realsys``
    help              its line in `realsys --help`
    add               adds its arguments to its parser
    run               runs it with the parsed arguments and returns the exit code; raises RealsysError or OSError
    description       first lines of `realsys NAME --help`; empty: ``help``
    takes_overrides   True if it has the argument ``overrides``: words before and after options
    """

    name: str
    help: str
    add: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    description: str = ""
    takes_overrides: bool = False


def preload_workers(args: argparse.Namespace) -> None:
    """Fork the servers of worker processes, if this process is the command's own and will start some.

    Call it after the imports of the command, which they share, and before anything else: code of the user may start
    threads.
    """
    if args.own_process and not getattr(args, "dry_run", False) and not getattr(args, "live", False):
        from realsys.launch.nodes import preload

        preload.start()


def seconds(text: str) -> float:
    """Read a duration of more than 0 s, for argparse. Raises ArgumentTypeError."""
    return _above_zero(text, "seconds")


def hours(text: str) -> float:
    """Read a duration of more than 0 h, for argparse. Raises ArgumentTypeError."""
    return _above_zero(text, "hours")


def _above_zero(text: str, unit: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"{text!r}: must be a number of {unit} above 0")


def amount(text: str) -> float:
    """Read a number of at least 0, for argparse. Raises ArgumentTypeError."""
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"{text!r}: must be a number, 0 or more")


def count(text: str) -> int:
    """Read a whole number of at least 0, for argparse. Raises ArgumentTypeError."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number, 0 or more")
    return int(text)


def add_trial(parser: argparse.ArgumentParser) -> None:
    """Add the folder of a trial, which must be named."""
    parser.add_argument("trial_dir", type=Path, metavar="TRIAL_DIR", help=TRIAL)


def add_newest_trial(parser: argparse.ArgumentParser) -> None:
    """Add the folder of a trial, by default the newest one."""
    parser.add_argument("trial_dir", nargs="?", type=Path, metavar="TRIAL_DIR", help=NEWEST)


def add_json(parser: argparse.ArgumentParser, help: str) -> None:
    parser.add_argument("--json", action="store_true", help=help)


def add_config_dir(parser: argparse.ArgumentParser, help: str) -> None:
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help=help)
