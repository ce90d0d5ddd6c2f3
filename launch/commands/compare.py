"""Print the settings in which trials differ, their results, and their curves on one scale."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from rich.console import Console

from realsys.config.fields import with_present_names
from realsys.config.paths import TrialPaths
from realsys.errors import ConfigError
from realsys.launch.commands.options import find_trial
from realsys.launch.start import changes
from realsys.observe.screen.progress import number
from realsys.observe.screen.text_figures import aligned, fmt, scale_of, sparkline
from realsys.observe.step_log import surviving_steps
from realsys.observe.totals import Totals, curve_points

_WIDTH = 40  # characters of a curve
#: settings that say where a trial is, not what it does
_PLACE = ("trial", "fileroot", "recover", "resume")
_CURVES = {
    "reward_mean": "reward",
    "accuracy": "accuracy",
    "length_mean": "length",
    "stale_mean": "staleness",
}
_VALUE = 24  # characters of a setting


@dataclass(frozen=True, slots=True)
class Compared:
    """One of the trials. ``settings``: config.json as it is, because an older trial may have other fields."""

    name: str
    settings: Mapping[str, Any]
    totals: Totals
    points: Sequence[Mapping[str, float]]

    @classmethod
    def read(cls, paths: TrialPaths, name: str) -> Compared:
        try:
            settings = with_present_names(json.loads(paths.config.read_text("utf-8")))
        except (OSError, ValueError) as exc:
            raise ConfigError("config.json", str(paths.config), f"cannot be read: {exc}") from None
        if not isinstance(settings, dict):
            raise ConfigError("config.json", str(paths.config), "must contain a JSON object: restore it from a copy")
        totals = Totals.of(surviving_steps(paths.steps))
        return cls(name, settings, totals, list(curve_points(surviving_steps(paths.steps), totals.steps)))


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("trial_dirs", nargs="+", type=Path, metavar="TRIAL_DIR", help="two or more folders of trials")


def run(args: Namespace) -> int:
    """Print the comparison of two or more trials. Raises ConfigError."""
    return compare_trials(args.trial_dirs)


#: row of the table -> how it is read and shown
_NUMBERS: dict[str, Callable[[Compared], str]] = {
    "steps": lambda trial: str(trial.totals.steps),
    "held out, before": lambda trial: _evaluated(trial, "before"),
    "held out, after": lambda trial: _evaluated(trial, "after"),
    "s per step": lambda trial: fmt(trial.totals.seconds["total"].value, ".2f"),
    "s of it waiting": lambda trial: fmt(trial.totals.seconds["wait"].value, ".2f"),
    "tokens/s in training": lambda trial: fmt(trial.totals.tokens_per_s.value, ",.0f"),
    "staleness, mean": lambda trial: fmt(trial.totals.staleness.value, ".2f"),
    "staleness, max": lambda trial: fmt(trial.totals.most_stale, ".0f"),
    "tokens too old": lambda trial: fmt(trial.totals.too_old.value, ".1%"),
    "completion tokens": lambda trial: f"{trial.totals.answer_tokens:,.0f}",
    "recoveries": lambda trial: str(trial.totals.recoveries),
}


def compare_trials(folders: Sequence[Path]) -> int:
    """Print the comparison of two or more trials. Raises ConfigError."""
    if len(folders) < 2:
        raise ConfigError("TRIAL_DIR", str(folders[0]), "is one trial: name two or more")
    found = [find_trial(folder) for folder in folders]
    trials = [
        Compared.read(paths, ascii_uppercase[number % 26] + (str(number // 26 + 1) if number >= 26 else ""))
        for number, paths in enumerate(found)
    ]
    console = Console(highlight=False, soft_wrap=True, markup=False)
    for trial, paths in zip(trials, found, strict=True):
        console.print(f"{trial.name}  {paths.root.parent.name}/{paths.root.name}  {paths.root}")
    console.print()
    first = trials[0].settings
    differing = dict.fromkeys(
        change.field for other in trials[1:] for change in changes(first, other.settings) if change.field not in _PLACE
    )
    rows = {field: [_shown(_at(trial.settings, field)) for trial in trials] for field in differing}
    if rows:
        _print_table(console, "setting", rows, trials)
    else:
        console.print("the settings are equal\n")
    _print_table(console, "", {name: [show(trial) for trial in trials] for name, show in _NUMBERS.items()}, trials)
    # each curve of all trials on one scale; equal columns are equal steps
    longest = max(trial.totals.steps for trial in trials)
    for field, title in _CURVES.items():
        values = [[point[field] for point in trial.points if field in point] for trial in trials]
        if not any(len(each) > 1 for each in values):
            continue
        low, high = scale_of([value for each in values for value in each])
        console.print(f"{title}, {low:g} to {high:g}")
        for trial, each in zip(trials, values, strict=True):
            width = max(2, round(_WIDTH * trial.totals.steps / longest))
            last = f"{each[-1]:.3g}" if each else "-"
            console.print(f"  {trial.name}  {sparkline(each, low, high, width):<{_WIDTH}}  {last}")
    return 0


def _print_table(console: Console, title: str, rows: Mapping[str, Sequence[str]], trials: Sequence[Compared]) -> None:
    """Print one row per name and one column per trial. Rows in which no trial has a value are left out."""
    head = [title, *(trial.name for trial in trials)]
    known = [[name, *values] for name, values in rows.items() if any(value not in ("-", "") for value in values)]
    console.print("\n".join(aligned([head, *known], range(1, len(head)))) + "\n")


def _evaluated(trial: Compared, name: str) -> str:
    return fmt(number(trial.totals.evals.get(name, {}), "accuracy"), ".1%")


def _shown(value: Any) -> str:
    """Return a setting as text; "" if a trial does not have it, because an older build made it."""
    text = "" if value is None else value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _VALUE else f"{text[: _VALUE - 1]}…"


def _at(tree: Any, field: str) -> Any:
    for part in field.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree
