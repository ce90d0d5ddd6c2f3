"""`realsys list`: the trials of a folder with their state, step and job, from any node that sees the folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from realsys.config.paths import TrialPaths
from realsys.errors import ConfigError
from realsys.launch.screen.progress import Progress
from realsys.launch.slurm.slurm_client import JobState, SlurmError, job_states
from realsys.launch.trial_job import TrialJob, trial_state, trials_in
from realsys.telemetry.steps import StepTail


def list_trials(fileroot: Path) -> int:
    """Print one row per trial, the newest first. Raises ConfigError."""
    if not fileroot.is_dir():
        raise ConfigError("FILEROOT", str(fileroot), "is not a directory: name the folder of the trials")
    trials = trials_in(fileroot.resolve())
    jobs = {paths.root: record for paths in trials if (record := _job_of(paths)) is not None}
    try:
        states = job_states(record.job for record in jobs.values())
    except SlurmError:  # not a machine of the cluster: the folders have the rest
        states = {}
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("trial", "state", "step", "job"):
        table.add_column(column, no_wrap=True)
    for row in _rows(trials, jobs, states):
        table.add_row(*row)
    Console(soft_wrap=True).print(table) if trials else print(f"{fileroot} has no trial")
    return 0


def _job_of(paths: TrialPaths) -> TrialJob | None:
    """Return the newest job of a trial. A damaged job.json must not hide the other trials."""
    try:
        return TrialJob.read(paths)
    except ConfigError:
        return TrialJob("unreadable", host="", time=0.0)


def _rows(
    trials: list[TrialPaths], jobs: Mapping[Path, TrialJob], states: Mapping[str, JobState]
) -> Iterator[tuple[str, str, str, str]]:
    for paths in trials:
        record = jobs.get(paths.root)
        state = states.get(record.job) if record is not None else None
        progress = Progress()
        progress.add(StepTail(paths.steps).records())
        done, total = progress.step
        step = f"{progress.phase} {done}/{total}" if total else ""
        name = f"{paths.root.parent.name}/{paths.root.name}"
        yield name, trial_state(paths, state), step, record.job if record is not None else ""
