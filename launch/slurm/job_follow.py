"""Follows a job: shows a log, and the states of the job, until it has ended. It may be queued again in between."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from realsys.launch.slurm.job_watch import JobWatch
from realsys.launch.slurm.slurm_client import SlurmError, job_state
from realsys.observe.screen.terminal import LogTail, show_new

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
