"""Whole jobs in pairs, first-second and second-first in turn, with the same seeds and settings, and their ratios.

The same program twice differs by several per cent on a machine that does other work, so a ratio is reported with the
standard error of its mean, and with the least and the greatest.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._table import report
from realsys.config.paths import TrialPaths
from realsys.telemetry.steps import read_steps

SKIP = 6  # steps that fill the pipeline, left out of every figure
TIMEOUT_S = 1800.0
CHECKOUT = Path(__file__).resolve().parents[1]
COMMON = ["allocation=sglang.d1p1m1+d1p1m1", "evaluation.problems=0"]  # an allocation that every checkout reads
FIGURES = ("tokens_per_s", "cpu_s_per_1k")


@dataclass(frozen=True)
class Side:
    """One of the two programs that are compared: a checkout, and what its environment and settings have in addition."""

    name: str
    checkout: Path = CHECKOUT
    environment: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[TrialPaths], dict[str, Any]] = lambda paths: {}  # further figures of a run, before it is removed
    overrides: tuple[str, ...] = ()
    beside: Callable[[TrialPaths], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext  # while it runs

    @property
    def realsys(self) -> tuple[str, ...]:
        inside = (self.checkout / "realsys" / "launch").exists()  # older checkouts have a package ``launch``
        return (sys.executable, "-m", "realsys.launch.cli" if inside else "launch.cli")

    def launch(self, root: Path, trial: str, overrides: list[str]) -> tuple[TrialPaths, float]:
        """Run the arith job to its end; return its folder and the CPU seconds of all its processes."""
        command = [*self.realsys, "run", "experiment=arith", f"fileroot={root}", f"trial={trial}"]
        paths = TrialPaths(root / "arith" / trial)
        before = os.times()
        with self.beside(paths):
            result = subprocess.run(
                [*command, *overrides, *self.overrides],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                cwd=self.checkout,
                env={**os.environ, "PYTHONPATH": str(self.checkout), **self.environment},
            )
        if result.returncode:
            words = result.stdout[-3000:] + result.stderr[-3000:]
            raise SystemExit(f"{self.checkout}: {' '.join(command)} failed with {result.returncode}:\n{words}")
        after = os.times()  # includes children that were waited for, and their children
        seconds = after.children_user + after.children_system - before.children_user - before.children_system
        return paths, seconds


def measure(paths: TrialPaths, cpu_s: float) -> dict[str, float]:
    """Steady-state figures of one run: sampled tokens that were trained per second, CPU seconds per 1,000 of them."""
    steps = [record for record in read_steps(paths.steps) if record["kind"] == "train"]
    if len(steps) < SKIP + 5:
        raise SystemExit(f"{paths.root}: only {len(steps)} steps; --steps must be at least {SKIP + 5}")
    steady = steps[SKIP:]
    return {
        "steps": len(steady),
        "tokens_per_s": sum(step["answer_tokens"] for step in steady) / (steady[-1]["time"] - steps[SKIP - 1]["time"]),
        "cpu_s_per_1k": 1000 * cpu_s / sum(step["answer_tokens"] for step in steps),
        "accuracy": sum(step["accuracy"] for step in steady) / len(steady),
    }


def spread(values: list[float]) -> dict[str, float]:
    """Mean, its standard error, least and greatest."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return {"mean": statistics.mean(values), "error": error, "least": min(values), "greatest": max(values)}


def ratios(rows: list[dict[str, Any]], first: str, second: str, figure: str) -> dict[str, float]:
    """Return the ratios of ``figure``, first over second, pair by pair."""
    by_pair: dict[int, dict[str, float]] = {}
    for row in rows:
        by_pair.setdefault(row["pair"], {})[row["mode"]] = row[figure]
    return spread([pair[first] / pair[second] for pair in by_pair.values()])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=80, help="per run")
    parser.add_argument("--groups", type=int, default=16, help="batch size in prompts")
    parser.add_argument("--override", action="append", default=[], help="the same for both; may be repeated")


def compare(name: str, options: argparse.Namespace, make_sides: Callable[[Path], tuple[Side, Side]]) -> None:
    """Run the pairs of ``make_sides(folder)`` and report them. The second side makes the model that all start from."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through ``finally``: leave no run behind
    root = Path(tempfile.mkdtemp(prefix=f"{name}_"))
    try:
        first, second = make_sides(root)
        base = Side("warm", second.checkout)
        warm_up = ["train.total_steps=1", "train.batch_groups=8", "evaluation.problems=0", *options.override]
        warm, _ = base.launch(root, "warm", warm_up)
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
            for side in (first, second) if pair % 2 == 0 else (second, first):
                paths, cpu_s = side.launch(root, f"{side.name}-{pair}", overrides)
                rows.append({"pair": pair, "mode": side.name} | measure(paths, cpu_s) | side.check(paths))
                shutil.rmtree(paths.root)
                print(rows[-1], flush=True)
        found = {figure: ratios(rows, first.name, second.name, figure) for figure in FIGURES}
        ends = [
            {"pair": f"{first.name}/{second.name}", "mode": end} | {figure: found[figure][end] for figure in FIGURES}
            for end in ("mean", "error", "least", "greatest")
        ]
        settings = {key: getattr(options, key) for key in ("pairs", "steps", "groups", "override")}
        report(name, [*rows, *ends], settings | {"skip": SKIP, f"{first.name}_over_{second.name}": found})
    finally:
        shutil.rmtree(root, ignore_errors=True)
