"""`realsys status`: shows a trial from its folder and, while it runs, from its manager."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

from rich.console import Console

from realsys.config.dump import read_config
from realsys.config.paths import TrialPaths
from realsys.errors import ConfigError
from realsys.launch.screen.display import PlainView
from realsys.launch.screen.progress import Progress
from realsys.launch.screen.report import print_summary
from realsys.launch.slurm.slurm_client import SlurmError, job_state
from realsys.launch.trial_job import TrialJob, describe_job, trials_in
from realsys.telemetry.steps import StepTail

_DEFAULT_ROOT = "runs"


def show_status(trial_dir: Path | None) -> int:
    """Print the state of a trial; without a folder, of the newest one under runs/. Raises ConfigError."""
    paths = find_trial(trial_dir)
    console = Console()
    if (record := TrialJob.read(paths)) is not None:
        console.print(_job_line(record.job), highlight=False, soft_wrap=True)
        if not paths.config.exists():
            return 0
    config = read_config(paths.config)
    if paths.summary.is_file():
        try:
            print_summary(console, json.loads(paths.summary.read_text("utf-8")))
        except (ValueError, LookupError, TypeError, AttributeError) as exc:
            problem = f"cannot be read ({type(exc).__name__}: {exc}): remove it to see the step log instead"
            raise ConfigError("summary.json", str(paths.summary), problem) from None
        return 0
    from realsys.launch.screen.monitor import look_once

    progress = Progress()
    asyncio.run(look_once(config, paths, progress))
    done, total = progress.step
    since = "" if progress.phase_since is None else f" for {time.time() - progress.phase_since:.0f} s"
    state = f"phase {progress.phase}{since}, step {done}/{total}"
    if progress.address is None:
        state += "; no manager answers: the run is starting, or was killed"
    console.print(f"{config.experiment}/{config.trial}: {state}", highlight=False, soft_wrap=True)
    PlainView(console).refresh(progress, StepTail(paths.steps).records())
    return 0


def _job_line(job: str) -> str:
    try:
        return describe_job(job, job_state(job))
    except SlurmError as error:
        return f"job {job}: {error}"


def find_trial(trial_dir: Path | None) -> TrialPaths:
    """Return the paths of a trial; without a folder, of the newest one under runs/. Raises ConfigError without any."""
    if trial_dir is not None:
        paths = TrialPaths(trial_dir.resolve())
        if not any(file.exists() for file in (paths.config, paths.job, paths.lock)):
            raise ConfigError("TRIAL_DIR", str(trial_dir), "is not the folder of a trial: correct the path")
        return paths
    trials = trials_in(Path(_DEFAULT_ROOT).resolve())
    if not trials:
        raise ConfigError("TRIAL_DIR", _DEFAULT_ROOT, "has no trial: name the folder of a trial")
    return trials[0]
