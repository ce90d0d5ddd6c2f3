"""Trials as SLURM jobs, as a user with a second terminal sees them."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from realsys.cluster.network import interfaces, is_loopback
from realsys.config.paths import TrialPaths
from realsys.errors import LedgerError
from realsys.launch.commands.audit import audit_trial
from realsys.observe.step_log import StepTail, surviving_steps
from tests.support.jobs.jobs import SMALL, processes_of
from tests.support.polling import poll
from tests.support.processes.ports import lasting_ports
from tests.support.slurm.cluster import VirtualSlurm

BOUND_S = 150.0
FREED_S = 60.0  # bound on the time from the end of a run to the end of its job


def own_interface() -> str:
    """Return an interface of this machine beyond loopback: all virtual nodes have its address."""
    there = interfaces()
    return next(name for name, addresses in there.items() if any(not is_loopback(each) for each in addresses))


def realsys(*words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    argv = [sys.executable, "-m", "realsys.launch.cli", *words]
    return subprocess.run(
        argv, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=BOUND_S, check=False
    )


class SlurmTrial:
    """A small arith trial. ``overrides`` come after those that all trials share."""

    def __init__(self, slurm: VirtualSlurm, folder: Path, name: str, *overrides: str) -> None:
        self.root = folder / "arith" / name
        self.paths = TrialPaths(self.root)
        self.job = ""
        self._slurm = slurm
        shared = ["cluster=slurm", f"cluster.interface={own_interface()}", f"fileroot={folder}"]
        [port] = lasting_ports(1)
        store = ["name_store=etcd", "cluster.name_store.start=true", f"cluster.name_store.address=127.0.0.1:{port}"]
        self.words = [*SMALL, *shared, *store, *overrides, "--trial", name]

    def submit(self, env: Mapping[str, str] | None = None) -> None:
        """Submit the job and leave it."""
        done = realsys("submit", *self.words, "--detach", env=env)
        found = re.search(r"^job (\d+) runs trial", done.stdout, re.MULTILINE)
        assert done.returncode == 0 and found, done.stdout + done.stderr
        self.job = found[1]

    @property
    def log(self) -> str:
        """The output of the run."""
        path = self.paths.job.with_name(f"job-{self.job}.log")
        return path.read_text() if path.exists() else ""

    def report(self) -> str:
        logs = [f"== {path.name}\n{path.read_text()[-1500:]}" for path in sorted(self.paths.logs.glob("*.log"))]
        return "\n".join([*logs, self._slurm.report(), self.log[-6000:]])

    def steps(self) -> list[int]:
        """Return the train steps of the step log, also those that were undone."""
        return [int(record["step"]) for record in StepTail(self.paths.steps).read() if record["kind"] == "train"]

    def surviving_steps(self) -> list[int]:
        """Return the train steps that no later recovery has undone."""
        return [int(record["step"]) for record in surviving_steps(self.paths.steps) if record["kind"] == "train"]

    def until(self, condition: Callable[[], object], what: str, timeout_s: float = BOUND_S) -> float:
        """Wait until the condition is true; returns the seconds that it took."""
        began = time.monotonic()
        poll(condition, what, timeout_s, self.report)
        return time.monotonic() - began

    def until_steps(self, count: int, timeout_s: float = BOUND_S) -> float:
        return self.until(lambda: len(self.steps()) >= count, f"{count} steps", timeout_s)

    def until_state(self, *states: str, timeout_s: float = BOUND_S) -> float:
        return self.until(lambda: self._slurm.state(self.job) in states, " or ".join(states), timeout_s)

    def pids(self, module: str) -> list[int]:
        """Return the pids of the processes of this trial that run ``module``."""
        pattern = re.compile(rf"\S*python\S* -P -m realsys\.{re.escape(module)}\b.*{re.escape(self.root.name)}")
        return [int(line.split()[0]) for line in processes_of(self.root) if pattern.search(line)]

    def started(self) -> float:
        """Return when the job started, in unix seconds."""
        return time.mktime(time.strptime(self._slurm.first_line(self.job, "%S"), "%Y-%m-%dT%H:%M:%S"))

    def freed_s(self) -> float:
        """Return the seconds from the end of the run to the end of its job, in which SLURM has all of its nodes again.

        SLURM tells the end in whole seconds.
        """
        shown = self._slurm.call("scontrol", "show", "job", self.job)
        ended = time.mktime(time.strptime(shown.split("EndTime=")[1].split()[0], "%Y-%m-%dT%H:%M:%S"))
        return max(0.0, ended - self.paths.summary.stat().st_mtime)

    def first_node(self) -> str:
        """Return the node with the batch script."""
        return self._slurm.first_line(self.job, "%B")

    def node_of(self, module: str) -> str:
        """Return the virtual node on which the first process of this module runs."""
        return psutil.Process(self.pids(module)[0]).environ()["SLURMD_NODENAME"]

    def check_done(self, steps: int) -> None:
        """Wait for the end of the job, and check that it has trained so many steps at least, and its audit."""
        self.until_state("COMPLETED")
        assert "phase done" in self.log, self.report()
        assert self.steps()[-1] >= steps, self.report()
        self.check_audit()
        assert not processes_of(self.root), self.report()

    def check_audit(self) -> None:
        try:
            report = audit_trial(self.paths)
        except LedgerError as error:
            raise AssertionError(f"{error}\n{self.report()}") from None
        assert report.ok, report
