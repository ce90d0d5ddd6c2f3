"""Fixtures of the system tests: jobs that several tests read, and run once.

``SHARED_JOBS`` of tests/conftest.py names the files that read one job, so that one of several processes runs them.
"""

import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers.utils import logging

from realsys.config.paths import TrialPaths
from realsys.train.record_files import recorded_steps
from tests.support.jobs.jobs import Job, arith, processes_of, realsys, run_arith, running

STEPS = 5
ENDLESS = [
    "warmup.steps=2",
    "evaluation.problems=0",
    "train.batch_groups=4",
    "rollout.group_size=2",
    "rollout.workers=1",
    "train.total_steps=100000",
]


@pytest.fixture(scope="session", autouse=True)
def no_progress_bars():
    """Switch transformers' bars off: their thread never ends, and would be blamed on a test."""
    logging.disable_progress_bar()


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A finished run with all five kinds of process, for all tests that only read it. No test may change it."""
    settings = ["checkpoint.every_steps=2", "checkpoint.at_end=false", f"train.total_steps={STEPS}"]
    settings.append("telemetry.curves_every_s=300")
    return run_arith(tmp_path_factory.mktemp("runs"), "whole", *settings).completed()


@dataclass(frozen=True)
class Interrupted:
    """A run that a user looked at and then stopped with Ctrl-C. No test may change it."""

    job: Job
    step: int  # the last that was recorded
    while_it_ran: dict[str, subprocess.CompletedProcess[str]]  # command -> its output
    stopped_s: float  # from the signal until no worker was left

    @property
    def root(self) -> Path:
        return self.job.root


@pytest.fixture(scope="session")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    root, argv = arith(tmp_path_factory.mktemp("runs"), "interrupted", *ENDLESS, "checkpoint.every_steps=2")
    with running(root, argv) as live:
        live.until(lambda: len(recorded_steps(TrialPaths(root).records)) >= 3, "three recorded steps")
        seen = {command: realsys(command, root) for command in ("status", "audit", "samples")}
        live.process.send_signal(signal.SIGINT)
        began = time.monotonic()
        live.until(lambda: not processes_of(root), "no worker is left", timeout_s=60)
        stopped_s = time.monotonic() - began
        job = live.wait()  # until it has written its report
    return Interrupted(job, max(recorded_steps(job.paths.records)), seen, stopped_s)
