"""Log-probs of engine and trainer over 50 versions: ``python -m benchmarks.agreement``.

One whole arith job on this machine at a learning rate of nothing, so that all versions are the same weights and
every difference is numerics; with updates in the middle of answers. ``--lr`` gives a real one: then only the tokens
that the trained version sampled are compared, and the others show how far the policy has moved. On a busy machine
it ends with fewer versions, after ``--seconds`` of training.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks._jobs import records, run_job
from benchmarks._table import report

SMALL = [
    "allocation=serve.d1+d1",
    "data.arith.max_operands=6",
    "data.arith.train_size=2000",
    "data.arith.demo_size=400",
    "generation.sampling.min_new_tokens=40",
    "generation.sampling.max_new_tokens=64",
    "generation.embedded.context_length=128",
    "warmup.steps=20",
    "warmup.batch=32",
    "train.batch_groups=4",
    "rollout.group_size=4",
    "rollout.workers=1",
    "rollout.reward.wrong=-1.0",
    "train.ppo.advantage.mean=none",
    "train.ppo.advantage.std=none",
    "evaluation.problems=0",
]
START_AND_STOP_S = 120  # more than the phases before and after training take


def run(folder: str, versions: int, eta: int, lr: float, seconds: float) -> list[dict[str, Any]]:
    """Train records of the job."""
    overrides = [f"train.total_steps={versions}", f"asynchronous.max_staleness={eta}"]
    overrides += [f"train.max_seconds={seconds}", f"train.optimizer.lr={lr}"]
    trial = run_job(Path(folder), "agreement", [*SMALL, *overrides], timeout_s=seconds + START_AND_STOP_S)
    return records(trial, "train")


def row(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """A stretch of versions."""
    found = [r["agreement"] for r in steps if r["agreement"]["tokens"]]
    every = [r["stats"] for r in steps]
    return {
        "versions": f"{steps[0]['version'] - 1}-{steps[-1]['version'] - 1}",
        "tokens compared": sum(a["tokens"] for a in found),
        "of all": sum(a["tokens"] for a in found) / sum(r["answer_tokens"] for r in steps),
        "mean": statistics.mean(a["difference_mean"] for a in found) if found else "",
        "max": max((a["difference_max"] for a in found), default=""),
        "ratio - 1": max((abs(a["ratio"] - 1) for a in found), default=""),
        "mean, all tokens": statistics.mean(s["inf/logprob_difference_mean"] for s in every),
        "max, all tokens": max(s["inf/logprob_difference_max"] for s in every),
        "warnings": sum(bool(a["warning"]) for a in found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agreement", description="Engine against trainer.")
    parser.add_argument("--versions", type=int, default=50)
    parser.add_argument("--eta", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-30, help="a field above 0; 1e-30 changes no bit")
    parser.add_argument("--seconds", type=float, default=120.0, help="stop training after this long")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = run(folder, arguments.versions, arguments.eta, arguments.lr, arguments.seconds)
    stretch = max(1, len(found) // 5)
    rows = [row(found[start : start + stretch]) for start in range(0, len(found), stretch)]
    # numbers this small would all show as 0.000
    shown = [{k: f"{v:.1e}" if isinstance(v, float) and k != "of all" else v for k, v in r.items()} for r in rows]
    report("agreement", shown, vars(arguments))


if __name__ == "__main__":
    main()
