"""The command that runs everything that needs a GPU, on a machine without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]


def gpu_all(out: Path, *options: str) -> tuple[int, str, list[dict[str, Any]]]:
    """Run it from another folder with PYTHONPATH alone; return exit code, output and rows."""
    command = [sys.executable, "-m", "benchmarks.gpu_all", "--out", str(out), *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=out.parent, env=environment, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, json.loads((out / "gpu_all.json").read_text())


def test_every_row_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    """A benchmark and a file of tests."""
    code, output, rows = gpu_all(tmp_path / "out", "--budget", "280", "--items", "1", "7")
    assert code == 0, output
    assert [(row["name"], row["result"], row["detail"]) for row in rows] == [
        ("varlen", "skipped", "no CUDA device"),
        ("generation_rate", "skipped", "no CUDA device"),
    ]
    assert output.splitlines()[-1].split()[:3] == ["7", "generation_rate", "skipped"]


def test_item_out_of_time_is_a_row(tmp_path: Path) -> None:
    code, _, rows = gpu_all(tmp_path / "out", "--budget", "0.1", "--items", "0", "1")
    assert [row["result"] for row in rows] == ["out of time", "not run"] and code == 1
