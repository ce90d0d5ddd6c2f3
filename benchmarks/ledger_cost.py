"""What never losing a group costs: the arith job with ledger, leases and acknowledgements, against itself without.

    python -m benchmarks.ledger_cost [--pairs 4] [--steps 80] [--groups 16]

One warm-up makes the model that every run starts from. Then come pairs of runs, one ``on`` and one ``off``, in turn
on-off and off-on, with the same seeds and settings, on one training rank and one server. ``off`` is the same program
with its journal, leases and acknowledgements taken out from outside (``without_ledger/sitecustomize.py``): the product
has no such switch. The first ``SKIP`` steps of a run are left out: they fill the pipeline.

    tokens_per_s   answer tokens that training consumed, per second, from the end of step SKIP to the end of the last
    cpu_s_per_1k   CPU seconds of all processes of the run, from its start to its end, per 1,000 of these tokens
    records        written to the ledger, and their bytes

``on_over_off`` is the ratio of tokens_per_s in one pair; what is reported is its mean with the standard error of the
mean, and the least and the greatest. The same program twice differs by more than the ledger costs, so the error says
how far the answer can be trusted.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks._table import report
from benchmarks.without_ledger.sitecustomize import LOG, PATCHES
from realsys.config.paths import TrialPaths
from realsys.telemetry.steps import read_steps

PATCHED = Path(__file__).with_name("without_ledger")
SKIP = 6
TIMEOUT_S = 1800.0
COMMON = ["allocation=serve.d1p1m1+d1p1m1", "evaluation.problems=0"]


def launch(root: Path, trial: str, overrides: list[str], *, patched: Path | None = None) -> tuple[TrialPaths, float]:
    """Run to the end; returns where it is and the CPU seconds of all its processes."""
    command = [sys.executable, "-m", "launch.cli", "run", "experiment=arith", f"fileroot={root}", f"trial={trial}"]
    environment = dict(os.environ)
    if patched is not None:
        before = environment.get("PYTHONPATH", "")
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, [str(PATCHED), before])), LOG: str(patched)}
    cpu = os.times()
    result = subprocess.run(
        [*command, *overrides],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment,
    )
    if result.returncode:
        raise SystemExit(
            f"{' '.join(command)} failed with {result.returncode}:\n{result.stdout[-3000:]}{result.stderr[-3000:]}"
        )
    spent = os.times()  # of children that were waited for, and of theirs
    seconds = spent.children_user + spent.children_system - cpu.children_user - cpu.children_system
    return TrialPaths(root / "arith" / trial), seconds


def measure(paths: TrialPaths, cpu_s: float) -> dict[str, float]:
    """Steady-state figures of one run."""
    steps = [record for record in read_steps(paths.steps) if record["kind"] == "train"]
    if len(steps) < SKIP + 5:
        raise SystemExit(f"{paths.root}: only {len(steps)} steps; --steps must be at least {SKIP + 5}")
    steady = steps[SKIP:]
    seconds = steady[-1]["time"] - steps[SKIP - 1]["time"]
    ledger = paths.ledger
    return {
        "steps": len(steady),
        "tokens_per_s": sum(step["answer_tokens"] for step in steady) / seconds,
        "cpu_s_per_1k": 1000 * cpu_s / sum(step["answer_tokens"] for step in steps),
        "records": ledger.read_bytes().count(b"\n"),
        "ledger_kib": ledger.stat().st_size / 1024,
    }


def run(root: Path, mode: str, pair: int, overrides: list[str]) -> dict[str, Any]:
    """One run; fails if a patch was not made, or was made where it should not be."""
    log = root / f"{mode}-{pair}.patched"
    paths, cpu_s = launch(root, f"{mode}-{pair}", overrides, patched=log if mode == "off" else None)
    made = set(log.read_text().split()) if log.exists() else set()
    if made != (set(PATCHES) if mode == "off" else set()):
        raise SystemExit(f"{paths.root}: {mode}, but patched are: {', '.join(sorted(made)) or 'none'}")
    row = {"pair": pair, "mode": mode} | measure(paths, cpu_s)
    if mode == "off" and row["records"]:
        raise SystemExit(f"{paths.ledger}: {row['records']} records were written without a ledger")
    shutil.rmtree(paths.root)
    return row


def ratios(rows: list[dict[str, Any]], figure: str) -> list[float]:
    """on over off, pair by pair."""
    by_pair: dict[int, dict[str, float]] = {}
    for row in rows:
        by_pair.setdefault(row["pair"], {})[row["mode"]] = row[figure]
    return [pair["on"] / pair["off"] for pair in by_pair.values()]


def spread(values: list[float]) -> dict[str, float]:
    """Mean, its standard error, least and greatest."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return {"mean": statistics.mean(values), "error": error, "least": min(values), "greatest": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=80, help="per run")
    parser.add_argument("--groups", type=int, default=16, help="batch size in prompts")
    parser.add_argument("--override", action="append", default=[], help="the same for both; may be repeated")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through ``finally``: leave no run behind
    root = Path(tempfile.mkdtemp(prefix="ledger_cost_"))
    try:
        warm_up = ["train.total_steps=1", "train.batch_groups=8", "evaluation.problems=0", *options.override]
        warm, _ = launch(root, "warm", warm_up)
        overrides = [
            *COMMON,
            f"model.path={warm.final_model}",
            "warmup.steps=0",
            f"train.batch_groups={options.groups}",
            f"train.total_steps={options.steps}",
            f"rollout.max_concurrent={max(4, options.groups // 4)}",
            *options.override,
        ]
        rows: list[dict[str, Any]] = []
        for pair in range(options.pairs):
            for mode in ("on", "off") if pair % 2 == 0 else ("off", "on"):
                rows.append(run(root, mode, pair, overrides))
                print(rows[-1], flush=True)
        throughput, cpu = (spread(ratios(rows, figure)) for figure in ("tokens_per_s", "cpu_s_per_1k"))
        ends = [{"pair": "on/off", "mode": name} | shown(throughput[name], cpu[name]) for name in throughput]
        report(
            "ledger_cost",
            [*rows, *ends],
            {
                "pairs": options.pairs,
                "steps": options.steps,
                "groups": options.groups,
                "skip": SKIP,
                "override": options.override,
                "on_over_off": throughput,
                "cpu_on_over_off": cpu,
            },
        )
    finally:
        shutil.rmtree(root, ignore_errors=True)


def shown(throughput: float, cpu: float) -> dict[str, float]:
    return {"tokens_per_s": throughput, "cpu_s_per_1k": cpu}


if __name__ == "__main__":
    main()
