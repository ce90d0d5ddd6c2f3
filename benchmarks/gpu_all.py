"""Everything that needs a GPU, in one command: tests and benchmarks, each bounded in time, one table at the end.

    python -m benchmarks.gpu_all --budget 480 --out DIR [--items 0 1 2]
    python -m benchmarks.gpu_all --dry

Each item runs in a separate process with its own time limit; a failure is a row of the table, not an end. The first
items tell most per minute. ``DIR`` gets the log of each item, its rows, and ``gpu_all.json``. It runs from a checkout:
PYTHONPATH must name it, nothing else. Without a GPU every row is "no CUDA device"; with REALSYS_GPU_STAND_IN=1 the CPU
stands in for one, which tests the items. ``--dry`` needs none: FLOPs, bytes and waits as they are predicted, and as the
engine does them on tensors without data. The exit code is 1 if an item failed or ran out of time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks._table import format_table

ROOT = Path(__file__).resolve().parents[1]
SKIPPED = 77  # exit code of a benchmark that found no GPU (benchmarks._gpu)
ROWS = "REALSYS_BENCHMARK_ROWS"
NO_GPU = "no CUDA device"
FAILED = ("failed", "out of time")
_SLOWER = 6.0 if "REALSYS_GPU_STAND_IN" in os.environ else 1.0  # factor of the limits for tests on a CPU
_LAST_WORDS_S = 20.0  # a test has this time to stop the jobs that it started


@dataclass(frozen=True, slots=True)
class Item:
    """One row: a module of benchmarks, or files of tests/gpu."""

    number: int
    name: str
    limit_s: float
    passes: str
    module: str = ""
    tests: tuple[str, ...] = ()

    def command(self, out: Path) -> list[str]:
        if self.module:
            return [sys.executable, "-m", self.module]
        # Without pyproject.toml: its options need plugins that a borrowed machine may lack.
        options = ["-c", os.devnull, "--rootdir", str(ROOT), "-p", "no:cacheprovider", "-q", "-rs"]
        report = [f"--junitxml={out / f'{self.name}.xml'}"]
        files = [str(ROOT / "tests" / "gpu" / name) for name in self.tests]
        return [sys.executable, "-m", "pytest", *options, *report, *files]


ITEMS = (
    Item(0, "environment", 60, "all modules are imported", module="benchmarks.gpu_environment"),
    Item(1, "varlen", 60, "error < 1e-2, gradients too", tests=("test_gpu_varlen.py",)),
    Item(
        2,
        "engine",
        300,
        "as on the CPU: fp32 1e-4, bf16 5e-2; NCCL",
        tests=("test_gpu_engine.py", "test_gpu_collectives.py"),
    ),
    Item(3, "generation", 120, "as transformers and the trainer", tests=("test_gpu_generation.py",)),
    Item(4, "job", 420, "accuracy rises; survives two kills", tests=("test_gpu_job.py",)),
    Item(5, "train", 300, "peak within 10 % of prediction, 2 waits", module="benchmarks.gpu_train"),
    Item(6, "weights", 180, "rates, pause", module="benchmarks.gpu_weights"),
    Item(7, "generation_rate", 120, "tokens/s", module="benchmarks.gpu_generation"),
    Item(8, "sglang", 400, "every version is served", tests=("test_gpu_sglang.py",)),
)

DRY = Item(len(ITEMS), "dry", 120, "counts as predicted", module="benchmarks.gpu_dry")


def run_item(item: Item, out: Path, left_s: float) -> dict[str, Any]:
    """Run one item for at most its limit and ``left_s``; return its row."""
    row: dict[str, Any] = {"item": item.number, "name": item.name, "result": "", "s": 0.0, "passes if": item.passes}
    if left_s <= 0:
        return row | {"result": "not run", "detail": "the budget is used up"}
    limit_s = min(_SLOWER * item.limit_s, left_s)
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), ROWS: str(out / f"{item.name}.rows.json")}
    start = time.monotonic()
    with (out / f"{item.name}.log").open("w") as log:
        process = subprocess.Popen(
            item.command(out), cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
            end(process)
    row["s"] = round(time.monotonic() - start, 1)
    if code is None:
        return row | {"result": "out of time", "detail": f"limit {limit_s:g} s; see {item.name}.log"}
    return row | (outcome_of_tests(item, out, code) if item.tests else outcome_of_module(item, out, code))


def end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt the item, so that a test stops its jobs; then kill its remaining processes."""
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_LAST_WORDS_S)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):  # also if another process has its pid by now
            child.kill()
    process.kill()
    process.wait()


def outcome_of_module(item: Item, out: Path, code: int) -> dict[str, Any]:
    if code == SKIPPED:
        return {"result": "skipped", "detail": NO_GPU}
    return {"result": "failed" if code else "passed", "detail": last_line(out, item) if code else ""}


def outcome_of_tests(item: Item, out: Path, code: int) -> dict[str, Any]:
    """Read pytest's report."""
    report = out / f"{item.name}.xml"
    if not report.exists():
        return {"result": "failed", "detail": last_line(out, item)}
    cases = list(ET.parse(report).getroot().iter("testcase"))
    skipped = [case.find("skipped") for case in cases if case.find("skipped") is not None]
    bad = [case.get("name") for case in cases if case.find("failure") is not None or case.find("error") is not None]
    if code not in (0, 5) or bad:
        return {"result": "failed", "detail": f"{len(bad)} of {len(cases)} tests: {', '.join(map(str, bad[:3]))}"}
    if len(skipped) == len(cases):
        return {"result": "skipped", "detail": skipped[0].get("message", "") if skipped else "no test"}
    return {"result": "passed", "detail": f"{len(cases) - len(skipped)} tests, {len(skipped)} skipped"}


def last_line(out: Path, item: Item) -> str:
    lines = (out / f"{item.name}.log").read_text(errors="replace").strip().splitlines()
    return lines[-1][:120] if lines else "no output"


def run_all(items: Sequence[Item], budget_s: float, out: Path) -> list[dict[str, Any]]:
    """Run ``items`` one after the other; return and keep their rows."""
    out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for item in items:
        print(f"{item.number} {item.name} ...", flush=True)
        if not rows:  # only now: a slow disk may have taken its time for the folder
            deadline = time.monotonic() + budget_s
        rows.append(run_item(item, out, deadline - time.monotonic()))
        (out / "gpu_all.json").write_text(json.dumps(rows, indent=2) + "\n")
    return rows


def print_results(items: Sequence[Item], rows: Sequence[dict[str, Any]], out: Path) -> None:
    """Print the rows of each benchmark, and the table of all items last."""
    for item in items:
        path = out / f"{item.name}.rows.json"
        if path.exists() and (measured := json.loads(path.read_text())):
            print(f"\n{item.name}\n{format_table(measured)}")
    print(f"\n{format_table(rows)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=1800.0, help="seconds for all items together")
    parser.add_argument("--out", type=Path, default=Path("gpu_all"), help="folder of logs and results")
    parser.add_argument("--items", type=int, nargs="+", choices=range(len(ITEMS)), default=list(range(len(ITEMS))))
    parser.add_argument("--dry", action="store_true", help="predict and count without a GPU, instead of the items")
    options = parser.parse_args()
    items = [DRY] if options.dry else [ITEMS[number] for number in options.items]
    out = options.out.resolve()
    rows = run_all(items, options.budget, out)
    print_results(items, rows, out)
    return int(any(row["result"] in FAILED for row in rows))


if __name__ == "__main__":
    sys.exit(main())
