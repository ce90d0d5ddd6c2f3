"""Runs whole arith jobs for the system tests: small enough for two cores, every process real."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

SMALL = [
    "experiment=arith",
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
    "evaluation.problems=16",
]


class Job:
    """A finished run and what it left."""

    def __init__(self, root: Path, result: subprocess.CompletedProcess[str]) -> None:
        self.root, self.returncode = root, result.returncode
        self.stdout, self.stderr = result.stdout, result.stderr

    def records(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.root / "steps.jsonl").read_text().splitlines()
        return [record for line in lines if (record := json.loads(line))["kind"] == kind]

    def logs(self) -> str:
        return "\n".join(f"== {p.name}\n{p.read_text()[-1500:]}" for p in sorted((self.root / "logs").glob("*")))


def command(fileroot: Path, trial: str, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "launch.cli", "run", *SMALL, f"fileroot={fileroot}", f"trial={trial}", *overrides]


def run_job(fileroot: Path, trial: str, *overrides: str, timeout_s: float = 240) -> Job:
    """Run to the end. Raises subprocess.TimeoutExpired rather than hang."""
    result = subprocess.run(
        command(fileroot, trial, *overrides),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return Job(fileroot / "arith" / trial, result)


def processes_of(trial_dir: Path) -> list[str]:
    """Command lines of live processes that name this trial."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(trial_dir) in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(line)
    return found
