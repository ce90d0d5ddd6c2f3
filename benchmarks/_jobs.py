"""Whole jobs for benchmarks: run one to its end, begin from a model that was warmed up once, read its records."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from realsys.config.paths import TrialPaths
from realsys.observe.step_log import read_steps

REALSYS = (sys.executable, "-m", "realsys.launch.cli")


def run_job(
    root: Path, trial: str, overrides: Sequence[str], *, experiment: str = "arith", timeout_s: float = 3600
) -> Path:
    """The trial's folder. Exits with the job's last words when it fails."""
    command = [*REALSYS, "run", f"experiment={experiment}", f"fileroot={root}", f"trial={trial}"]
    result = subprocess.run(
        [*command, *overrides], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s
    )
    if result.returncode:
        words = result.stdout[-3000:] + result.stderr[-3000:]
        raise SystemExit(f"{' '.join(command)} failed with {result.returncode}:\n{words}")
    return root / experiment / trial


def warm_start(root: Path) -> list[str]:
    """Settings with which a job begins from a model that this call warms up, instead of warming up its own."""
    warm = run_job(root, "warm", ["train.total_steps=1", "train.batch_groups=8", "evaluation.problems=0"])
    return [f"model.path={TrialPaths(warm).final_model}", "warmup.steps=0"]


def records(trial: Path, kind: str) -> list[dict[str, Any]]:
    """Those of ``steps.jsonl`` of one kind, in order."""
    return [record for record in read_steps(TrialPaths(trial).steps) if record["kind"] == kind]
