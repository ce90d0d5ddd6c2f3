"""Calls of SLURM's programs: sbatch, squeue, scontrol, scancel. Each call has a time limit."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from realsys.config.schema import Config
from realsys.errors import ConfigError, RealsysError

_CALL_S = 60.0  # slurmctld may be busy
_REFUSED_PARTITION = re.compile(r"invalid partition specified: (?P<name>[^\s;]+)")


class SlurmError(RealsysError):
    """SLURM refused something, or does not answer."""


class SlurmSilent(SlurmError):
    """SLURM did not answer in time. The call may have had its effect."""


@dataclass(frozen=True, slots=True)
class JobState:
    """State of a job as squeue shows it. ``exit_code`` is that of the batch script, once it has ended."""

    state: str
    reason: str = ""
    host: str = ""
    start: str = ""
    exit_code: int | None = None


def is_here() -> bool:
    """Return True if this machine has the programs of SLURM."""
    return shutil.which("scontrol") is not None


def submit(config: Config, script: Path) -> str:
    """Submit a batch script; returns the number of the job.

    Raises ConfigError with the message of sbatch if it refuses, and SlurmSilent if the job may have been submitted.
    """
    try:
        job = _call(["sbatch", "--parsable", str(script)])
    except SlurmSilent:
        raise
    except SlurmError as error:
        text = str(error)
        if name := _wrong_partition(config, text):
            value = getattr(config.cluster.slurm, name)
            raise ConfigError(f"cluster.slurm.{name}", value, f"{text}{_partitions()}") from None
        raise ConfigError("cluster.launcher", "slurm", text) from None
    return job.strip().partition(";")[0]


def _wrong_partition(config: Config, text: str) -> str:
    """Return the field of the partition that sbatch refuses; "" if it refuses something else."""
    if "invalid partition" not in text:
        return ""
    set_ones = [name for name in ("partition", "cpu_partition") if getattr(config.cluster.slurm, name)]
    refused = _REFUSED_PARTITION.search(text)
    named = [name for name in set_ones if refused and getattr(config.cluster.slurm, name) == refused["name"]]
    return next(iter([*named, *set_ones]), "")


def _partitions() -> str:
    try:
        names = sorted(set(_call(["sinfo", "--noheader", "--format=%R"]).split()))
    except SlurmError:
        return ""
    return f" (partitions: {', '.join(names)})"


def job_states(jobs: Iterable[str]) -> dict[str, JobState]:
    """Return the states of those jobs that SLURM still knows. Raises SlurmError."""
    wanted = list(jobs)
    if not wanted:
        return {}
    fields = "%i|%T|%r|%B|%S"
    command = ["squeue", "--noheader", "--states=all", f"--user={os.getuid()}", f"--format={fields}"]
    states = {}
    for line in _call(command).splitlines():
        number, state, reason, host, start = line.split("|", 4)
        job = number.removesuffix("+0")  # the first component of a heterogeneous job has the batch script
        if job in wanted:
            states[job] = JobState(state, reason, host if host != "n/a" else "", start if start != "N/A" else "")
    return states


def job_state(job: str) -> JobState | None:
    """Return the state of one job, with its exit code; None if SLURM no longer knows it. Raises SlurmError."""
    try:
        shown = _call(["scontrol", "--oneliner", "show", "job", job])
    except SlurmError as error:
        if "nvalid job id" in str(error):
            return None
        raise
    batch, *_ = shown.splitlines()  # a heterogeneous job has one line per component, the first with the batch script
    found = dict(word.split("=", 1) for word in batch.split() if "=" in word)
    code, _, signum = found.get("ExitCode", "").partition(":")
    start = found.get("StartTime", "")
    return JobState(
        found.get("JobState", "?"),
        found.get("Reason", "").replace("None", ""),
        found.get("BatchHost", ""),
        "" if start == "Unknown" else start,
        (128 + int(signum) if signum.strip("0") else int(code)) if code.isdigit() else None,
    )


def cancel(job: str) -> None:
    """End a job, also one that is pending. Raises SlurmError."""
    _call(["scancel", job])


def signal_steps(job: str, name: str, signal: str) -> None:
    """Send a signal to all tasks of the steps of a job that have this name. Raises SlurmError."""
    listed = _call(["squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i %j"])
    for line in listed.splitlines():
        step, _, called = line.strip().partition(" ")
        if called == name:
            _call(["scancel", f"--signal={signal}", step])


def _call(command: Sequence[str]) -> str:
    """Run a program of SLURM and return its output. Raises SlurmError with its message in one line."""
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=_CALL_S, stdin=subprocess.DEVNULL, check=False
        )
    except FileNotFoundError:
        problem = f"there is no program named {command[0]}: run this command where SLURM's programs are on the PATH"
        raise SlurmError(problem) from None
    except subprocess.TimeoutExpired:
        raise SlurmSilent(f"{command[0]} did not answer within {_CALL_S:g} s: see sinfo") from None
    if ended.returncode:
        lines = [line.removeprefix(f"{command[0]}: ").removeprefix("error: ") for line in ended.stderr.splitlines()]
        problem = "; ".join(filter(None, map(str.strip, lines))) or f"exit code {ended.returncode}"
        # slurmctld may take the job after sbatch has given up: "Socket timed out on send/recv operation"
        kind = SlurmSilent if "timed out" in problem else SlurmError
        raise kind(f"{command[0]}: {problem}")
    return ended.stdout


# ---- lines for a user who follows a job. Pure: states -> lines
#
# pending ──reason changes──> line ──runs──> line ──> log ──ends──> line
#    ^                                        └ queued again ┘


WAITS = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"})
LIVES = WAITS | {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}


class JobWatch:
    """One job under watch. ``ended`` is set by the first state that is final."""

    def __init__(self, job: str) -> None:
        self.job = job
        self.ended = False
        self.exit_code: int | None = None
        self._last: tuple[str, str] | None = None
        self._ran = False

    def silent(self, problem: str) -> str:
        """SLURM does not answer. Returns a line, "" if that is known."""
        told = ("", problem)
        if told == self._last:
            return ""
        self._last = told
        return f"{problem}; the job goes on"

    def observe(self, state: JobState | None) -> str:
        """Take the next state; None: SLURM no longer knows the job. Returns a line, "" without news."""
        if state is None:
            self.ended = True
            return f"job {self.job} is not known to SLURM any more"
        told = (state.state, state.reason if state.state in WAITS else "")
        if told == self._last:
            return ""
        self._last = told
        if state.state in WAITS:
            again = " again" if self._ran else ""
            start = f"; expected to start at {state.start}" if state.start else ""
            reason = f": {state.reason}" if state.reason else ""
            return f"job {self.job} waits{again} ({state.state.lower()}{reason}{start})"
        if state.state == "RUNNING":
            self._ran = True
            return f"job {self.job} runs on {state.host}"
        if state.state in LIVES:
            return ""
        self.ended = True
        self.exit_code = state.exit_code
        code = "" if state.exit_code is None else f", exit code {state.exit_code}"
        return f"job {self.job} has ended: {state.state.lower()}{code}"
