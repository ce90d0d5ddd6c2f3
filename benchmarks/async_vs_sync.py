"""The same job, synchronous (eta 0, no interruption) against asynchronous (eta 4, interruptible).

    python -m benchmarks.async_vs_sync [--groups 64 16] [--sequences 10240] [--repeat 2] [--override FIELD=VALUE]

One warm-up makes the model that every run starts from; then the two modes run in turn, with the same seeds, batch,
learning rate and stop condition, on one training rank and one server: a core each. The first ``SKIP`` steps are left
out: they fill the pipeline. Reported per mode: train steps per hour, answer tokens consumed by training per second, and
where the trainer's time goes (seconds per step).

``limit`` is what perfect overlap would give: the synchronous step over its part that is not waiting for generation. A
machine that splits its devices so that both sides take equally long has a limit of 2 from overlap, and more only
because a synchronous run decodes its longest answers with nearly empty batches.

Half a batch to one batch decodes at a time, in both modes. More does not help the synchronous run, and makes each
weight update of the asynchronous one recompute more prefixes (384 answers in flight at 16 prompts a batch: ratio 1.1).
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks._jobs import records, run_job, warm_start
from benchmarks._table import report

MODES = {
    "sync": ["asynchronous.max_staleness=0", "asynchronous.interruptible=false"],
    "async": ["asynchronous.max_staleness=4", "asynchronous.interruptible=true"],
}
ANSWERS = 8  # per prompt in experiment=arith
SKIP = 6
ALLOCATION = "allocation=serve.d1p1m1+d1p1m1"
PARTS = ("wait", "inf", "train", "save", "publish")


def measure(trial: Path, skip: int) -> dict[str, float]:
    """Steady-state figures of one run. Seconds are means per step."""
    steps = records(trial, "train")[skip:]
    total = sum(s["seconds"]["total"] for s in steps)
    figures = {
        "steps_per_hour": 3600 * len(steps) / total,
        "consumed_tokens_per_s": sum(s["answer_tokens"] for s in steps) / total,
        "answer_tokens_per_step": statistics.mean(s["answer_tokens"] for s in steps),
        "staleness_max": max(s["staleness"]["max"] for s in steps),
    }
    return figures | {f"{part}_s": statistics.mean(s["seconds"][part] for s in steps) for part in PARTS}


def compare(root: Path, groups: int, repeats: int, common: list[str], sequences: int) -> list[dict[str, Any]]:
    """Both modes in turn at one batch size: a row per mode, medians over the repeats, the ratio of paired runs."""
    steps = max(SKIP + 8, sequences // (groups * ANSWERS))
    runs: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    for repeat in range(repeats):
        for mode, overrides in MODES.items():
            batch = [
                f"train.batch_groups={groups}",
                f"train.total_steps={steps}",
                f"rollout.max_concurrent={max(8, groups // 4)}",  # per RolloutWorker, of two
            ]
            trial = run_job(root, f"{mode}-{groups}-{repeat}", [*common, *batch, *overrides])
            runs[mode].append(measure(trial, SKIP))
    pairs = zip(runs["sync"], runs["async"], strict=True)
    ratio = statistics.median(a["consumed_tokens_per_s"] / s["consumed_tokens_per_s"] for s, a in pairs)
    rows: list[dict[str, Any]] = []
    for mode, figures in runs.items():
        medians = {key: statistics.median(run[key] for run in figures) for key in figures[0]}
        rows.append({"groups": groups, "mode": mode} | medians)
    total = sum(rows[0][f"{part}_s"] for part in PARTS)
    rows[0] |= {"async_over_sync": None, "limit": None}
    rows[1] |= {"async_over_sync": ratio, "limit": total / (total - rows[0]["wait_s"])}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs="+", default=[64, 16], help="batch sizes, in prompts")
    parser.add_argument("--sequences", type=int, default=10240, help="answers trained per run, about")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--override", action="append", default=[], help="the same for both modes; may be repeated")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="async_vs_sync_"))
    try:
        common = [*warm_start(root), "evaluation.problems=0", ALLOCATION, *options.override]
        rows: list[dict[str, Any]] = []
        for groups in options.groups:
            rows += compare(root, groups, options.repeat, common, options.sequences)
        report(
            "async_vs_sync", rows, {"answers": ANSWERS, "skip": SKIP, "repeat": options.repeat, "common": common[1:]}
        )
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
