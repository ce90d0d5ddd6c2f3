"""Arguments that several commands have, the start of the fork servers, and the trial that a command names.

Imports nothing heavy: `realsys COMMAND --help` imports this module.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import math
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from realsys.config.paths import TrialPaths

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


# ---- the trial that a command names

#: folder of the trials, unless another one is named (``fileroot``)
RUNS = Path("runs")
EVALUATIONS = "eval"  # folder of what `realsys eval` makes, in a trial or under runs/


def find_trial(trial_dir: Path | None, *, trains: bool = False) -> TrialPaths:
    """Return the paths of a trial; without a folder, of the newest one under runs/. Raises ConfigError without any.

    EXPERIMENT/TRIAL under runs/ is a trial, too. ``trains``: the newest one that is not a `realsys eval`.
    """
    from realsys.errors import ConfigError
    from realsys.launch.slurm.trial_job import trials_in

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
    from realsys.config.paths import TrialPaths

    for folder in (trial_dir, RUNS / trial_dir):
        paths = TrialPaths(folder.resolve())
        if any(file.exists() for file in (paths.config, paths.job, paths.lock, paths.ledger)):
            return paths
    return None


# ---- the end of the process that started the command


def add_while_stdin(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--while-stdin", action="store_true", help="stop when stdin is closed: its writer has ended")


def stop_after_stdin(args: argparse.Namespace) -> None:
    """With ``--while-stdin``, stop the run as SIGTERM does when stdin ends: then its writer is gone, killed or not."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    if args.while_stdin:
        threading.Thread(target=wait, daemon=True).start()
