"""State of a trial from its folder and, while it runs, from its manager: for `realsys status`."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import deque
from dataclasses import dataclass
from typing import Any

from realsys.config.dump import read_config
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.errors import ConfigError
from realsys.launch.arguments.words import resume_command
from realsys.launch.results.report import EVALUATION_KEYS, Summary
from realsys.launch.slurm.job_watch import LIVES
from realsys.launch.slurm.slurm_client import JobState, SlurmError, job_state
from realsys.launch.trial_job import TrialJob, trial_state
from realsys.observe.events import Event, EventTail
from realsys.observe.screen.progress import Progress, Record, ask_once
from realsys.observe.screen.text_figures import memory_of
from realsys.observe.step_log import StepTail
from realsys.timeline.why import bottleneck

SHOWN_STEPS = 10
SHOWN_EVENTS = 5


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State of a trial at one moment.

    state    running, done, interrupted, failed, killed, or the state of its job
    lives    True if it runs, or its job waits or runs
    events   the newest restarts and notes
    resume   command that continues the trial; "" if it lives or is done
    """

    config: Config
    paths: TrialPaths
    state: str
    lives: bool
    progress: Progress
    events: list[Event]
    summary: Summary | None
    resume: str

    @property
    def steps(self) -> list[Record]:
        """The newest train steps, the last one last."""
        train = self.progress.train
        return list(itertools.islice(train, max(0, len(train) - SHOWN_STEPS), None))

    def as_json(self) -> dict[str, Any]:
        """Return the state as plain values (docs/cli.md)."""
        config, progress = self.config, self.progress
        done, total = progress.step
        return {
            "experiment": config.experiment,
            "trial": config.trial,
            "folder": str(self.paths.root),
            "state": self.state,
            "phase": progress.phase,
            "phase_since": progress.phase_since,
            "step": done,
            "total_steps": total,
            "model": config.model.path,
            "allocation": config.allocation,
            "engine": config.generation.backend,
            "status_page": f"{progress.address}/" if progress.address else None,
            "memory": memory_of(progress.status),
            "bottleneck": bottleneck(self.paths),
            "steps": self.steps,
            "evaluations": [{key: record.get(key) for key in EVALUATION_KEYS} for record in progress.evals.values()],
            "events": [
                {"time": event.time, "kind": event.kind, "process": event.process, "text": event.text}
                for event in self.events
            ],
            "summary": self.summary,
            "resume": self.resume or None,
        }


class Observer:
    """Reader of the state of a trial at several moments. It reads each record of the step log once."""

    def __init__(self, paths: TrialPaths) -> None:
        """Raise ConfigError for a damaged folder."""
        self._paths = paths
        self._config = read_config(paths.config)
        self._progress = Progress()
        self._steps = StepTail(paths.steps)
        self._event_tail = EventTail(paths.events)
        self._events = deque[Event](maxlen=SHOWN_EVENTS)

    def look(self) -> Snapshot:
        """Return the state now. Changes nothing in the folder. Raises ConfigError for a damaged folder."""
        paths, progress = self._paths, self._progress
        job = job_of(paths)[1]
        state = trial_state(paths, job)  # first: if the run has ended, all files are complete
        summary = read_summary(paths)
        progress.add(self._steps.records())
        if summary is None:
            asyncio.run(ask_once(self._config, paths, progress))
        self._events.extend(event for event in self._event_tail.read() if event.kind != "start")
        lives = state == "running" or _lives(job)
        resume = "" if lives or state == "done" else resume_command(paths.root)
        return Snapshot(self._config, paths, state, lives, progress, list(self._events), summary, resume)


def waiting_values(paths: TrialPaths) -> tuple[dict[str, Any], bool]:
    """Return the values of a trial whose job has not started yet, and True if the job lives."""
    job = job_of(paths)[1]
    place = {"experiment": paths.root.parent.name, "trial": paths.root.name, "folder": str(paths.root)}
    return {**place, "state": trial_state(paths, job)}, _lives(job)


def _lives(job: JobState | None) -> bool:
    return job is not None and job.state in LIVES


def read_summary(paths: TrialPaths) -> Summary | None:
    """Return the summary of a run that has ended; None without one. Raises ConfigError for a damaged file."""
    try:
        found = json.loads(paths.summary.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as exc:
        raise damaged_summary(paths, exc) from None
    if not isinstance(found, dict):
        raise damaged_summary(paths, TypeError("it must contain a JSON object"))
    return found


def damaged_summary(paths: TrialPaths, exc: Exception) -> ConfigError:
    problem = f"cannot be read ({type(exc).__name__}: {exc}): remove it to see the step log instead"
    return ConfigError("summary.json", str(paths.summary), problem)


def job_of(paths: TrialPaths) -> tuple[TrialJob | None, JobState | None]:
    """Return the newest SLURM job of a trial, and its state if SLURM tells. Raises ConfigError for a damaged file."""
    record = TrialJob.read(paths)
    if record is None:
        return None, None
    try:
        return record, job_state(record.job)
    except SlurmError:
        return record, None
