"""Growth of a long run: 1,000 steps of the smallest job, every process of it watched in /proc.

    python -m benchmarks.soak [--steps 1000] [--every 0.5]

The job is whole: launcher, manager, server, trainer, master, two RolloutWorkers with their verifiers; checkpoints,
ledger and records of the steps as in any run. Two bounds are set so low that a short run meets them many times:
the ledger is compacted beyond 128 KiB, a log is moved beyond 2 KiB (64 MiB and 16 MiB by default).
Sampled every ``--every`` seconds, with the step that the run was at:

    rss_mib, pss_mib   resident memory; proportional: shared pages are divided among their processes
    fds, threads       open file descriptors, threads
    kib                size of the trial's folder, and of each entry in it

A slope is fitted over everything after step ``SETTLED``, per 100 steps. ``error`` is its standard error, from the means
of ten blocks of samples, because neighbouring samples are not independent.
``last_half`` is the slope over the second half of the steps alone: smaller where something fills up. Verdict:

    flat      the slope is within three errors of zero, or so small that 1,000 steps add less than 1 % to the mean
    growing   anything else

The folder has to grow with the step log, a line per step: ``bytes_per_step``. All else in it is to be flat. The picture
goes to benchmarks/results/soak.png.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks._table import RESULTS, report
from realsys.config.paths import TrialPaths
from realsys.observe.step_log import StepTail

SETTLED = 100  # steps: allocators fill, caches warm up
BLOCKS = 10
NEGLIGIBLE = 0.001  # fraction of the mean, per 100 steps
STEPS, REST = "steps.jsonl", "without steps.jsonl"  # two parts of the folder
START_S, STEP_S = 300.0, 10.0  # bounds on the start, and on a step
JOB = [
    "experiment=arith",
    "allocation=serve.d1p1m1+d1p1m1",
    "model.tiny.hidden_size=32",
    "model.tiny.num_hidden_layers=1",
    "model.tiny.head_dim=8",
    "model.tiny.intermediate_size=64",
    "data.arith.max_operands=4",
    "data.arith.train_size=2000",
    "data.arith.demo_size=200",
    "warmup.steps=0",
    "evaluation.problems=0",
    "generation.sampling.max_new_tokens=24",
    "generation.embedded.context_length=96",
    "rollout.group_size=2",
    "rollout.max_concurrent=4",
    "train.batch_groups=4",
    "train.ppo.minibatches=1",
    "train.optimizer.lr=1e-6",
    # A model this fresh is always wrong: with a penalty, and no mean taken off it, there is something to train on.
    "rollout.reward.wrong=-1.0",
    "train.ppo.advantage.mean=none",
    "train.ppo.advantage.std=none",
    "train.ppo.skip_zero_advantage=false",
    "manager.ledger_compact_mb=0.125",
    "cluster.log_mb=0.001953125",
]


@dataclass
class Series:
    """One figure over the steps."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, step: int, value: float) -> None:
        self.steps.append(step)
        self.values.append(value)


@dataclass(frozen=True, slots=True)
class Trend:
    """``slope`` and its standard ``error`` per 100 steps; ``mean`` over the same samples."""

    mean: float
    slope: float
    error: float

    @property
    def verdict(self) -> str:
        if math.isnan(self.slope):
            return "too short"
        small = abs(self.slope) <= NEGLIGIBLE * abs(self.mean)
        return "flat" if small or abs(self.slope) <= 3 * self.error else "growing" if self.slope > 0 else "shrinking"


def trend(series: Series, settled: int) -> Trend:
    """Fitted to the means of ``BLOCKS`` blocks of the samples after step ``settled``."""
    steps, values = np.array(series.steps), np.array(series.values)
    late = steps > settled
    if late.sum() < 2 * BLOCKS:
        return Trend(float(values.mean()), math.nan, math.nan)
    x = np.array([block.mean() for block in np.array_split(steps[late], BLOCKS)]) / 100
    y = np.array([block.mean() for block in np.array_split(values[late], BLOCKS)])
    away = x - x.mean()
    slope = float(away @ y / (away @ away))
    rest = y - y.mean() - slope * away
    error = math.sqrt(float(rest @ rest) / (BLOCKS - 2) / float(away @ away))
    return Trend(float(values[late].mean()), slope, error)


def processes(launcher: psutil.Process) -> Iterator[tuple[str, psutil.Process]]:
    """Return (name, process) of every process of the run: workers by kind and index, and their forks."""
    yield "launcher", launcher
    for child in launcher.children():
        name = name_of(child)
        yield name, child
        for below in child.children(recursive=True):
            yield f"{name} child", below


def name_of(process: psutil.Process) -> str:
    words = process.cmdline()
    if "-m" in words and "--index" in words:
        kind = words[words.index("-m") + 1].removeprefix("realsys.workers.")
        return f"{kind}/{words[words.index('--index') + 1]}"
    return process.name()


def pss(pid: int) -> float:
    """MiB. Raises OSError when the process has ended."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def look(process: psutil.Process) -> dict[str, float]:
    """Raises psutil.Error or OSError when the process has ended."""
    return {
        "rss_mib": process.memory_info().rss / 2**20,
        "pss_mib": pss(process.pid),
        "fds": process.num_fds(),
        "threads": process.num_threads(),
    }


def sizes(root: Path) -> dict[str, float]:
    """KiB of each entry of the trial's folder, and of all but the step log."""
    found = {entry.name: size(entry) / 1024 for entry in root.iterdir()}
    return found | {REST: sum(kib for name, kib in found.items() if name != STEPS)}


