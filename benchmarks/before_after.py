"""The arith job of this checkout against the same job of another one: has a change made training slower?

    git worktree add ../before COMMIT
    python -m benchmarks.before_after ../before [--pairs 4] [--steps 90] [--groups 16]

One warm-up of the other checkout makes the model that every run starts from. Then come pairs of runs, one of each
checkout, in turn now-before and before-now, with the same seeds and settings, on one training rank and one server. The
first ``SKIP`` steps of a run are left out: they fill the pipeline.

    tokens_per_s   sampled tokens that training consumed, per second, from the end of step SKIP to the end of the last
    cpu_s_per_1k   CPU seconds of all processes of the run, from its start to its end, per 1,000 of these tokens

Reported are the mean of ``now / before`` over the pairs, its standard error, the least and the greatest. The same
program twice differs by several per cent, so the error says how far the answer can be trusted.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks._table import report
from benchmarks.ledger_cost import SKIP, TIMEOUT_S, spread
from realsys.config.paths import TrialPaths
from realsys.telemetry.steps import read_steps

NOW = Path(__file__).resolve().parents[1]
COMMON = ["allocation=sglang.d1p1m1+d1p1m1", "evaluation.problems=0"]  # an allocation that every checkout reads


def launch(checkout: Path, root: Path, trial: str, overrides: list[str]) -> tuple[TrialPaths, float]:
    """Run to the end; returns where it is and the CPU seconds of all its processes."""
    command = [sys.executable, "-m", "launch.cli", "run", "experiment=arith", f"fileroot={root}", f"trial={trial}"]
    before = os.times()
    result = subprocess.run(
        [*command, *overrides],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
    )
    if result.returncode:
        raise SystemExit(
            f"{checkout}: failed with {result.returncode}:\n{result.stdout[-3000:]}{result.stderr[-3000:]}"
        )
    after = os.times()  # of children that were waited for, and of theirs
    return TrialPaths(root / "arith" / trial), (
        after.children_user + after.children_system - before.children_user - before.children_system
    )


def measure(paths: TrialPaths, cpu_s: float) -> dict[str, float]:
    """Steady-state figures of one run."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=90, help="per run")
    parser.add_argument("--groups", type=int, default=16, help="batch size in prompts")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through ``finally``: leave no run behind
    checkouts = {"now": NOW, "before": options.before.resolve()}
    root = Path(tempfile.mkdtemp(prefix="before_after_"))
    try:
        warm_up = ["train.total_steps=1", "train.batch_groups=8", "evaluation.problems=0"]
        warm, _ = launch(checkouts["before"], root, "warm", warm_up)
        overrides = [
            *COMMON,
            f"model.path={warm.final_model}",
            "warmup.steps=0",
            f"train.batch_groups={options.groups}",
            f"train.total_steps={options.steps}",
            f"rollout.max_concurrent={max(4, options.groups // 4)}",
        ]
        rows: list[dict[str, Any]] = []
        for pair in range(options.pairs):
            found: dict[str, dict[str, Any]] = {}
            for mode in ("now", "before") if pair % 2 == 0 else ("before", "now"):
                paths, cpu_s = launch(checkouts[mode], root, f"{mode}-{pair}", overrides)
                found[mode] = {"pair": pair, "mode": mode} | measure(paths, cpu_s)
                shutil.rmtree(paths.root)
                print(found[mode], flush=True)
            rows += [found["now"], found["before"]]
        ratios = {
            figure: spread([now[figure] / before[figure] for now, before in zip(rows[::2], rows[1::2], strict=True)])
            for figure in ("tokens_per_s", "cpu_s_per_1k")
        }
        ends = [
            {"pair": "now/before", "mode": name} | {figure: ratio[name] for figure, ratio in ratios.items()}
            for name in ("mean", "error", "least", "greatest")
        ]
        meta = {"pairs": options.pairs, "steps": options.steps, "groups": options.groups, "skip": SKIP}
        report("before_after", [*rows, *ends], {**meta, "now_over_before": ratios})
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
