"""Show a trial from its folder and, while it runs, from its manager."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections import deque
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from realsys.cluster.aio import run_beside
from realsys.config.paths import TrialPaths, read_config
from realsys.config.schema import Config
from realsys.errors import ConfigError
from realsys.launch.commands.options import add_json, add_newest_trial, find_trial, seconds
from realsys.launch.conclude import EVALUATION_KEYS, Summary, print_summary
from realsys.launch.slurm.client import LIVES, JobState, SlurmError, job_state
from realsys.launch.slurm.trial_job import TrialJob, describe_job, trial_state
from realsys.launch.trial_folder import is_held
from realsys.launch.words import resume_command
from realsys.observe.screen.display import View, make_view
from realsys.observe.screen.plain import PlainView, ServiceView, eval_line
from realsys.observe.screen.progress import Monitor, Record, TrialProgress, ask_once
from realsys.observe.screen.text_figures import memory_of, memory_text
from realsys.observe.step_log import Event, EventTail, StepTail
from realsys.observe.timeline.why import bottleneck

_LOOK_S = 1.0  # seconds between two checks for events and for the end of the trial


def add_arguments(parser: ArgumentParser) -> None:
    add_newest_trial(parser)
    add_json(parser, "print one JSON object (docs/observe.md)")
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_watch_seconds,
        const=5.0,
        metavar="S",
        help="show it until the run ends; with --json, a line every S seconds (default: 5)",
    )


def _watch_seconds(text: str) -> float:
    try:
        return seconds(text)
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f"{error}; the trial is named before --watch") from None


def run(args: Namespace) -> int:
    """Print the state of a trial. Raises ConfigError."""
    paths = find_trial(args.trial_dir)
    if args.json:
        _print_json(paths, args.watch)
        return 0
    console = Console()
    if (record := TrialJob.read(paths)) is not None:
        console.print(_job_line(record.job), highlight=False, soft_wrap=True)
        if not paths.config.exists():
            return 0
    if args.watch is not None and is_held(paths.lock):
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_watch(console, paths))
    _print(console, Observer(paths).look())
    return 0


def _print_json(paths: TrialPaths, watch_s: float | None) -> None:
    """Print the state as one JSON object; with ``watch_s``, as one line until the run has ended."""
    observer: Observer | None = None
    while True:
        if observer is None and (paths.config.exists() or TrialJob.read(paths) is None):
            observer = Observer(paths)
        if observer is None:
            job = job_of(paths)[1]
            place = {"experiment": paths.root.parent.name, "trial": paths.root.name, "folder": str(paths.root)}
            values, lives = {**place, "state": trial_state(paths, job)}, _lives(job)
        else:
            snapshot = observer.look()
            values, lives = snapshot.as_json(), snapshot.lives
        print(json.dumps(values, indent=2 if watch_s is None else None), flush=True)
        if watch_s is None or not lives:
            return
        time.sleep(watch_s)


async def _watch(console: Console, paths: TrialPaths) -> None:
    """Show a running trial as its launcher does, until the run has ended or the user leaves with Ctrl-C."""
    config = read_config(paths.config)
    progress, tail, events = TrialProgress(), StepTail(paths.steps), EventTail(paths.events)
    progress.add(tail.records())
    events.read()  # only what happens from now on
    with make_view(console, config, paths, plain=False) as view:
        # Warnings come from the events: the monitor of the launcher has written them.
        monitor = Monitor(config, paths, progress, view, tail, lambda _: None)
        await run_beside(_until_end(paths, events, view), monitor.run())


async def _until_end(paths: TrialPaths, events: EventTail, view: View) -> None:
    """Show the events of a run until no process holds its lock."""
    while is_held(paths.lock):
        for event in events.read():
            view.note(event.text)
        await asyncio.sleep(_LOOK_S)


def _print(console: Console, snapshot: TrialSnapshot) -> None:
    """Print the end of a run, or how far it is: the last steps, the evaluations, the last restarts."""
    paths, progress = snapshot.paths, snapshot.progress

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    if snapshot.summary is not None:
        try:
            print_summary(console, snapshot.summary)
        except (ValueError, LookupError, TypeError, AttributeError) as exc:
            raise damaged_summary(paths, exc) from None
        logged = progress.step[0] if progress.train else 0
        if logged < snapshot.summary["steps"]:
            had = snapshot.summary["steps"]
            say(f"! {paths.steps} was cut off: it has {logged} of {had} steps: restore it from a copy")
    else:
        done, total = progress.step
        is_running = snapshot.state == "running" and progress.phase_since is not None
        since = f" for {time.time() - (progress.phase_since or 0.0):.0f} s" if is_running else ""
        name = f"{snapshot.config.experiment}/{snapshot.config.trial}"
        what = f", {'step' if progress.train else 'warm-up step'} {done}/{total}" if total else ""
        say(f"{name}: {snapshot.state}, phase {progress.phase}{since}{what}")
        if snapshot.state == "running" and progress.address is None:
            say("no manager answers: the run is starting or ending")
        (ServiceView if snapshot.config.is_service else PlainView)(console).refresh(progress, snapshot.steps)
        for record in progress.evals.values():
            say(eval_line(record))
        if limit := bottleneck(paths):
            say(limit)
        if memory := memory_text(progress.status):
            say(f"memory: {memory}")
        for event in snapshot.events:
            say(f"! {time.strftime('%H:%M:%S', time.localtime(event.time))} {event.text}")
    if snapshot.resume:
        say(f"to continue: {snapshot.resume}")


def _job_line(job: str) -> str:
    try:
        return describe_job(job, job_state(job))
    except SlurmError as error:
        return f"job {job}: {error}"


# ---- state of a trial from its folder and, while it runs, from its manager: for `realsys status`


SHOWN_STEPS = 10
SHOWN_EVENTS = 5


@dataclass(frozen=True, slots=True)
class TrialSnapshot:
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
    progress: TrialProgress
    events: list[Event]
    summary: Summary | None
    resume: str

    @property
    def steps(self) -> list[Record]:
        """The newest train steps, the last one last."""
        train = self.progress.train
        return list(itertools.islice(train, max(0, len(train) - SHOWN_STEPS), None))

    def as_json(self) -> dict[str, Any]:
        """Return the state as plain values (docs/observe.md)."""
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
        self._progress = TrialProgress()
        self._steps = StepTail(paths.steps)
        self._event_tail = EventTail(paths.events)
        self._events = deque[Event](maxlen=SHOWN_EVENTS)

    def look(self) -> TrialSnapshot:
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
        session = self._config.train.loop == "session"
        resume = "" if lives or state == "done" else resume_command(paths.root, session=session)
        return TrialSnapshot(self._config, paths, state, lives, progress, list(self._events), summary, resume)


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
    model = str(paths.final_model) if paths.final_model.is_dir() else None
    return {**found, "folder": str(paths.root), "model": model}  # the folder may have been moved or copied


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
