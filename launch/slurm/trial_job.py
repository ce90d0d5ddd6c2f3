"""The SLURM job of a trial, as the trial folder names it, and the state of a trial that any node can read.

{trial}/job/job.json      number of the newest job, written by `realsys submit`
           /job.sh        its batch script
           /job-N.log     its output: the screen of `realsys run`
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from realsys.config.paths import TrialPaths
from realsys.errors import ConfigError
from realsys.launch.slurm.client import LIVES, WAITS, JobState
from realsys.launch.trial_folder import is_held


@dataclass(frozen=True, slots=True)
class TrialJob:
    """Number of a job, and the host and the time (unix seconds) of its submission."""

    job: str
    host: str
    time: float

    @classmethod
    def write(cls, paths: TrialPaths, job: str) -> None:
        """Record the newest job of a trial. Atomic."""
        staged = paths.job.with_suffix(".tmp")
        staged.write_text(json.dumps(asdict(cls(job, socket.gethostname(), time.time()))) + "\n", encoding="utf-8")
        os.replace(staged, paths.job)

    @classmethod
    def read(cls, paths: TrialPaths) -> TrialJob | None:
        """Return the newest job of a trial, None if it was never submitted. Raises ConfigError for a damaged file."""
        try:
            found = json.loads(paths.job.read_text("utf-8"))
            return cls(str(found["job"]), str(found["host"]), float(found["time"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, LookupError, TypeError) as exc:
            problem = f"cannot be read ({type(exc).__name__}: {exc}): remove it if its job has ended"
            raise ConfigError("job.json", str(paths.job), problem) from None


def job_log(paths: TrialPaths, job: str) -> Path:
    """Return the file with the output of a job."""
    return paths.job.with_name(f"job-{job}.log")


def describe_job(job: str, state: JobState | None) -> str:
    """Return the state of a job in words."""
    if state is None:
        return f"job {job} has ended"
    reason = f", {state.reason}" if state.reason and state.reason != "None" and state.state in WAITS else ""
    where = f" on {state.host}" if state.host and state.state in LIVES - WAITS else ""
    return f"job {job} is {state.state.lower()}{reason}{where}"


def trial_state(paths: TrialPaths, job: JobState | None) -> str:
    """Return the state of a trial in one word. ``job``: state of its newest job, if SLURM knows it."""
    if job is not None and job.state in LIVES:
        return job.state.lower()
    if is_held(paths.lock):
        return "running"
    try:
        summary = json.loads(paths.summary.read_text("utf-8"))
        return str(summary["status"])
    except FileNotFoundError:
        pass
    except (OSError, ValueError, LookupError, TypeError):
        return "unreadable"
    if paths.config.exists():
        return "killed"  # a launcher that ends writes a summary
    return "not started" if job is None else job.state.lower()


def trials_in(fileroot: Path) -> list[TrialPaths]:
    """Return the trials under ``fileroot``, the newest first."""
    found: Mapping[Path, float] = {
        path: max(file.stat().st_mtime for file in files)
        for path in fileroot.glob("*/*")
        if (files := [file for file in (TrialPaths(path).config, TrialPaths(path).job) if file.is_file()])
    }
    return [TrialPaths(path) for path in sorted(found, key=lambda path: -found[path])]
