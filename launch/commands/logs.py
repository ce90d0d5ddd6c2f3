"""Show the log of a process, or list the logs of a trial, from any node that sees the folder."""

from __future__ import annotations

import re
import sys
import threading
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import get_args

from realsys.config.device_plan import Kind
from realsys.config.paths import TrialPaths
from realsys.errors import ConfigError
from realsys.launch.commands.options import NEWEST, count, find_trial, is_trial
from realsys.launch.slurm.client import is_here
from realsys.launch.slurm.submit import follow_job
from realsys.launch.slurm.trial_job import TrialJob, job_log
from realsys.launch.trial_folder import is_held
from realsys.observe.screen.terminal import LogTail, show_new

JOB = "job"
_LOOK_S = 0.5
#: names of logs that a run may still write
_NAMES = re.compile(rf"srun|({'|'.join((*get_args(Kind), 'agent'))})/\d+(\.\d+)?")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "process", nargs="?", metavar="PROCESS", help="model_worker/0, ..., or job: the screen of a job; or a trial"
    )
    parser.add_argument("--trial-dir", type=Path, metavar="DIR", help=NEWEST)
    parser.add_argument("-n", "--lines", type=count, default=50, metavar="N", help="last lines (default: %(default)s)")
    parser.add_argument("-f", "--follow", action="store_true", help="show new lines until the run ends")


def run(args: Namespace) -> int:
    """Show the end of one log, or the list of logs.

    With ``--follow`` until the trial has ended; its job may still wait, or be queued again. Raises ConfigError,
    SlurmError.
    """
    trial_dir, process = args.trial_dir, args.process
    if trial_dir is None and process is not None and is_trial(process):
        trial_dir, process = Path(process), None  # as for the other commands, the first word may be a trial
    paths = find_trial(trial_dir)
    logs = _logs(paths)
    if process is None:
        _list(paths, logs)
        return 0
    path = logs.get(process) or (_path_of(paths, process) if args.follow else None)
    if path is None:
        raise _unknown(paths, process)
    tail = LogTail(path)
    tail.skip_to_last(args.lines)
    show_new(tail)
    if args.follow:
        if not path.is_file():
            _say(f"{process} has no log yet: waiting for {path}")
        # show new text until no job and no launcher of the trial is left
        record, answers = TrialJob.read(paths), is_here()
        if record is not None and answers:
            follow_job(record.job, tail, _say)
        elif record is not None:
            _say(f"the state of job {record.job} is not known here, where SLURM's programs are not on the PATH")
        while is_held(paths.lock) or (record is not None and not answers and not paths.summary.is_file()):
            threading.Event().wait(_LOOK_S)  # a file sends no event
            show_new(tail)
        show_new(tail)
        if not path.is_file():
            raise _unknown(paths, process)
    return 0


def _say(line: str) -> None:
    # Not into the text of the log, which may go to a file or to another program.
    print(line, file=sys.stderr, flush=True)


def _logs(paths: TrialPaths) -> dict[str, Path]:
    """Return name -> file. The output of the newest job has the name JOB, that of a process kind/index."""
    logs = {}
    record = TrialJob.read(paths)
    if record is not None and job_log(paths, record.job).is_file():
        logs[JOB] = job_log(paths, record.job)
    for path in sorted(paths.logs.glob("*.log")):
        kind, dash, index = path.stem.rpartition("-")
        logs[f"{kind}/{index}" if dash else path.stem] = path
    return logs


def _path_of(paths: TrialPaths, process: str) -> Path | None:
    """Return the file of a log that may still come; None if there is no such name."""
    record = TrialJob.read(paths)
    if process == JOB and record is not None:
        return job_log(paths, record.job)
    return paths.logs / f"{process.replace('/', '-')}.log" if _NAMES.fullmatch(process) else None


def _unknown(paths: TrialPaths, process: str) -> ConfigError:
    logs = _logs(paths)
    known = f"one of {', '.join(logs)}" if logs else "it has no logs yet"
    return ConfigError("PROCESS", process, f"{paths.root} has no log of that name: {known}")


def _list(paths: TrialPaths, logs: dict[str, Path]) -> None:
    if not logs:
        print(f"{paths.root} has no logs yet")
    for name, path in logs.items():
        found = path.stat()
        age_s = max(0.0, time.time() - found.st_mtime)
        print(f"{name:<22}  {found.st_size:>12,} bytes, written {age_s:,.0f} s ago  {path}")
