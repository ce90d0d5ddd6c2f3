"""Simulates a configuration with given costs, and measures its steady state.

Costs, configuration ──> SimSettings ──> Simulation ──> Outcome
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from realsys.config.allocation import Allocation, parse_allocation
from realsys.config.fields import replaced
from realsys.config.schema import Config
from realsys.errors import ConfigError
from realsys.lab.simulation.clock import spread
from realsys.lab.simulation.rollout import GroupRun
from realsys.lab.simulation.scenarios import (
    HostSettings,
    LengthSettings,
    Plan,
    ServerSettings,
    SimSettings,
    TrainerSettings,
)
from realsys.lab.simulation.simulation import Simulation
from realsys.types import SampleMeta

STEPS, SHORT = 24, 12  # most steps that are measured: with the best costs, and with others
_FEWEST, _GROUPS = 6, 4096  # steps; groups that are enough, because chance averages out in a large batch
_ENDLESS = 1_000_000
_FAST = 1e9  # tokens per second that limit nothing


@dataclass(frozen=True, slots=True)
class LengthSample:
    """Lengths of completions: ``values``, ascending, times ``scale``, at most ``longest``."""

    values: tuple[int, ...]
    prompt_share: float
    prompt_tokens: float
    longest: int
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of processes that have a device to themselves. All times are in seconds.

    token              of a token of a completion, without the part per completion
    token_per_running  added to it by each completion that the server samples
    group              of a group, besides sampling
    forward            of a token in a forward pass without gradient
    step               of a step, without the part per token
    step_per_token     of ``ranks`` data ranks, per completion token of the batch
    scaling            step_per_token takes 1 / n^scaling of the time on n times as many ranks
    cpu_per_token      of a core that the other processes use, per sampled token
    update             from the end of a step until the servers sample with its weights
    cores              shared by all processes; 0: each process has a device
    """

    token: float
    token_per_running: float
    group: float
    forward: float
    step: float
    step_per_token: float
    cpu_per_token: float
    update: float
    cores: float
    ranks: int = 1
    scaling: float = 1.0


@dataclass(frozen=True, slots=True)
class SteadyState:
    """Steady state. ``step_s``, ``group_s``: mean seconds of a step without its wait, and of a group."""

    steps_per_h: float
    tokens_per_s: float
    waits: float
    step_s: float
    group_s: float


class _Steady(Simulation):
    """A simulation that knows how many groups had ended before step ``first``."""

    def __init__(self, plan: Plan, first: int) -> None:
        super().__init__(plan)
        self.ended = 0
        self._first = first

    def trained(
        self, groups: Sequence[GroupRun], version: int, in_loss: Sequence[SampleMeta], oldest: int | None
    ) -> None:
        super().trained(groups, version, in_loss, oldest)
        if version == self._first - 1:
            self.ended = len(self.account.waits.get("group", ()))


def simulate(costs: Costs, config: Config, lengths: LengthSample, seed: int = 1, most: int = STEPS) -> SteadyState:
    """Simulate ``config``, and measure at most ``most`` steps after those that fill the pipeline."""
    first = config.asynchronous.max_staleness + 2
    settings = sim_settings(costs, config, lengths, first + measured_steps(config, most))
    simulation = _Steady(Plan("planner", endless(config, seed), settings), first)
    run_quietly(simulation)
    measured = simulation.account.steps[first - 1 :]
    seconds = max(1e-9, measured[-1]["time"] - measured[0]["time"])
    done = measured[:-1]  # a record's time is that of its start
    waits = sum(step["wait"] for step in measured[1:])
    return SteadyState(
        steps_per_h=3600 * len(done) / seconds,
        tokens_per_s=sum(step["tokens"] for step in done) / seconds,
        waits=waits / seconds,
        step_s=(seconds - waits) / len(done),
        group_s=spread(simulation.account.waits["group"][simulation.ended :])["mean"],
    )


