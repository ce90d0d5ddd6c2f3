"""Runs whole jobs for the system tests: small enough for two cores, every process real, seen from outside only."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from realsys.config.paths import TrialPaths
from realsys.observe.step_log import read_steps
from tests.conftest import SESSION_MARK
from tests.support.polling import poll
from tests.support.processes.forked import COMMAND, Command, start

SMALL = [
    "experiment=arith",
    "allocation=sglang.d1p1m1+d1p1m1",
    "data.arith.max_operands=6",
    "data.arith.train_size=400",
    "data.arith.eval_size=32",
    "data.arith.demo_size=400",
    "generation.sampling.max_new_tokens=64",
    "generation.embedded.context_length=128",
    "generation.embedded.max_running=64",
    "warmup.steps=20",
    "warmup.batch=32",
    "train.batch_groups=8",
    "rollout.group_size=4",
    "train.total_steps=4",
    "asynchronous.stale_policy=drop",
    "evaluation.problems=16",
    "evaluation.every_steps=0",
    "telemetry.curves_every_s=0",
    # A model this fresh is always wrong: with a penalty, and no mean taken off it, there is something to train on.
    "rollout.reward.wrong=-1.0",
    "train.ppo.advantage.mean=none",
    "train.ppo.advantage.std=none",
]
BOUND_S = 180.0  # limit of every wait; many times the need of a run, for loaded machines


@dataclass(frozen=True)
class Job:
    """A run: its folder, its terminal output, its exit code once it has ended."""

    root: Path
    returncode: int | None
    stdout: str
    stderr: str

    @property
    def paths(self) -> TrialPaths:
        return TrialPaths(self.root)

    def records(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in read_steps(self.paths.steps) if record["kind"] == kind]

    def report(self) -> str:
        """Everything there is to read about a failed run."""
        logs = [f"== {p.name}\n{p.read_text()[-1500:]}" for p in sorted(self.paths.logs.glob("*"))]
        parts = [f"exit {self.returncode}", f"== stdout\n{self.stdout[-3000:]}", f"== stderr\n{self.stderr[-3000:]}"]
        return "\n".join(parts + logs)

    def completed(self) -> Job:
        """This job; fails the test with everything there is to read unless it exited 0."""
        assert self.returncode == 0, self.report()
        return self


def command(*overrides: str) -> list[str]:
    return [*COMMAND, "run", *overrides]


def realsys(*words: object, timeout_s: float = BOUND_S) -> subprocess.CompletedProcess[str]:
    """Run a command of realsys to its end."""
    argv = [*COMMAND, *map(str, words)]
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = start(argv, stdout, stderr, dict(os.environ))
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
            process.wait()
        for file in (stdout, stderr):
            file.seek(0)
        return subprocess.CompletedProcess(argv, code, stdout.read(), stderr.read())


def arith(fileroot: Path, trial: str, *overrides: str) -> tuple[Path, list[str]]:
    """Trial folder and command of a small arith job."""
    return fileroot / "arith" / trial, command(*SMALL, f"fileroot={fileroot}", f"trial={trial}", *overrides)


def run(root: Path, argv: list[str], timeout_s: float = BOUND_S) -> Job:
    """Run to the end, whatever it is. A run that hangs is stopped, and its logs are shown."""
    with running(root, argv) as live:
        live.wait(timeout_s)
    return live.job


def run_arith(fileroot: Path, trial: str, *overrides: str, timeout_s: float = BOUND_S) -> Job:
    return run(*arith(fileroot, trial, *overrides), timeout_s=timeout_s)


class LiveJob:
    """A run under way, as a user with a second terminal sees it."""

    def __init__(self, root: Path, start: Callable[[], Command], output: tuple[Path, Path]) -> None:
        self.root, self._start, self.output = root, start, output
        self.process = start()

    def start_again(self) -> None:
        """Give the command once more, after the process has ended."""
        self.process = self._start()

    @property
    def job(self) -> Job:
        stdout, stderr = (path.read_text() for path in self.output)
        return Job(self.root, self.process.poll(), stdout, stderr)

    def steps_done(self) -> int:
        return len(self.job.records("train"))

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = BOUND_S) -> Any:
        """Poll until the condition is true; returns its value. Fails the test when the run ends before, or in time."""

        def found() -> Any:
            value = condition()
            assert value or self.process.poll() is None, f"the run ended before {what}\n{self.job.report()}"
            return value

        return poll(found, what, timeout_s, lambda: self.job.report())

    def until_step(self, step: int, timeout_s: float = BOUND_S) -> None:
        self.until(lambda: self.steps_done() >= step, f"train step {step}", timeout_s)

    @property
    def page(self) -> str:
        """Address of the manager; "" before its start."""
        page = re.search(r"http://127\.0\.0\.1:\d+", self.job.stdout)
        return page[0] if page else ""

    def status(self) -> dict[str, Any]:
        """Return what the manager says; empty while no manager answers."""
        try:
            with urllib.request.urlopen(f"{self.page}/status", timeout=10) as reply:
                status: dict[str, Any] = json.load(reply)
                return status
        except (OSError, ValueError):
            return {}

    def server_loads(self) -> list[dict[str, Any]]:
        """Return the last report of each server that the manager has; empty while no manager answers."""
        return [row["load"] for row in self.status().get("servers", []) if row["load"]]

    def pid(self, worker: str) -> int | None:
        """Return the pid of the process that runs as ``kind/index`` now, not of its forks."""
        kind, index = worker.split("/")
        ending = [f"realsys.workers.{kind}", "--trial-dir", str(self.root), "--index", index]
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.cmdline()[-5:] == ending and child.status() != psutil.STATUS_ZOMBIE:
                    return child.pid
        return None

    def kill(self, worker: str) -> int:
        """SIGKILL; returns the pid that it had."""
        pid = self.pid(worker)
        assert pid is not None, f"{worker} does not run\n{self.job.report()}"
        os.kill(pid, signal.SIGKILL)
        return pid

    def wait(self, timeout_s: float = BOUND_S) -> Job:
        """Wait for the end of the run."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run has not ended within {timeout_s} s\n{self.job.report()}") from None
        return self.job


@contextlib.contextmanager
def running(
    root: Path, argv: list[str], env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Iterator[LiveJob]:
    """Start a run with ``env`` over our environment; stop it at the end of the block if it still runs."""
    output = root.with_name(root.name + ".stdout"), root.with_name(root.name + ".stderr")
    output[0].parent.mkdir(parents=True, exist_ok=True)
    for path in output:
        path.unlink(missing_ok=True)

    def once_more() -> Command:
        with output[0].open("a") as stdout, output[1].open("a") as stderr:
            return start(argv, stdout, stderr, {**os.environ, **(env or {})}, cwd)

    live = LiveJob(root, once_more, output)
    try:
        yield live
    finally:
        if live.process.poll() is None:
            live.process.terminate()
            try:
                live.process.wait(60)
            except subprocess.TimeoutExpired:
                live.process.kill()
                live.process.wait(10)


def processes_of(root: Path) -> list[str]:
    """Command lines of live processes of this trial: they name its folder, or were forked by one that does."""
    run_id = f"REALSYS_RUN_ID={root.parent.name}-{root.name}-"
    mark = f"{SESSION_MARK}={os.environ[SESSION_MARK]}"
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            line = " ".join(process.cmdline())
            environment = Path(f"/proc/{process.pid}/environ").read_bytes().decode(errors="replace").split("\0")
            ours = mark in environment and any(entry.startswith(run_id) for entry in environment)
            if (ours or str(root) in line) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {line}")
    return found
