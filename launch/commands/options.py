"""Arguments that several commands have, and the start of the fork servers. Imports nothing heavy."""

from __future__ import annotations

import argparse
import contextlib
import math
from pathlib import Path

NEWEST = "default: the newest trial under runs/"
TRIAL = "folder of the trial"


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


def add_steps(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=_steps, metavar="A:B", help="from train step A to B (default: all)")


def _steps(text: str) -> tuple[int | None, int | None]:
    """Read A:B, A:, :B or N as first and last step."""
    first, colon, last = text.partition(":")
    try:
        begin, end = (int(part) if part else None for part in (first, last if colon else first))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be A:B, A:, :B or N") from None
    return begin, end
