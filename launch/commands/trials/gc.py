"""`realsys gc`: lists what ended trials left, and removes it with --yes."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from realsys.errors import ConfigError
from realsys.launch.arguments.words import command_line
from realsys.launch.commands.trials.finding import RUNS
from realsys.launch.commands.trials.leftovers import Finder, Trial, remove


def collect_garbage(folder: Path, *, yes: bool) -> int:
    """List the leftovers of a trial, or of all trials in ``folder``; remove them if ``yes``.

    Returns 1 if something could not be removed. Raises ConfigError if there is no such folder.
    """
    if not folder.is_dir() and (RUNS / folder).is_dir():
        folder = RUNS / folder
    if not folder.is_dir():
        raise ConfigError("DIR", str(folder), "is not a directory: name a trial, or a folder of trials (fileroot)")
    console = Console(highlight=False, soft_wrap=True, markup=False)
    finder = Finder(folder, console.print)
    try:
        trials = finder.find()
        problems = [problem for trial in trials for problem in _handle(trial, console, yes=yes)]
    finally:
        finder.close()
    left = [each for trial in trials for each in trial.leftovers]
    for problem in problems:
        console.print(f"! {problem}")
    size = sum(each.size for each in left)
    if not left:
        console.print("nothing is left over")
    elif not yes:
        console.print(f"{len(left)} leftovers, {_size(size)}; to remove them: {command_line('gc', folder, '--yes')}")
    elif not problems:
        console.print(f"removed {len(left)} leftovers, {_size(size)}")
    return 1 if problems else 0


def _handle(trial: Trial, console: Console, *, yes: bool) -> list[str]:
    """Show a trial, and remove its leftovers if ``yes``. Returns the problems."""
    if trial.alone:
        console.print(f"{trial.name}: left alone: {trial.alone}")
    if not trial.leftovers:
        return []
    console.print(f"{trial.name}:")
    for leftover in trial.leftovers:
        console.print(f"  {leftover.what}{f' ({_size(leftover.size)})' if leftover.size else ''}")
    return remove(trial) if yes else []


def _size(size: int) -> str:
    """Return a number of bytes for people."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} KB"