def size(path: Path) -> int:
    """Return the bytes of a file, or of all files below a folder. Removed files count as 0."""
    try:
        if not path.is_dir():
            return path.stat().st_size
        return sum(size(entry) for entry in path.iterdir())
    except FileNotFoundError:
        return 0


class Watch:
    """Samples of one run: ``series[who, figure]``. ``pids``: of each name; more than one: it was restarted."""

    def __init__(self, root: Path, launcher: subprocess.Popen[bytes], steps: int) -> None:
        self._root, self._launcher, self._steps = root, launcher, steps
        self._tail = StepTail(TrialPaths(root).steps)
        self.step = 0
        self.series: dict[tuple[str, str], Series] = defaultdict(Series)
        self.pids: dict[str, set[int]] = defaultdict(set)

    def sample(self) -> None:
        self.step = max([self.step, *(r["step"] for r in self._tail.read() if r["kind"] == "train")])
        if not 0 < self.step < self._steps:  # it starts, or ends: curves, export, workers that stop
            return
        totals: dict[tuple[str, str], float] = defaultdict(float)
        with contextlib.suppress(psutil.Error):
            for name, process in processes(psutil.Process(self._launcher.pid)):
                with contextlib.suppress(psutil.Error, OSError):
                    for figure, value in look(process).items():
                        totals[name, figure] += value
                    self.pids[name].add(process.pid)
        totals |= {(f"folder {name}", "kib"): kib for name, kib in sizes(self._root).items()}
        for key, value in totals.items():
            self.series[key].add(self.step, value)


def watch(root: Path, command: Sequence[str], steps: int, every_s: float, output: Path) -> Watch:
    """Run to the end. Raises SystemExit with its output when it fails or does not end in time."""
    bound_s = START_S + STEP_S * steps
    with output.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
    watched = Watch(root, process, steps)
    deadline = time.monotonic() + bound_s
    try:
        while True:
            try:
                code = process.wait(every_s)
                break
            except subprocess.TimeoutExpired:
                if root.exists():
                    watched.sample()
            if time.monotonic() > deadline:
                raise SystemExit(
                    f"not done within {bound_s:g} s, at step {watched.step}:\n{output.read_text()[-3000:]}"
                )
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
    if code:
        raise SystemExit(f"the run failed with {code}:\n{output.read_text()[-3000:]}")
    return watched


def rows_of(watched: Watch, settled: int) -> list[dict[str, Any]]:
    """One per figure: where it began, where it ended, its slope and the verdict."""
    rows = []
    for (who, figure), series in sorted(watched.series.items()):
        found = trend(series, settled)
        rows.append(
            {
                "what": who,
                "figure": figure,
                "first": series.values[0],
                "last": series.values[-1],
                "mean": found.mean,
                "per_100_steps": found.slope,
                "error": found.error,
                "last_half": trend(series, series.steps[-1] // 2).slope,
                "verdict": found.verdict,
            }
        )
    return rows


def draw(watched: Watch, target: Path) -> None:
    """Resident memory of each process, descriptors, threads, and the folder's entries, over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figures = {"rss_mib": "resident memory, MiB", "fds": "file descriptors", "threads": "threads", "kib": "folder, KiB"}
    picture, axes = pyplot.subplots(2, 2, figsize=(11, 7), sharex=True, layout="constrained")
    for axis, (figure, title) in zip(axes.flat, figures.items(), strict=True):
        for (who, name), series in sorted(watched.series.items()):
            if name == figure and max(series.values) > 0:
                axis.plot(series.steps, series.values, label=who.removeprefix("folder "), linewidth=1)
        axis.set_title(title, fontsize=10)
        axis.set_yscale("log")
        axis.legend(fontsize=6, ncols=2)
    for axis in axes[1]:
        axis.set_xlabel("step")
    target.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(target, dpi=110)
    pyplot.close(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=float, default=0.5, help="seconds between two samples")
    parser.add_argument("--override", action="append", default=[], help="of the job; may be repeated")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through ``finally``: leave no run behind
    settled = min(SETTLED, options.steps // 4)
    folder = Path(tempfile.mkdtemp(prefix="soak_"))
    started = time.perf_counter()
    try:
        root = folder / "arith" / "soak"
        command = [sys.executable, "-m", "realsys.launch.cli", "run", *JOB, f"fileroot={folder}", "trial=soak"]
        command += [f"train.total_steps={options.steps}", *options.override]
        watched = watch(root, command, options.steps, options.every, folder / "output")
        if watched.step < options.steps // 2:
            raise SystemExit(f"the last sample was at step {watched.step} of {options.steps}: choose a smaller --every")
        rows = rows_of(watched, settled)
        restarted = {name: len(pids) for name, pids in watched.pids.items() if len(pids) > 1 and "child" not in name}
        log_kib = next(r["per_100_steps"] for r in rows if r["what"] == f"folder {STEPS}")  # NaN: too few samples
        draw(watched, RESULTS / "soak.png")
        report(
            "soak",
            rows,
            {
                "steps": options.steps,
                "seconds": round(time.perf_counter() - started, 1),
                "samples": len(watched.series["launcher", "fds"].steps),
                "settled_after": settled,
                "restarted": restarted or "none",
                "bytes_per_step": None if math.isnan(log_kib) else round(log_kib * 10.24),
                "growing": [f"{r['what']} {r['figure']}" for r in rows if r["verdict"] == "growing"],
                "machine_memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
                "override": options.override,
            },
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