def measured_steps(config: Config, most: int) -> int:
    """Return the number of steps to measure: at most ``most``, and fewer if they have very many groups."""
    return max(_FEWEST, min(most, _GROUPS // config.train.batch_groups))


def run_quietly(simulation: Simulation) -> None:
    """Run a simulation without the log lines of the code that it drives."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        simulation.run()
    finally:
        logging.disable(disabled)


def sim_settings(costs: Costs, config: Config, lengths: LengthSample, steps: int) -> SimSettings:
    """Return the costs of the processes of ``config``."""
    allocation = parse_allocation(config.allocation)
    per_token = costs.step_per_token / (allocation.actor.data / costs.ranks) ** costs.scaling
    forward = 1.0 / costs.forward if costs.forward else 0.0
    return SimSettings(
        steps=steps,
        prompts=_ENDLESS,
        stalled_h=_stalled_h(costs, config, lengths),
        prompt_tokens=max(1, round(lengths.prompt_tokens)),
        judge_s=costs.group,
        lengths=LengthSettings(
            kind="values",
            values=[max(1, round(lengths.scale * value)) for value in lengths.values],
            longest=lengths.longest,
            prompt_share=lengths.prompt_share,
        ),
        server=ServerSettings(
            tokens_per_s=1.0 / max(costs.token, 1.0 / _FAST),
            s_per_completion=costs.token_per_running,
            total_tokens_per_s=_FAST,
            max_running=_max_running(config),
            prefill_tokens_per_s=_FAST,
            stage_s=costs.update,
            swap_s=0.0,
            recompute_tokens_per_s=forward if recomputes(config) else 0.0,
        ),
        trainer=TrainerSettings(step_s=costs.step, step_s_per_token=per_token, publish_s=0.0),
        host=HostSettings(
            cores=costs.cores,
            server_cores=float(config.cluster.threads),
            trainer_cores=float(trainer_cores(config, allocation)),
            cpu_s_per_token=costs.cpu_per_token,
        ),
    )


def _stalled_h(costs: Costs, config: Config, lengths: LengthSample) -> float:
    """Return hours without a step that only a defect can explain: a hundred steps in which nothing overlaps."""
    at_a_time = config.rollout.workers * config.rollout.max_concurrent  # groups
    running = at_a_time * config.rollout.sampled_episodes
    group = costs.group + lengths.longest * (costs.token + costs.token_per_running * running)
    tokens = config.train.batch_groups * config.rollout.group_size * lengths.longest
    rounds = 1 + config.train.batch_groups / at_a_time
    return 1.0 + 100 / 3600 * (rounds * group + costs.step + costs.step_per_token * tokens + costs.update)


def trainer_cores(config: Config, allocation: Allocation) -> int:
    """Return the threads that the ranks of the trainer compute with."""
    return allocation.actor.world_size * max(1, config.cluster.threads)


def check_layouts(recorded: Config, config: Config) -> None:
    """Raise ConfigError if a server or a data rank has another size than in the recorded run, or if they take turns."""
    before, after = check_apart(recorded), check_apart(config)
    sizes = [(layout.pipeline, layout.tensor) for layout in (before.inference, before.actor)]
    if sizes != [(layout.pipeline, layout.tensor) for layout in (after.inference, after.actor)]:
        problem = f"has other sizes p and m than the recorded run ({recorded.allocation}): record a run with these"
        raise ConfigError("allocation", config.allocation, problem)


def check_apart(config: Config) -> Allocation:
    """Return the allocation. Raises ConfigError if servers use devices in turn with training ranks."""
    allocation = parse_allocation(config.allocation)
    if allocation.lent:
        problem = "planning fits no cost of servers and training ranks that use devices in turn"
        raise ConfigError("allocation", config.allocation, f"{problem}: record and plan runs with + in place of |")
    return allocation


def endless(config: Config, seed: int) -> Config:
    """Return the configuration without evaluations, and with grants that never end."""
    changes = {
        "seed": seed,
        "train.total_steps": _ENDLESS,
        "train.total_epochs": 0,
        "evaluation.every_steps": 0,
        "evaluation.sets": {},
        "checkpoint.every_steps": 0,
    }
    for path, value in changes.items():
        config = replaced(config, path.split("."), value)
    return config


def _max_running(config: Config) -> int:
    return config.generation.embedded.max_running if config.generation.backend == "embedded" else 1_000_000


def recomputes(config: Config) -> bool:
    """Return True if a server computes its cache again after an update."""
    return config.asynchronous.interruptible and config.asynchronous.kv_on_update == "recompute"
