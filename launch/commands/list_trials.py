"""Show the trials of a folder: their states, steps and results, from any node that sees the folder."""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.errors import ConfigError
from realsys.launch.commands.options import add_json
from realsys.launch.slurm.client import JobState, SlurmError, job_states
from realsys.launch.slurm.trial_job import TrialJob, trial_state, trials_in
from realsys.observe.evaluation_records import is_held_out
from realsys.observe.screen.progress import TrialProgress, number
from realsys.observe.screen.text_figures import aligned, fmt

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
#: the first ones fit 80 columns
_COLUMNS = ("trial", "state", "step", "reward", "held out", "changed", "job", "model", "allocation")
_RIGHT = ("reward", "held out", "changed")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "fileroot", nargs="?", type=Path, default=Path("runs"), metavar="FILEROOT", help="default: runs"
    )
    add_json(parser, "print a JSON list")


def run(args: Namespace) -> int:
    """Print one row per trial, the newest first. Raises ConfigError."""
    fileroot = args.fileroot
    if not fileroot.exists() and fileroot == Path(Config().fileroot):
        print("[]" if args.json else f"no trials yet in {fileroot}: realsys run experiment=arith makes one")
        return 0
    if not fileroot.is_dir():
        raise ConfigError("FILEROOT", str(fileroot), "is not a directory: name the folder of the trials")
    trials = trials_in(fileroot.resolve())
    jobs = {paths.root: record for paths in trials if (record := _job_of(paths)) is not None}
    try:
        states = job_states(record.job for record in jobs.values())
    except SlurmError:  # not a machine of the cluster: the folders have the rest
        states = {}
    rows = _rows(trials, jobs, states)
    if args.json:
        print(json.dumps(list(rows), indent=2))
    elif not trials:
        print(f"{fileroot} has no trial")
    else:
        # a column that no trial has a value for is left out
        cells = [_cells(row) for row in rows]
        columns = [name for name in _COLUMNS if any(each[name] for each in cells)]
        right = [number for number, name in enumerate(columns) if name in _RIGHT]
        print("\n".join(aligned([columns, *([each[name] for name in columns] for each in cells)], right)))
    return 0


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    done, total = row["step"], row["total_steps"]
    return {
        "trial": row["trial"],
        "state": row["state"],
        "step": (f"{row['phase']} " if row["state"] == "running" else "") + f"{done}/{total}" if total else "",
        "reward": fmt(row["reward"], "+.2f") if row["reward"] is not None else "",
        "held out": fmt(row["accuracy"], ".1%") if row["accuracy"] is not None else "",
        "model": row["model"],
        "allocation": row["allocation"],
        "changed": f"{_age(time.time() - row['changed'])} ago",
        "job": row["job"] or "",
    }


def _age(seconds: float) -> str:
    size, unit = next((size, unit) for size, unit in _UNITS if seconds >= size or size == 1)
    return f"{max(0.0, seconds) / size:.0f} {unit}"


def _job_of(paths: TrialPaths) -> TrialJob | None:
    """Return the newest job of a trial. A damaged job.json must not hide the other trials."""
    try:
        return TrialJob.read(paths)
    except ConfigError:
        return TrialJob("unreadable", host="", time=0.0)


def _rows(
    trials: list[TrialPaths], jobs: Mapping[Path, TrialJob], states: Mapping[str, JobState]
) -> Iterator[dict[str, Any]]:
    """Yield the values of each trial. ``accuracy``: of the newest complete evaluation of held-out problems."""
    for paths in trials:
        record = jobs.get(paths.root)
        progress = TrialProgress()
        progress.read(paths.steps)
        done, total = progress.step
        last = progress.train[-1] if progress.train else {}
        judged = [number(each, "accuracy") for each in progress.evals.values() if is_held_out(each)]
        judged = [value for value in judged if value is not None]
        model, allocation = _settings(paths)
        yield {
            "trial": f"{paths.root.parent.name}/{paths.root.name}",
            "folder": str(paths.root),
            "state": trial_state(paths, states.get(record.job) if record is not None else None),
            "phase": progress.phase,
            "step": done,
            "total_steps": total,
            "reward": number(last, "reward_mean"),
            "accuracy": judged[-1] if judged else None,
            "model": model,
            "allocation": allocation,
            "changed": max(file.stat().st_mtime for file in (paths.steps, paths.config, paths.job) if file.is_file()),
            "job": record.job if record is not None else None,
        }


def _settings(paths: TrialPaths) -> tuple[str, str]:
    """Return the name of the model, and the allocation. They are read as JSON: an older trial may have other fields."""
    try:
        config = json.loads(paths.config.read_text("utf-8"))
        return "/".join(Path(config["model"]["path"]).parts[-2:]) or "tiny", str(config["allocation"])
    except (OSError, ValueError, LookupError, TypeError):
        return "", ""
