"""Simulates a run with known costs, and returns it as the planner would read it from a folder."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from realsys.config.compose import with_overrides
from realsys.config.paths import TrialPaths, write_config
from realsys.config.schema import Config
from realsys.lab.planner.recorded_run import GroupTime, Recording, StepCost
from realsys.lab.planner.steady_state import Costs, LengthSample, endless, sim_settings
from realsys.lab.simulation.rollout import GroupRun
from realsys.lab.simulation.scenarios import Plan
from realsys.lab.simulation.simulation import Simulation
from realsys.manager.ledger.events import Event, Finished, Granted
from realsys.manager.ledger.journal import Journal

STEPS = 30
COSTS = Costs(
    token=0.004, token_per_running=0.0002, group=0.02, forward=1e-5, step=0.05, step_per_token=0.0005,
    cpu_per_token=5e-5, update=0.01, cores=0.0,
)  # fmt: skip
SHARED = replace(COSTS, cores=2.0)
LENGTHS = LengthSample(tuple(range(10, 90)), prompt_share=0.5, prompt_tokens=8.0, longest=128)
OVERRIDES = (
    "allocation=serve.d1+d1", "train.batch_groups=8", "rollout.group_size=4", "rollout.workers=2",
    "rollout.max_concurrent=8", "asynchronous.max_staleness=2", "generation.sampling.max_new_tokens=128",
)  # fmt: skip


class Recorder(Simulation):
    """A simulation that keeps its journal and the lengths of the groups that it pushed."""

    def __init__(self, plan: Plan) -> None:
        self.events: list[Event] = []
        self.pushed: dict[tuple[str, int], tuple[int, ...]] = {}
        super().__init__(plan)

    def _observe(self, event: Event) -> None:
        super()._observe(event)
        self.events.append(event)

    def push(self, group: GroupRun, stored: Callable[[], None]) -> None:
        lengths = tuple(completion.length for completion in group.completions)
        self.pushed[group.ticket.ticket_id, group.ticket.attempt] = lengths
        super().push(group, stored)


def config_of(overrides: Sequence[str] = ()) -> Config:
    """Return the configuration of the small run."""
    return with_overrides(Config(), [*OVERRIDES, *overrides])


def simulated(costs: Costs, config: Config, steps: int = STEPS) -> Recorder:
    """Run a simulation with known costs."""
    simulation = Recorder(Plan("test", endless(config, 1), sim_settings(costs, config, LENGTHS, steps)))
    simulation.run()
    return simulation


def recording_of(costs: Costs, overrides: Sequence[str] = ()) -> Recording:
    """Return a simulated run as the planner reads it."""
    config = config_of(overrides)
    simulation = simulated(costs, config)
    return Recording(Path("simulated"), config, _steps(simulation, costs), _groups(simulation), LENGTHS.prompt_tokens)


def steps_per_h(costs: Costs, config: Config) -> float:
    """Return what a run with these costs does: the truth that the planner does not know."""
    steps = simulated(costs, config, 2 * STEPS).account.steps[6:]
    return 3600 * (len(steps) - 1) / (steps[-1]["time"] - steps[0]["time"])


def write_trial(folder: Path, costs: Costs) -> None:
    """Write a simulated run as the folder of a trial, without sample records."""
    paths = TrialPaths(folder)
    folder.mkdir(parents=True)
    simulation = simulated(costs, config_of())
    write_config(config_of(), paths.config)
    with Journal(paths.ledger) as journal:
        journal.replay()
        journal.append(simulation.events)
    lines = [msgspec.json.encode(_record(step)) for step in _steps(simulation, costs)]
    paths.steps.write_bytes(b"".join(line + b"\n" for line in lines))


def _steps(simulation: Recorder, costs: Costs) -> list[StepCost]:
    found, records = [], simulation.account.steps
    for record, after in pairwise(records):
        end = after["time"] - after["wait"]
        computed = end - record["time"]
        tokens = int(record["tokens"])
        inference = min(computed / 2, costs.forward * tokens)
        found.append(
            StepCost(
                step=int(record["step"]),
                end=end,
                total=record["wait"] + computed,
                wait=record["wait"],
                inference=inference,
                training=computed - inference,
                tokens=tokens,
                sampled=tokens,
                trained=tokens,
            )
        )
    return found


def _groups(simulation: Recorder) -> list[GroupTime]:
    granted: dict[tuple[str, int], float] = {}
    found = []
    for event in simulation.events:
        if isinstance(event, Granted):
            granted[event.ticket_id, event.attempt] = event.time
        elif isinstance(event, Finished):
            key = event.ticket_id, event.attempt
            found.append(GroupTime(*key, granted[key], event.time, simulation.pushed.get(key, ())))
    return found


def _record(step: StepCost) -> dict[str, Any]:
    return {
        "kind": "train",
        "time": step.end,
        "step": step.step,
        "seconds": {"wait": step.wait, "inf": step.inference, "train": step.training, "total": step.total},
        "tokens": step.tokens,
        "answer_tokens": step.sampled,
        "stats": {"tokens": float(step.trained)},
    }
