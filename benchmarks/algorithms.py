"""Every preset of configs/algorithm on the arith task, from one and the same warmed-up model.

    python -m benchmarks.algorithms [--steps 30] [--presets grpo rloo ...] [--override FIELD=VALUE]

Shows that each of them trains: held-out accuracy before and after, with the experiment's settings, which are tuned for
none of them. Differences of a few points between presets say nothing (one seed; the standard error of an accuracy is
about 2 points).
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from benchmarks._jobs import records, run_job, warm_start
from benchmarks._table import report

PRESETS = sorted(path.stem for path in (Path(__file__).parents[1] / "configs" / "algorithm").glob("*.yaml"))
#: settings that a paper leaves to the user, here in units of the arith task: answers of at most 200 tokens
TASK = {
    "dapo": ["train.ppo.overlong.buffer=40"],
    "gspo": ["train.ppo.eps_clip=0.02", "train.ppo.eps_clip_higher=0.02"],  # short answers: their ratio moves more
    "ppo": ["roles.critic.optimizer.lr=3e-4"],
    "decoupled_ppo_critic": ["roles.critic.optimizer.lr=3e-4"],
}


def measure(preset: str, trial: Path) -> dict[str, Any]:
    accuracy = {r["eval_id"]: 100 * r["accuracy"] for r in records(trial, "eval")}
    steps = records(trial, "train")
    last = steps[-5:]
    return {
        "preset": preset,
        "before": accuracy["before"],
        "after": accuracy["after"],
        "points": accuracy["after"] - accuracy["before"],
        "train_accuracy_first": 100 * steps[0]["accuracy"],
        "train_accuracy_last": 100 * sum(s["accuracy"] for s in last) / len(last),
        "grad_norm": sum(s["stats"]["grad_norm"] for s in last) / len(last),
        "entropy": last[-1]["stats"]["entropy_mean"],
        "staleness": sum(s["staleness"]["mean"] for s in steps) / len(steps),
        "step_s": sum(s["seconds"]["total"] for s in steps) / len(steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=PRESETS)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--override", action="append", default=[], help="for every preset; may be repeated")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="algorithms_"))
    try:
        common = [*warm_start(root), f"train.total_steps={options.steps}", *options.override]
        rows = []
        for preset in options.presets:
            trial = run_job(root, preset, [f"algorithm={preset}", *common, *TASK.get(preset, [])])
            rows.append(measure(preset, trial))
            print(json.dumps(rows[-1]), flush=True)
        report("algorithms", rows, {"steps": options.steps, "task_settings": TASK, "common": common[1:]})
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
