"""The staleness policies in real runs of the arith job whose long prompts are slow.

    python -m benchmarks.slow_prompts [--steps 60] [--seconds 4]

The agent holds back each completion of a long prompt for some seconds, during which several versions are published: a
stand-in for tools and for long completions. The table has what staleness took from training and what that did to the
lengths (``length_ks``), and the share of long prompts among the trained ones.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks._jobs import records, run_job, warm_start
from benchmarks._table import report
from realsys.config.schema import Config
from realsys.rollout.agents.contract import AgentParts, Session
from realsys.rollout.agents.single_turn import SingleTurn
from realsys.rollout.environments import Task
from realsys.types import Episode

LONG = 24  # tokens of a prompt that is slow
SETTINGS = [
    "allocation=serve.d1+d1",
    "train.batch_groups=16",
    "rollout.agent=benchmarks.slow_prompts:SlowLongPrompts",
    "evaluation.problems=512",
]


class SlowLongPrompts(SingleTurn):
    """Single turn that holds back the episodes of long prompts for ``seconds``."""

    def __init__(self, parts: AgentParts, seconds: float) -> None:
        super().__init__(parts)
        self._seconds = seconds

    @staticmethod
    def longest_row(config: Config, seconds: float = 0.0) -> int:
        """Return the longest row of SingleTurn."""
        return SingleTurn.longest_row(config)

    async def run(self, task: Task, session: Session) -> Episode:
        """Return the episode of SingleTurn later. Its metric ``long`` is 1 for a long prompt."""
        episode = await super().run(task, session)
        is_long = len(task.prompt.ids) >= LONG
        await asyncio.sleep(self._seconds if is_long else 0.0)
        episode.metrics["long"] = float(is_long)
        return episode


def measure(trial: Path, policy: str) -> dict[str, Any]:
    """Return the figures of one run."""
    steps = records(trial, "train")
    accuracy = {record["eval_id"]: record["accuracy"] for record in records(trial, "eval")}
    lost = [sum(step["untrained"].get(reason, 0.0) for reason in ("stale", "masked")) for step in steps]
    seconds = sum(step["seconds"]["total"] for step in steps)
    return {
        "policy": policy,
        "before": accuracy["before"],
        "after": accuracy["after"],
        "lost_%": 100 * statistics.fmean(lost),
        "ks": statistics.fmean(step["length_ks"] for step in steps),
        "long_%": 100 * statistics.fmean(step["metrics"]["long"] for step in steps),
        "length": statistics.fmean(step["length_mean"] for step in steps),
        "staleness": statistics.fmean(step["staleness"]["mean"] for step in steps),
        "staleness_max": max(step["staleness"]["max"] for step in steps),
        "steps_per_h": 3600 * len(steps) / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=4.0, help="that a long prompt is held back")
    options = parser.parse_args()
    settings = [*SETTINGS, f"train.total_steps={options.steps}", f"rollout.agent_args.seconds={options.seconds}"]
    root = Path(tempfile.mkdtemp(prefix="slow_prompts_"))
    try:
        warm = warm_start(root)
        rows = []
        for policy in ("train", "mask", "drop"):
            trial = run_job(root, policy, [*warm, *settings, f"asynchronous.stale_policy={policy}"])
            rows.append(measure(trial, policy))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    report("slow_prompts", rows, {"settings": settings})


if __name__ == "__main__":
    main()
