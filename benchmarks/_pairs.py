"""Whole jobs in pairs, first-second and second-first in turn, with the same seeds and settings, and their ratios.

The same program twice differs by several per cent, so a ratio is reported with the standard error of its mean, and with
the least and the greatest. Most of the difference comes from the machine, which is faster in some minutes than in
others. ``--together`` runs both programs of a pair at the same time, each on half of the cores, and they change sides
after each pair.
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
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._table import report
from realsys.config.paths import TrialPaths
from realsys.observe.step_log import read_steps

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
        environment = {**os.environ, "PYTHONPATH": str(self.checkout), **self.environment}
        with tempfile.TemporaryFile("w+") as output, self.beside(paths):
            process = subprocess.Popen(
                [*command, *overrides, *self.overrides],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.checkout,
                env=environment,
            )
            code, seconds = _finish(process)
            if code:
                output.seek(0)
                raise SystemExit(f"{self.checkout}: {' '.join(command)} ended with {code}:\n{output.read()[-6000:]}")
        return paths, seconds


def _finish(process: subprocess.Popen[bytes]) -> tuple[int, float]:
    """Wait for a run. Return its exit code and the CPU seconds of all its processes."""
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while time.monotonic() < deadline:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)  # includes children that were waited for, and theirs
            if pid:
                process.returncode = os.waitstatus_to_exitcode(status)
                return process.returncode, usage.ru_utime + usage.ru_stime
            time.sleep(0.1)
    finally:
        if process.returncode is None:
            process.terminate()
            process.wait()
    raise SystemExit(f"{process.args!r} has not ended within {TIMEOUT_S:g} s")


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
    parser.add_argument("--together", action="store_true", help="both of a pair at once, each on half of the cores")
    parser.add_argument("--override", action="append", default=[], help="the same for both; may be repeated")


def _each(order: tuple[Side, Side], pair: int, run: Callable[[Side, int], None], *, together: bool) -> None:
    """Run both sides: one after the other, or at the same time, each on half of the cores."""
    if not together:
        for side in order:
            run(side, pair)
        return
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    halves = (set(cores[:half]), set(cores[half : 2 * half]))

    def pinned(side: Side, mine: set[int]) -> None:
        os.sched_setaffinity(0, mine)  # of this thread; a process that it starts inherits them
        run(side, pair)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(pinned, side, mine) for side, mine in zip(order, halves, strict=True)]:
            done.result()


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

        def run(side: Side, pair: int) -> None:
            paths, cpu_s = side.launch(root, f"{side.name}-{pair}", overrides)
            rows.append({"pair": pair, "mode": side.name} | measure(paths, cpu_s) | side.check(paths))
            shutil.rmtree(paths.root)
            print(rows[-1], flush=True)

        for pair in range(options.pairs):
            order = (first, second) if pair % 2 == 0 else (second, first)
            _each(order, pair, run, together=options.together)
        found = {figure: ratios(rows, first.name, second.name, figure) for figure in FIGURES}
        ends = [
            {"pair": f"{first.name}/{second.name}", "mode": end} | {figure: found[figure][end] for figure in FIGURES}
            for end in ("mean", "error", "least", "greatest")
        ]
        settings = {key: getattr(options, key) for key in ("pairs", "steps", "groups", "together", "override")}
        report(name, [*rows, *ends], settings | {"skip": SKIP, f"{first.name}_over_{second.name}": found})
    finally:
        shutil.rmtree(root, ignore_errors=True)
