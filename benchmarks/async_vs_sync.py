"""The same job, synchronous (eta 0, no interruption) against asynchronous (eta 4, interruptible).

    python -m benchmarks.async_vs_sync [--steps 24] [--skip 4] [--repeat 2] [overrides]

One warm-up makes the model that every run starts from; then the two modes run in turn, with the same seeds, batch,
learning rate and stop condition. The first ``--skip`` steps are left out: they fill the pipeline. Reported per mode:
train steps per hour, answer tokens consumed by training per second, and where the trainer's time goes. What
bounds the ratio on one machine: generation and training each keep one core busy, so with equal halves overlap alone
gives at most 2; the rest comes from decoding with full batches while a synchronous run waits for its longest answers.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks._table import report

MODES = {
    "sync": ["asynchronous.max_head_offpolicyness=0", "asynchronous.interruptible=false"],
    "async": ["asynchronous.max_head_offpolicyness=4", "asynchronous.interruptible=true"],
}
PARTS = ("wait", "inf", "train", "save", "publish")


def launch(root: Path, trial: str, overrides: list[str]) -> Path:
    command = [sys.executable, "-m", "launch.cli", "run", "experiment=arith", f"fileroot={root}", f"trial={trial}"]
    result = subprocess.run(
        [*command, *overrides], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=3600
    )
    if result.returncode:
        raise SystemExit(
            f"{' '.join(command)} failed with {result.returncode}:\n{result.stdout[-3000:]}{result.stderr[-3000:]}"
        )
    return root / "arith" / trial


def train_records(trial: Path, skip: int) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (trial / "steps.jsonl").read_text().splitlines()]
    return [r for r in records if r["kind"] == "train"][skip:]


def measure(trial: Path, skip: int) -> dict[str, float]:
    """Steady-state figures of one run. Seconds are means per step."""
    steps = train_records(trial, skip)
    total = sum(s["seconds"]["total"] for s in steps)
    figures = {
        "steps_per_hour": 3600 * len(steps) / total,
        "consumed_tokens_per_s": sum(s["answer_tokens"] for s in steps) / total,
        "answer_tokens_per_step": statistics.mean(s["answer_tokens"] for s in steps),
        "staleness_max": max(s["staleness"]["max"] for s in steps),
    }
    return figures | {f"{part}_s": statistics.mean(s["seconds"][part] for s in steps) for part in PARTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--skip", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("overrides", nargs="*", help="further overrides, the same for both modes")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="async_vs_sync_"))
    try:
        warm = launch(root, "warm", ["train.total_steps=1", "train.batch_groups=8", "evaluation.problems=0"])
        common = [
            f"model.path={warm / 'checkpoint'}",
            "warmup.steps=0",
            "evaluation.problems=0",
            f"train.total_steps={options.steps}",
            *options.overrides,
        ]
        runs: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
        for repeat in range(options.repeat):
            for mode, overrides in MODES.items():
                trial = launch(root, f"{mode}-{repeat}", [*common, *overrides])
                runs[mode].append(measure(trial, options.skip))
        rows: list[dict[str, Any]] = [
            {"mode": mode} | {key: statistics.median(run[key] for run in figures) for key in figures[0]}
            for mode, figures in runs.items()
        ]
        ratios = [
            a["consumed_tokens_per_s"] / s["consumed_tokens_per_s"]
            for s, a in zip(runs["sync"], runs["async"], strict=True)
        ]
        report(
            "async_vs_sync",
            rows,
            {
                "ratio_consumed_tokens_per_s": statistics.median(ratios),
                "ratios": ratios,
                "steps": options.steps,
                "skip": options.skip,
                "overrides": options.overrides,
            },
        )
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
