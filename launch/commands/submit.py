"""`realsys submit`: checks and plans a trial as a dry run does, and runs it as a SLURM job.

plan ──> batch script ──sbatch──> {trial}/job/job.json ──follow──> state while it waits, screen of the run, end
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.errors import ConfigError
from realsys.launch.arguments.words import command_line, own_words, words_again
from realsys.launch.launchers.slurm import steps_as_text
from realsys.launch.prepare import examine
from realsys.launch.process_plan import agent_command, own_python_path
from realsys.launch.run import RunOptions, plan_run, show_plan
from realsys.launch.slurm.job_follow import follow_job
from realsys.launch.slurm.job_script import Job, job_name, render
from realsys.launch.slurm.job_watch import LIVES
from realsys.launch.slurm.slurm_client import SlurmError, SlurmSilent, job_state, submit
from realsys.launch.trial_job import TrialJob, describe_job, job_log
from realsys.observe.screen.terminal import LogTail
from realsys.storage.file_lock import FileLock

_EXIT_CTRL_C = 130


@dataclass(frozen=True, slots=True)
class SubmitOptions:
    """Options besides those of a run. ``detach``: do not follow the job."""

    run: RunOptions
    detach: bool = False


def submit_trial(overrides: Sequence[str], options: SubmitOptions) -> int:
    """Submit one trial. Returns the exit code of the run, 0 with ``detach``. Raises RealsysError."""
    planned = plan_run(overrides, options.run)
    config, paths = planned.config, planned.paths
    if config.cluster.launcher != "slurm":
        raise ConfigError("cluster.launcher", config.cluster.launcher, "realsys submit needs SLURM: add cluster=slurm")
    _refuse_running(paths, config)
    script = render(config, _job(overrides, config, paths, options.run))
    if options.run.dry_run:
        show_plan(planned)
        print(f"batch script:\n{script}")
        print(f"steps:\n{steps_as_text(config, paths, agent_command(paths, os.environ.get('PYTHONPATH', '')))}", end="")
        return 0
    examined = examine(config, paths)
    for line in (*planned.chosen, *examined.lines, *planned.placement):
        print(line)
    job = _submit(config, paths, script)
    print(f"job {job} runs trial {config.experiment}/{config.trial} in {paths.root}")
    if options.detach:
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
