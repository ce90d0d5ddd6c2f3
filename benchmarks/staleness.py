"""The staleness ablation of the AReaL paper in small: plain and decoupled PPO at eta 0, 2, 4 and 8.

    python -m benchmarks.staleness [--seeds 1 2 3] [--minutes 60] [--override FIELD=VALUE]

Every arm trains the arith task from the same warmed-up model. Steps are small (16 prompts of 8 completions) and the
trainer is slower than generation, so that the data reaches the staleness that eta allows. Plain PPO needs no inference
pass; here it gets the same one, because a faster trainer would have fresher data. The clip range is small: staleness
matters where the ratio is clipped.

The table has the staleness that was reached, beside the accuracy. Results are kept after each run, and a run that is
already in the file is not repeated: with ``--minutes`` the whole table can be made in several sittings.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._jobs import records, run_job, warm_start
from benchmarks._table import RESULTS, format_table, report
from realsys.algorithm import dataflows
from realsys.config.dataflow import Dataflow
from realsys.config.schema import Config

NAME = "staleness"
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "staleness.png"
ETAS = (0, 2, 4, 8)
LAST = 20  # steps in the mean of the accuracy in training
SETTINGS = [
    "allocation=sglang.d1p1m1+d1p1m1",
    "asynchronous.stale_policy=train",
    "train.batch_groups=16",
    "train.total_steps=250",
    "train.ppo.eps_clip=0.05",
    "train.ppo.behav_imp_weight_cap=5.0",
    "evaluation.problems=512",
]
ARMS = {
    "decoupled": ["train.ppo.use_decoupled_loss=true"],
    "plain": ["train.ppo.use_decoupled_loss=false", "train.ppo.algorithm=benchmarks.staleness:with_inference"],
}


def with_inference(config: Config) -> Dataflow:
    """Return the dataflow of PPO with the inference pass of the decoupled loss. The loss does not read its result."""
    ppo = config.train.ppo.model_copy(update={"use_decoupled_loss": True})
    return dataflows.ppo(config.model_copy(update={"train": config.train.model_copy(update={"ppo": ppo})}))


def measure(trial: Path, arm: str, eta: int, seed: int) -> dict[str, Any]:
    """Return the figures of one run."""
    accuracy = {r["eval_id"]: r["accuracy"] for r in records(trial, "eval")}
    steps = records(trial, "train")
    return {
        "arm": arm,
        "eta": eta,
        "seed": seed,
        "before": accuracy["before"],
        "after": accuracy["after"],
        "train_last": statistics.fmean(s["accuracy"] for s in steps[-LAST:]),
        "staleness": statistics.fmean(s["staleness"]["mean"] for s in steps),
        "staleness_max": max(s["staleness"]["max"] for s in steps),
        "w_mean": statistics.fmean(s["stats"]["w_mean"] for s in steps if s["stats"]["w_mean"] is not None),
        "w_max": max(s["stats"]["w_max"] for s in steps),
        "clip_fraction": statistics.fmean(s["stats"]["clip_fraction"] for s in steps),
        "curve": [round(s["accuracy"], 4) for s in steps],
    }


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return mean and standard error over seeds, one line per arm and eta."""
    lines = []
    for arm, eta in dict.fromkeys((row["arm"], row["eta"]) for row in rows):
        own = [row for row in rows if (row["arm"], row["eta"]) == (arm, eta)]
        after = [row["after"] for row in own]
        error = statistics.stdev(after) / math.sqrt(len(after)) if len(after) > 1 else math.nan
        means = {name: statistics.fmean(row[name] for row in own) for name in ("train_last", "staleness", "w_mean")}
        line = {"arm": arm, "eta": eta, "seeds": len(own), "after": statistics.fmean(after), "error": error}
        lines.append(line | means | {"w_max": max(row["w_max"] for row in own)})
    return lines


def draw(rows: Sequence[dict[str, Any]]) -> None:
    """Draw final accuracy against eta, and the learning curves, to docs/images."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    lines = summary(rows)
    for arm, colour in zip(ARMS, ("tab:blue", "tab:orange"), strict=True):
        own = [line for line in lines if line["arm"] == arm]
        errors = [0.0 if math.isnan(line["error"]) else line["error"] for line in own]
        left.errorbar(
            [line["eta"] for line in own], [line["after"] for line in own], errors, label=arm, color=colour, marker="o",
            capsize=3,
        )  # fmt: skip
        for eta, style in zip(ETAS, ("-", "--", "-.", ":"), strict=True):
            curves = [row["curve"] for row in rows if (row["arm"], row["eta"]) == (arm, eta)]
            if curves:
                smooth = np.convolve(np.mean(curves, axis=0), np.ones(10) / 10, mode="valid")
                right.plot(smooth, style, color=colour, label=f"{arm}, eta {eta}", linewidth=1)
    left.set(xlabel="eta", ylabel="held-out accuracy", xticks=ETAS, title="after training, mean and standard error")
    right.set(xlabel="step", ylabel="accuracy in training", title="mean over seeds and 10 steps")
    left.legend()
    right.legend(fontsize=7)
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--etas", type=int, nargs="+", default=list(ETAS))
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run after this time")
    parser.add_argument("--override", action="append", default=[], help="for every arm; may be repeated")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    settings = [*SETTINGS, *options.override]
    rows = kept_rows(settings)
    done = {(row["arm"], row["eta"], row["seed"]) for row in rows}
    root = Path(tempfile.mkdtemp(prefix="staleness_"))
    try:
        warm = warm_start(root)
        for seed in options.seeds:
            for eta in options.etas:
                for arm, own in ARMS.items():
                    if (arm, eta, seed) in done or time.monotonic() > deadline:
                        continue
                    lag = [f"asynchronous.max_staleness={eta}", f"seed={seed}"]
                    trial = run_job(root, f"{arm}-{eta}-{seed}", [*warm, *settings, *own, *lag])
                    rows.append(measure(trial, arm, eta, seed))
                    report(NAME, sorted(rows, key=_order), {"settings": settings})
                    shutil.rmtree(trial)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(format_table(summary(sorted(rows, key=_order))))
    draw(rows)


def kept_rows(settings: list[str]) -> list[dict[str, Any]]:
    """Return the runs that are in the result file already; none if they were made with other settings."""
    path = RESULTS / f"{NAME}.json"
    if not path.exists():
        return []
    kept = json.loads(path.read_text("utf-8"))
    return list(kept["rows"]) if kept["meta"]["settings"] == settings else []


def _order(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["arm"], row["eta"], row["seed"]


if __name__ == "__main__":
    main()
