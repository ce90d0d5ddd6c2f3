"""Check and plan a trial as run --dry-run does, submit it to SLURM, and follow it.

The same command again continues a trial that was stopped.

    plan ──> batch script ──sbatch──> {trial}/job/job.json ──follow──> state while it waits, screen of the run, end
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from realsys.cluster.files import FileLock
from realsys.cluster.process import own_python_path
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.errors import ConfigError
from realsys.launch.commands.run import add_run_options, run_options
from realsys.launch.prepare import examine
from realsys.launch.process_plan import agent_command
from realsys.launch.run import RunOptions, plan_run, show_plan
from realsys.launch.slurm.client import LIVES, JobWatch, SlurmError, SlurmSilent, job_state, submit
from realsys.launch.slurm.launcher import Job, job_name, render, steps_as_text
from realsys.launch.slurm.trial_job import TrialJob, describe_job, job_log
from realsys.launch.words import command_line, own_words, words_again
from realsys.observe.screen.terminal import LogTail, show_new

_EXIT_CTRL_C = 130


def add_arguments(parser: ArgumentParser) -> None:
    add_run_options(parser)
    parser.add_argument("--detach", action="store_true", help="submit the job and return")


def run(args: Namespace) -> int:
    """Submit one trial. Returns the exit code of the run, 0 with ``--detach``. Raises RealsysError."""
    options = run_options(args)
    planned = plan_run(args.overrides, options)
    config, paths = planned.config, planned.paths
    if config.cluster.launcher != "slurm":
        raise ConfigError("cluster.launcher", config.cluster.launcher, "realsys submit needs SLURM: add cluster=slurm")
    _refuse_running(paths, config)
    script = render(config, _job(args.overrides, config, paths, options))
    if args.dry_run:
        show_plan(planned)
        print(f"batch script:\n{script}")
        print(f"steps:\n{steps_as_text(config, paths, agent_command(paths, os.environ.get('PYTHONPATH', '')))}", end="")
        return 0
    examined = examine(config, paths)
    for line in (*planned.chosen, *examined.lines, *planned.placement):
        print(line)
    job = _submit(config, paths, script)
    print(f"job {job} runs trial {config.experiment}/{config.trial} in {paths.root}")
    if args.detach:
        print(_hints(paths))
        return 0
    return follow(paths, job)


def _refuse_running(paths: TrialPaths, config: Config) -> None:
    """Refuse a second job of one trial. Raises ConfigError."""
    record = TrialJob.read(paths)
    if record is None:
        return
    state = job_state(record.job)
    if state is not None and state.state in LIVES:
        stop = command_line("stop", paths.root)
        problem = f"{describe_job(record.job, state)}: stop it first ({stop}), or choose another name"
        raise ConfigError("trial", config.trial, problem)


def _job(overrides: Sequence[str], config: Config, paths: TrialPaths, options: RunOptions) -> Job:
    config_dir = options.config_dir.resolve() if options.config_dir else None
    # The plan that was checked here: the nodes of the job may show further GPUs.
    cluster = config.cluster
    planned = [f"cluster.nodes={cluster.nodes}", f"cluster.gpus_per_node={cluster.gpus_per_node}"]
    again = words_again([*overrides, *planned], config.trial, replace(options, config_dir=config_dir, plain=True))
    env = {"PYTHONPATH": own_python_path(os.environ.get("PYTHONPATH", ""))}
    return Job([*own_words(), *again], Path.cwd(), job_log(paths, "%j"), env)


def _submit(config: Config, paths: TrialPaths, script: str) -> str:
    """Write the script into the trial folder and submit it. A new folder that sbatch refuses does not stay.

    It stays if the job may have been submitted, because its run needs the folder. Raises ConfigError and SlurmError.
    """
    is_new = not paths.root.exists()
    folder = paths.job.parent
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock.take(folder / "submitting")
    if lock is None:
        raise ConfigError("trial", config.trial, "another `realsys submit` of this trial is running: wait for its end")
    try:
        is_new = is_new and not paths.lock.exists()
        _refuse_running(paths, config)  # another command may have submitted it since the first look
        paths.lock.touch()  # marks the folder as a trial that its run may fill
        path = folder / "job.sh"
        path.write_text(script, encoding="utf-8")
        job = submit(config, path)
    except SlurmSilent as error:
        raise SlurmError(f"{error}; {_unknown(config, paths)}") from None
    except KeyboardInterrupt:
        print(f"\n{_unknown(config, paths)}", file=sys.stderr)
        raise
    except BaseException:
        if is_new:
            shutil.rmtree(paths.root, ignore_errors=True)
        raise
    else:
        TrialJob.write(paths, job)
    finally:
        lock.release()
    return job


def _unknown(config: Config, paths: TrialPaths) -> str:
    look = f"look for it with squeue --name={job_name(config)} before you submit again"
    return f"the job may have been submitted: {look}; {paths.root} stays"


def _hints(paths: TrialPaths) -> str:
    follow = command_line("logs", "job", "-f", "--trial-dir", paths.root)
    return f"follow: {follow}\nstate: {command_line('status', paths.root)}\nstop: {command_line('stop', paths.root)}"


def follow(paths: TrialPaths, job: str) -> int:
    """Print the states of a job and the output of its run until it has ended. Returns the exit code of the run."""
    try:
        code = follow_job(job, LogTail(job_log(paths, job)), lambda line: print(line, flush=True))
    except KeyboardInterrupt:
        print(f"\njob {job} goes on\n{_hints(paths)}")
        return _EXIT_CTRL_C
    return 1 if code is None else code


# ---- follows a job: shows a log, and the states of the job, until it has ended. It may be queued again in between


_LOOK_S = 1.0
_SILENT_S = 600.0  # slurmctld may be down for a while: the job continues, and realsys follows it


def follow_job(job: str, tail: LogTail, say: Callable[[str], None]) -> int | None:
    """Print the new text of a log until the job has ended. ``say`` takes the states of the job, which it shows.

    Returns the exit code of the batch script, None if SLURM does not know it. Raises SlurmError if SLURM is silent.
    """
    watch, looks = JobWatch(job), _Looks()
    while not watch.ended:
        line = looks.line(watch)
        show_new(tail)  # before the line of its end
        if line:
            say(line)
        if not watch.ended:
            threading.Event().wait(_LOOK_S)  # SLURM sends no event
    show_new(tail)
    return watch.exit_code


class _Looks:
    """Looks at the state of a job, and the time of the last one that SLURM answered."""

    def __init__(self) -> None:
        self._answered = time.monotonic()

    def line(self, watch: JobWatch) -> str:
        """Return the news about the job, "" without any. Raises SlurmError if SLURM was silent for long."""
        try:
            state = job_state(watch.job)
        except SlurmError as error:
            if time.monotonic() > self._answered + _SILENT_S:
                raise
            return watch.silent(str(error))
        self._answered = time.monotonic()
        return watch.observe(state)
