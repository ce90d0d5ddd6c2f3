"""Servers that share devices with ranks, against fixed splits, in simulated trials: ``python -m benchmarks.lending``.

Eight devices, over ten distributions of lengths: five were recorded from short runs of the arith jobs (``--record``),
and five are formulas. In the cases ``growing`` completions become four times as long in the middle of the run. Long
prompts cost the trainer time that does not grow, so the best split moves from 3 to 5 servers. Each run checks all
invariants at its end.
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks._table import RESULTS, report
from realsys.lab.simulation.rollout import recorded_lengths
from realsys.lab.simulation.scenarios import plan
from realsys.lab.simulation.simulation import Simulation

DEVICES, MEAN, LONGEST = 8, 2000, 16000  # tokens
FIRST = 8  # steps that fill the pipeline: they are not measured
SIZE = 8  # completions of a group


class Work(NamedTuple):
    """Steps, groups of a batch, seconds of a device per trained token, and prompt tokens that the trainer computes."""

    steps: int = 60
    groups: int = 32
    train_s: float = 5.7e-4  # about as long as a server needs to sample it
    prompt: int = 0


EVEN = Work()
END, SHORT, LONG = (Work(steps, groups, 1.2e-4, 4096) for steps, groups in ((60, 32), (120, 32), (60, 128)))
COSTS = {
    "train.total_steps": 1_000_000,
    "rollout.group_size": SIZE,
    "rollout.workers": 16,
    "rollout.max_concurrent": 48,
    "asynchronous.max_staleness": 4,
    "sim.server.tokens_per_s": 60,
    "sim.server.s_per_completion": 0.0004,
    "sim.server.total_tokens_per_s": 1_000_000,
    "sim.server.max_running": 96,
    "sim.server.prefill_tokens_per_s": 15_000,
    "sim.server.stage_s": 3,
    "sim.lengths.longest": LONGEST,
}
FORMULAS = {
    **{f"lognormal {sigma}": {"mean": MEAN, "sigma": sigma} for sigma in (0.5, 0.9, 1.3)},
    "pareto 1.1": {"kind": "pareto", "exponent": 1.1, "shortest": 600},
    "mixed": {"mean": MEAN, "sigma": 1.0, "prompt_share": 0.5},
}
SPLITS = [f"serve.d{servers}+d{DEVICES - servers}" for servers in range(2, 7)]
TOGETHER = f"serve.d{DEVICES}|d{DEVICES}"
MIXED = [f"serve.d{DEVICES - lent}+serve.d{lent}|d{lent}" for lent in range(3, 7)]
BEFORE, AFTER = {"mean": 600, "sigma": 0.9}, {"mean": 2400, "sigma": 0.9}


def record(trials: list[Path]) -> None:
    """Write the quantiles of the lengths in recorded trials, over their mean, to ``results/lengths.json``."""
    rows = []
    for trial in trials:
        lengths = recorded_lengths(str(trial))
        mean = fmean(lengths)
        quantiles = [round(lengths[(len(lengths) - 1) * k // 100] / mean, 3) for k in range(101)]
        rows.append({"run": trial.name, "completions": len(lengths), "mean": mean, "quantiles_over_mean": quantiles})
    report("lengths", rows, {"command": "python -m benchmarks.lending --record TRIAL..."})


def distributions() -> dict[str, dict[str, Any]]:
    """Return name -> fields of ``sim.lengths``. The recorded lengths are scaled to the mean of the formulas."""
    found: dict[str, dict[str, Any]] = {}
    for row in json.loads((RESULTS / "lengths.json").read_text())["rows"]:
        values = [max(1, round(MEAN * share)) for share in row["quantiles_over_mean"]]
        found[f"recorded {row['run']}"] = {"kind": "values", "values": values}
    return found | FORMULAS


def growing(work: Work) -> dict[str, Any]:
    """Return lengths that grow in the middle of the run."""
    middle, width = work.steps * work.groups // 2, 2 * work.groups
    return {**BEFORE, "growth": 4.0, "grows_from": middle - width, "grows_to": middle + width}


def simulate(allocation: str, lengths: dict[str, Any], work: Work) -> dict[str, Any]:
    """Return throughput in trained tokens per second, and the use of the trainer."""
    per_token = work.train_s / int(allocation.rpartition("d")[2])
    sim = {
        "train.batch_groups": work.groups,
        "sim.steps": work.steps,
        "sim.trainer.step_s": 2 + work.groups * SIZE * work.prompt * per_token,
        "sim.trainer.step_s_per_token": f"{per_token:.9f}",
        "allocation": allocation,
        **{f"sim.lengths.{name}": value for name, value in lengths.items()},
    }
    simulation = Simulation(plan("lognormal", [f"{path}={value}" for path, value in (COSTS | sim).items()]))
    simulation.run()
    account, measured = simulation.account, simulation.account.steps[FIRST:]
    seconds = measured[-1]["time"] - measured[0]["time"]
    return {
        "allocation": allocation,
        "tokens_per_s": sum(step["tokens"] for step in measured[:-1]) / seconds,
        "busy_%": 100 * account.busy_s / simulation.clock.now,
        "turns_per_step": len(account.waits.get("switch", ())) / len(account.steps),
    }


def case(name: str, lengths: dict[str, Any], work: Work) -> list[dict[str, Any]]:
    """Return the rows of all allocations, each with its throughput over that of the best split."""
    rows = []
    for form, allocations in (("split", SPLITS), ("together", [TOGETHER]), ("mixed", MIXED)):
        for each in allocations:
            rows.append({"case": name, "form": form, **simulate(each, lengths, work)})
    best = max(row["tokens_per_s"] for row in rows if row["form"] == "split")
    for row in rows:
        row["of_best_split"] = row["tokens_per_s"] / best
        print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lending", description="Shared devices in simulation.")
    parser.add_argument("--record", type=Path, nargs="+", metavar="TRIAL", help="trials whose lengths are stored first")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    if arguments.record:
        record(arguments.record)
    rows = [row for name, lengths in distributions().items() for row in case(name, lengths, EVEN)]
    for work in (SHORT, LONG):
        rows += case(f"growing, batches of {work.groups * SIZE}", growing(work), work)
    rows += case("before", BEFORE, END) + case("after", AFTER, END)
    report("lending", rows, {"command": "python -m benchmarks.lending", "devices": DEVICES, "seed": 1})


if __name__ == "__main__":
    main()
