"""The command that runs everything that needs a GPU, on a machine without one: skipped, or on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


def gpu_all(out: Path, *options: str, stand_in: bool = False) -> tuple[int, str, list[dict[str, Any]]]:
    """Run it from another folder with PYTHONPATH alone; return exit code, output and rows."""
    command = [sys.executable, "-m", "benchmarks.gpu_all", "--out", str(out), *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    environment["REALSYS_GPU_STAND_IN"] = str(int(stand_in))
    done = subprocess.run(command, cwd=out.parent, env=environment, capture_output=True, text=True, timeout=560)
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


@pytest.mark.parametrize("item", [0, 1, 2, 3, 5, 6, 7])
def test_item_runs_on_the_cpu(item: int, tmp_path: Path) -> None:
    """Every line of tests and benchmarks that a CPU can run: a typo must not wait for a GPU."""
    out = tmp_path / "out"
    code, output, [row] = gpu_all(out, "--budget", "540", "--items", str(item), stand_in=True)
    assert code == 0, output + "".join(path.read_text()[-3000:] for path in out.glob("*.log"))
    assert row["result"] == "passed" and ("skipped" not in row["detail"] or row["detail"].endswith(", 0 skipped"))
    for path in out.glob("*.rows.json"):
        assert not any(found.get("problem") for found in json.loads(path.read_text()))
