"""Ask the launcher of a trial to end the run with a checkpoint, from any node that sees the folder."""

from __future__ import annotations

import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable

from realsys.config.paths import TrialPaths
from realsys.errors import RealsysError, WaitTimeout
from realsys.launch.commands.options import add_newest_trial, find_trial, seconds
from realsys.launch.slurm.client import WAITS, JobState, cancel, job_state
from realsys.launch.slurm.trial_job import TrialJob
from realsys.launch.supervise.stop_request import ask_to_stop, take_request
from realsys.launch.trial_folder import is_held
from realsys.launch.words import command_line

_LOOK_S = 0.1
_TAKEN_S = 90.0  # a network file system may show a new file after a minute only


def add_arguments(parser: ArgumentParser) -> None:
    add_newest_trial(parser)
    parser.add_argument(
        "--wait", type=seconds, default=600.0, metavar="S", help="seconds to wait for the end (default: %(default)g)"
    )


def run(args: Namespace) -> int:
    """Stop a trial, and wait for its end. Raises RealsysError."""
    paths = find_trial(args.trial_dir)
    record = TrialJob.read(paths)
    state = None if record is None else job_state(record.job)
    if record is not None and state is not None and state.state in WAITS:
        cancel(record.job)
        print(f"job {record.job} was waiting, and is cancelled")
        return 0
    if not _runs(paths, state):
        print(f"{paths.root} does not run")
        return 0
    ask_to_stop(paths.stop_request)
    if not _until(lambda: not paths.stop_request.exists(), _TAKEN_S):
        take_request(paths.stop_request)
        problem = "its launcher did not take the request"
        remedy = f"scancel {record.job}" if record is not None else "send SIGTERM to its launcher"
        raise WaitTimeout(f"{paths.root}: {problem} within {_TAKEN_S:g} s: {remedy}")
    print(f"{paths.root} stops, with a checkpoint")
    if not _until(lambda: paths.summary.is_file(), args.wait):
        look = command_line("status", paths.root)
        raise RealsysError(f"{paths.root} has not stopped within {args.wait:g} s: see {look}")
    print("stopped")
    return 0


def _runs(paths: TrialPaths, state: JobState | None) -> bool:
    # A file system may have no locks over several hosts; a job that SLURM knows to run is enough.
    return is_held(paths.lock) or (state is not None and state.state == "RUNNING")


def _until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Return True once the condition holds, False after ``timeout_s``. A file sends no event."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        threading.Event().wait(_LOOK_S)
    return True
