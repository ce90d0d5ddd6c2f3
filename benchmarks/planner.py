"""The planner against measurements: fit on one run of the arith job, predict others.

    python -m benchmarks.planner --root DIR [--minutes 20] [--cases base eta0] [--override FIELD=VALUE]

``base`` is fitted, and every other case of ``CASES`` is predicted and measured. The runs stay in ``--root``, and a run
that is there is not made again. So the benchmark can be made in sittings: each call starts the missing runs, in order,
until ``--minutes`` are over. When all are there, it predicts, prints the table and writes the result.

Other programs on the machine, or its clock, may make it slower or faster between two runs. So ``base`` is repeated
between the cases. ``machine`` is its throughput just before and after a case, on average, over that of the fitted run,
and the measured throughput is divided by it.

The policy does not learn: what it learns changes the lengths and how many completions have a gradient, differently in
each run. ``computed`` is the share of the sampled tokens that the trainer computes.

Throughput is that of the steps in between: the first ``SKIP`` fill the pipeline, and nothing is generated during the
last eta + 1. A case with other lengths is predicted with the ratio of the mean demonstrations, which is known before
the run.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._jobs import records, run_job, warm_start
from benchmarks._table import report
from realsys.config.compose import with_overrides
from realsys.config.paths import TrialPaths, read_config
from realsys.config.schema import Config
from realsys.data.arith import Generator, demonstration
from realsys.lab.planner.cost_fit import fit, recorded_outcome
from realsys.lab.planner.predictions import predict
from realsys.lab.planner.recorded_run import read_recording

SKIP = 6
ANSWERS = 8  # completions per prompt in experiment=arith
BASE = "base"
COMMON = [
    "allocation=serve.d1+d1",
    "evaluation.problems=0",
    "train.batch_groups=32",
    "train.optimizer.lr=1e-12",
    "record.keep_steps=200",
]
CASES: dict[str, list[str]] = {
    BASE: [],
    "eta0": ["asynchronous.max_staleness=0", "asynchronous.interruptible=false"],
    "eta1": ["asynchronous.max_staleness=1"],
    "batch16": ["train.batch_groups=16"],
    "batch128": ["train.batch_groups=128"],
    "ranks2": ["allocation=serve.d1+d2"],
    "servers2": ["allocation=serve.d2+d1"],
    "longer": ["data.arith.alpha=0.5"],
}


def runs_of(cases: Sequence[str]) -> list[str]:
    """Return the names of all runs in their order: the repetition of the base after a case has its name."""
    return [BASE, *(run for case in cases if case != BASE for run in (case, f"{BASE}-{case}"))]


def overrides_of(case: str, sequences: int) -> list[str]:
    """Return all settings of a case. Its steps train about ``sequences`` completions."""
    settings = dict(text.split("=", 1) for text in [*COMMON, *CASES.get(case, [])])
    eta = int(settings.get("asynchronous.max_staleness", "4"))
    steps = max(SKIP + eta + 16, sequences // (int(settings["train.batch_groups"]) * ANSWERS))
    return [*(f"{field}={value}" for field, value in settings.items()), f"train.total_steps={steps}"]


def run_missing(root: Path, runs: list[str], sequences: int, given: list[str], minutes: float) -> list[str]:
    """Make the runs that are not in ``root``, while there is time. Return those that are still missing."""
    ends = time.monotonic() + 60 * minutes
    start = [f"model.path={TrialPaths(root / 'arith' / 'warm').final_model}", "warmup.steps=0"]
    if not TrialPaths(root / "arith" / "warm").final_model.exists():
        start = warm_start(root)
    missing = [run for run in runs if not TrialPaths(root / "arith" / run).summary.exists()]
    for run in list(missing):
        if time.monotonic() > ends:
            break
        shutil.rmtree(root / "arith" / run, ignore_errors=True)  # a run that was cut off
        length = sequences if run in CASES else sequences // 2
        run_job(root, run, [*start, *overrides_of(run, length), *given])
        missing.remove(run)
        print(f"{run}: {measure(root / 'arith' / run)}", flush=True)
    return missing


def measure(trial: Path) -> dict[str, float]:
    """Return the throughput of a run between its first and its last steps.

    ``computed``: share of the sampled tokens that the trainer computes; the others have no advantage.
    """
    eta = read_config(TrialPaths(trial).config).asynchronous.max_staleness
    steps = records(trial, "train")[SKIP : -(eta + 1)]
    total = sum(step["seconds"]["total"] for step in steps)
    return {
        "steps_per_h": 3600 * len(steps) / total,
        "tokens_per_s": sum(step["answer_tokens"] for step in steps) / total,
        "waits": sum(step["seconds"]["wait"] for step in steps) / total,
        "computed": sum(step["stats"]["tokens"] for step in steps) / sum(step["answer_tokens"] for step in steps),
    }


def scale_of(base: Config, config: Config) -> float:
    """Return the mean length of the demonstrations of ``config`` over that of ``base``."""
    if base.data.arith == config.data.arith:
        return 1.0
    return _mean_demonstration(config) / _mean_demonstration(base)


def _mean_demonstration(config: Config, count: int = 4000) -> float:
    generator = Generator(config.data.arith, config.seed, "train")
    lengths = [len(demonstration(generator.operands(False), 0.0, generator.rng).response) + 1 for _ in range(count)]
    return statistics.mean(lengths)


def predict_all(root: Path, cases: list[str], cores: float) -> list[dict[str, Any]]:
    """Fit the base, and predict every case. ``cases``: the base first, in the order of their runs."""
    recording = read_recording(root / "arith" / BASE)
    fitted = fit(recording, cores)
    speeds = [measure(root / "arith" / run)["steps_per_h"] for run in runs_of(cases) if run.startswith(BASE)]
    rows = []
    for k, case in enumerate(cases):
        config = with_overrides(recording.config, CASES[case])
        found = predict(fitted, config, case, scale=scale_of(recording.config, config)).steps_per_h
        measured = measure(root / "arith" / case)
        machine = (speeds[k - 1] + speeds[k]) / 2 / speeds[0] if k else 1.0
        steps_per_h = measured["steps_per_h"] / machine
        rows.append(
            {
                "case": case,
                "settings": " ".join(CASES[case]),
                "predicted": found.mid,
                "low": found.low,
                "high": found.high,
                "measured": steps_per_h,
                "machine": machine,
                "error_%": 100 * (found.mid / steps_per_h - 1),
                "inside": found.holds(steps_per_h),
                "waits": measured["waits"],
                "computed": measured["computed"],
            }
        )
        print(rows[-1], flush=True)
    print(f"measured of the fitted run: {recorded_outcome(recording)}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("build/planner"), help="folder of the runs")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no run after this time")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--sequences", type=int, default=15360, help="completions trained per run, about")
    parser.add_argument("--cores", type=float, default=2.0, help="cores of this machine")
    parser.add_argument("--override", action="append", default=[], help="the same for all runs; may be repeated")
    parser.add_argument("--rough", action="store_true", help="print only: do not write the result")
    options = parser.parse_args()
    cases = list(dict.fromkeys([BASE, *options.cases]))
    missing = run_missing(options.root.resolve(), runs_of(cases), options.sequences, options.override, options.minutes)
    if missing:
        print(f"still missing: {' '.join(missing)}; call again")
        return
    rows = predict_all(options.root.resolve(), cases, options.cores)
    others = [row for row in rows if row["case"] != BASE]
    meta = {
        "common": COMMON,
        "sequences": options.sequences,
        "cores_assumed": options.cores,
        "median_error_%": statistics.median(abs(row["error_%"]) for row in others) if others else 0.0,
        "inside": sum(row["inside"] for row in others),
        "others": len(others),
        "slowest_%": 100 * (min(row["machine"] for row in rows) - 1),
        "fastest_%": 100 * (max(row["machine"] for row in rows) - 1),
    }
    if options.rough:
        print(meta)
    else:
        report("planner", rows, meta)


if __name__ == "__main__":
    main()
