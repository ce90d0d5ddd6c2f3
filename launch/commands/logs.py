"""`realsys logs`: lists or shows the logs of a trial, from any node that sees the folder."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from realsys.config.paths import TrialPaths
from realsys.errors import ConfigError
from realsys.launch.commands.status import find_trial
from realsys.launch.screen.log_tail import LogTail
from realsys.launch.trial_job import TrialJob, job_log

JOB = "job"
_LOOK_S = 0.5


def show_logs(trial_dir: Path | None, process: str | None, lines: int, *, follow: bool) -> int:
    """Show the end of one log, or without ``process`` the list of logs. Raises ConfigError."""
    paths = find_trial(trial_dir)
    logs = _logs(paths)
    if process is None:
        _list(paths, logs)
        return 0
    if process not in logs:
        known = f"one of {', '.join(logs)}" if logs else "it has no logs yet"
        raise ConfigError("PROCESS", process, f"{paths.root} has no log of that name: {known}")
    tail = LogTail(logs[process])
    tail.skip_to_last(lines)
    _show(tail)
    while follow and not paths.summary.is_file():
        threading.Event().wait(_LOOK_S)  # a file sends no event
        _show(tail)
    return 0


def _show(tail: LogTail) -> None:
    while text := tail.read():
        sys.stdout.write(text)
    sys.stdout.flush()


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


def _list(paths: TrialPaths, logs: dict[str, Path]) -> None:
    if not logs:
        print(f"{paths.root} has no logs yet")
    for name, path in logs.items():
        found = path.stat()
        age_s = max(0.0, time.time() - found.st_mtime)
        print(f"{name:<22}  {found.st_size:>12,} bytes, written {age_s:,.0f} s ago  {path}")
