"""Staleness policies in simulated trials: ``python -m benchmarks.simulate``.

The scenarios of ``realsys simulate``, small and large, under each ``stale_policy``, against a trial whose bound on
staleness is never reached: its buffer is never empty. Every run checks all invariants at its end.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import time
from typing import Any

from benchmarks._table import report
from realsys.lab.simulate import results
from realsys.lab.simulation.scenarios import plan
from realsys.lab.simulation.simulation import Simulation

SIZES = {"8 x 32": (8, 32), "64 x 512": (64, 512)}
LONG = 1000  # steps
UNBOUNDED = "eta=50"
POLICIES = ("train", "mask", "drop", UNBOUNDED)
#: Name -> scenario and overrides. In ``mixed`` every prompt has long and short completions, so that nearly every group
#: has a long one.
SCENARIOS = {
    "lognormal": ("lognormal", ()),
    "pareto": ("pareto", ()),
    "mixed": ("lognormal", ("sim.lengths.sigma=1.0", "sim.lengths.prompt_share=0.5")),
}


def simulate(scenario: str, size: str, policy: str, steps: int) -> dict[str, Any]:
    servers, workers = SIZES[size]
    name, overrides = SCENARIOS[scenario]
    settings = [*overrides, f"allocation=serve.d{servers}+d8", f"rollout.workers={workers}", f"sim.steps={steps}"]
    if policy == UNBOUNDED:
        settings += ["asynchronous.stale_policy=train", "asynchronous.max_staleness=50"]
    else:
        settings.append(f"asynchronous.stale_policy={policy}")
    simulation = Simulation(plan(name, settings))
    began = time.process_time()
    simulation.run()
    return results(simulation, time.process_time() - began)


def row(scenario: str, size: str, policy: str, found: dict[str, Any]) -> dict[str, Any]:
    waits = found["waits_s"]
    staleness = {int(lag): rows for lag, rows in found["staleness"].items()}
    return {
        "scenario": scenario,
        "size": size,
        "policy": policy,
        "steps": found["steps"],
        "hours": found["hours"],
        "steps/h": found["steps_per_h"],
        "busy_%": 100 * found["trainer_busy"],
        "wasted_%": 100 * found["wasted_total"],
        "ks": found["ks"],
        "most_issues": found["most_issues"],
        "too_often": found["issued_too_often"],
        "staleness_max": max(staleness),
        "staleness_mean": sum(lag * rows for lag, rows in staleness.items()) / sum(staleness.values()),
        "batch_wait_s": waits["batch"]["mean"],
        "routable_%": 100 * found["routable"],
        "largest_grant": found["grants"]["largest"],
        "grants_min": found["grants"]["min"],
        "grants_max": found["grants"]["max"],
        "quarantines": found["quarantines"],
        "events": found["events"],
        "cpu_s": found["wall_s"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate", description="Staleness in simulated trials.")
    parser.add_argument("--steps", type=int, default=120)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    rows = []
    for scenario, size in itertools.product(SCENARIOS, SIZES):
        if scenario == "mixed" and size != "8 x 32":
            continue
        runs = []
        for policy in POLICIES:
            # One long run shows the speed of the simulation.
            steps = LONG if (scenario, size, policy) == ("lognormal", "64 x 512", "train") else arguments.steps
            runs.append(row(scenario, size, policy, simulate(scenario, size, policy, steps)))
            print(runs[-1], flush=True)
        for each in runs:
            each["of_unbounded"] = each["steps/h"] / runs[-1]["steps/h"]
        rows += runs
    report("simulate", rows, {"command": "python -m benchmarks.simulate", "steps": arguments.steps, "seed": 1})


if __name__ == "__main__":
    main()
