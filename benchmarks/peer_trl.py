"""The same job on this machine's cores, as TRL runs it and as realsys does, in pairs: completion tokens per second.

    python3 -m venv .venv-trl && .ci/install .venv-trl trl==1.16.0 torch==2.13.0
    python -m benchmarks.peer_trl --python .venv-trl/bin/python [--experiment arith smol] [--pairs 2] [--steps 12]

Both train the same model on the same prompts with groups of 8, as many optimizer steps per batch, the same learning
rate and the same longest completion. TRL generates with ``transformers`` and trains in one process, in turn; it has all
cores for each. realsys has the processes of the experiment's own allocation. The model of ``arith`` is the one that our
warm-up made, and that of ``smol`` comes from ``make smol``. The first steps of a run fill its pipeline and are left out
on both sides. ``over`` is realsys over TRL within a pair.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._jobs import run_job, warm_start
from benchmarks._pairs import SKIP, measure, spread
from benchmarks._table import report
from realsys.config.compose import compose
from realsys.config.paths import TrialPaths

TRL_SKIP = 1  # its first batch warms up
LOOP = Path(__file__).with_name("_peer_trl_loop.py")


@dataclass(frozen=True)
class Job:
    """An experiment, the settings of this comparison, and what TRL is given."""

    name: str
    overrides: list[str]
    model: Path
    data: Path

    def settings(self, steps: int, out: Path) -> dict[str, Any]:
        config = compose([f"experiment={self.name}", *self.overrides])
        return {
            "model": str(self.model),
            "data": str(self.data),
            "dtype": config.model.dtype,
            "completions": config.train.batch_groups * config.rollout.group_size,
            "group_size": config.rollout.group_size,
            "minibatches": config.train.ppo.minibatches,
            "microbatch": 64,
            "max_new_tokens": config.generation.sampling.max_new_tokens,
            "lr": config.train.optimizer.lr,
            "steps": steps,
            "threads": len(os.sched_getaffinity(0)),
            "out": str(out),
        }


def run_trl(python: Path, job: Job, steps: int, out: Path) -> float:
    """Completion tokens per second of TRL."""
    words = json.dumps(job.settings(steps, out))
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    done = subprocess.run([python, LOOP, words], capture_output=True, text=True, timeout=3600, env=offline)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"seconds"')]
    if done.returncode or len(lines) <= TRL_SKIP:
        raise SystemExit(f"TRL ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    steady = lines[TRL_SKIP:]
    return sum(line["tokens"] for line in steady) / sum(line["seconds"] for line in steady)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="interpreter that has trl")
    parser.add_argument("--experiment", nargs="+", choices=["arith", "smol"], default=["arith"])
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=16, help="of realsys")
    parser.add_argument("--trl-steps", type=int, default=6, help="batches of TRL")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="peer_trl_") as folder:
        root = Path(folder)
        for name in options.experiment:
            job = _job(name, root)
            for pair in range(options.pairs):
                speeds: dict[str, float] = {}
                for side in ("realsys", "trl") if pair % 2 == 0 else ("trl", "realsys"):
                    if side == "trl":
                        speeds[side] = run_trl(options.python, job, options.trl_steps, root / "trl")
                    else:
                        settings = [f"train.total_steps={options.steps}", *job.overrides]
                        trial = run_job(root, f"{name}-{pair}", settings, experiment=name)
                        speeds[side] = measure(TrialPaths(trial), 0.0)["tokens_per_s"]
                row = {f"{side}_tokens_per_s": round(speed) for side, speed in sorted(speeds.items())}
                rows.append({"job": name, "pair": pair, **row, "over": round(speeds["realsys"] / speeds["trl"], 2)})
                print(rows[-1], flush=True)
    found = {name: spread([row["over"] for row in rows if row["job"] == name]) for name in options.experiment}
    report("peer_trl", rows, {"steps": options.steps, "skip": SKIP, "over": found})


def _job(name: str, root: Path) -> Job:
    if name == "smol":
        config = compose(["experiment=smol"])
        return Job(name, ["evaluation.problems=0"], Path(config.model.path), Path(config.data.train))
    overrides = [*warm_start(root), "evaluation.problems=0"]
    warm = TrialPaths(root / "arith" / "warm")
    return Job(name, overrides, warm.final_model, warm.data / "train.jsonl")


if __name__ == "__main__":
    main()
