"""`realsys status`: shows a trial from its folder and, while it runs, from its manager."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from pathlib import Path

from rich.console import Console

from realsys.cluster.aio import run_beside
from realsys.config.dump import read_config
from realsys.config.paths import TrialPaths
from realsys.launch.commands.trials.finding import find_trial
from realsys.launch.commands.trials.snapshot import Observer, Snapshot, damaged_summary, waiting_values
from realsys.launch.lock import is_held
from realsys.launch.results.report import print_summary
from realsys.launch.slurm.slurm_client import SlurmError, job_state
from realsys.launch.trial_job import TrialJob, describe_job
from realsys.observe.events import EventTail
from realsys.observe.screen.display import View, make_view
from realsys.observe.screen.plain import PlainView, eval_line
from realsys.observe.screen.progress import Monitor, Progress
from realsys.observe.screen.text_figures import memory_text
from realsys.observe.step_log import StepTail
from realsys.timeline.why import bottleneck

_LOOK_S = 1.0  # seconds between two checks for events and for the end of the trial


def show_status(trial_dir: Path | None, *, as_json: bool = False, watch_s: float | None = None) -> int:
    """Print the state of a trial; without a folder, of the newest one under runs/. Raises ConfigError.

    ``watch_s``: show it until the run has ended; as JSON, one line after each ``watch_s`` seconds.
    """
    paths = find_trial(trial_dir)
    if as_json:
        _print_json(paths, watch_s)
        return 0
    console = Console()
    if (record := TrialJob.read(paths)) is not None:
        console.print(_job_line(record.job), highlight=False, soft_wrap=True)
        if not paths.config.exists():
            return 0
    if watch_s is not None and is_held(paths.lock):
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
            values, lives = waiting_values(paths)
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
    progress, tail, events = Progress(), StepTail(paths.steps), EventTail(paths.events)
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


def _print(console: Console, snapshot: Snapshot) -> None:
    """Print the end of a run, or how far it is: the last steps, the evaluations, the last restarts."""
    paths, progress = snapshot.paths, snapshot.progress

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    if snapshot.summary is not None:
        try:
            print_summary(console, snapshot.summary)
        except (ValueError, LookupError, TypeError, AttributeError) as exc:
            raise damaged_summary(paths, exc) from None
    else:
        done, total = progress.step
        is_running = snapshot.state == "running" and progress.phase_since is not None
        since = f" for {time.time() - (progress.phase_since or 0.0):.0f} s" if is_running else ""
        name = f"{snapshot.config.experiment}/{snapshot.config.trial}"
        what = f", {'step' if progress.train else 'warm-up step'} {done}/{total}" if total else ""
        say(f"{name}: {snapshot.state}, phase {progress.phase}{since}{what}")
        if snapshot.state == "running" and progress.address is None:
            say("no manager answers: the run is starting or ending")
        PlainView(console).refresh(progress, snapshot.steps)
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
