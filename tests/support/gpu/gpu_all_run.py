"""Runs ``benchmarks.gpu_all``, as a user does, on a machine without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
_BUDGET_S = 540.0


def gpu_all(out: Path, *options: str, stand_in: bool = False) -> tuple[int, str, list[dict[str, Any]]]:
    """Run it from another folder with PYTHONPATH alone; return exit code, output and rows."""
    command = [sys.executable, "-m", "benchmarks.gpu_all", "--out", str(out), *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    environment["REALSYS_GPU_STAND_IN"] = str(int(stand_in))
    done = subprocess.run(command, cwd=out.parent, env=environment, capture_output=True, text=True, timeout=_BUDGET_S)
    return done.returncode, done.stdout, json.loads((out / "gpu_all.json").read_text())


def check_on_cpu(item: int, out: Path) -> None:
    """Run an item with the CPU in place of the GPU. Every line that a CPU can run must pass, and nothing be skipped."""
    code, output, [row] = gpu_all(out, "--budget", "500", "--items", str(item), stand_in=True)
    assert code == 0, output + "".join(path.read_text()[-3000:] for path in out.glob("*.log"))
    assert row["result"] == "passed" and ("skipped" not in row["detail"] or row["detail"].endswith(", 0 skipped"))
    for path in out.glob("*.rows.json"):
        assert not any(found.get("problem") for found in json.loads(path.read_text()))
