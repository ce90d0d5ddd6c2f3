"""Settings of a simulation: the configuration of a trial, and ``sim``, the costs of everything around its decisions.

scenario (built in, or a YAML file) <- field.path=value ──> Config of the trial, SimSettings
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError

from realsys.config.compose import validate
from realsys.config.doors import FILTER
from realsys.config.fields import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Probability, Section
from realsys.config.schema import Config
from realsys.errors import ConfigError


class LengthSettings(Section):
    """Lengths of completions in tokens. A prompt is hard or easy: it decides ``prompt_share`` of the variance."""

    kind: Literal["lognormal", "pareto", "uniform", "constant", "trial", "values"] = "lognormal"
    mean: PositiveFloat = Field(5500.0, description="lognormal, constant: mean before the cut at ``longest``")
    sigma: PositiveFloat = Field(0.9, description="lognormal: standard deviation of the logarithm")
    exponent: PositiveFloat = Field(1.1, description="pareto: exponent of the tail between shortest and longest")
    shortest: Positive = Field(1, description="shortest completion")
    longest: Positive = Field(32768, description="longest completion; generation stops there")
    prompt_share: Probability = Field(0.95, description="share of the variance that is common to the group's episodes")
    trial: str = Field("", description="trial: folder of a trial with records of steps; its lengths are drawn")
    values: list[Positive] = Field([], description="values: lengths that are drawn, in ascending order")
    growth: PositiveFloat = Field(1.0, description="factor that the lengths have grown by in the end")
    grows_from: NonNegative = Field(0, description="number of the ticket from which they grow")
    grows_to: NonNegative = Field(0, description="number of the ticket at which they have grown")


class ServerSettings(Section):
    """A generation server. ``allocation`` has their number."""

    tokens_per_s: PositiveFloat = Field(40.0, description="tokens per second of one completion, at most")
    total_tokens_per_s: PositiveFloat = Field(
        20000.0, description="tokens per second of a server, shared by its completions"
    )
    s_per_completion: NonNegativeFloat = Field(
        0.0, description="seconds that each running completion adds to the time of a token, 1 / tokens_per_s"
    )
    max_running: Positive = Field(1024, description="completions that a server samples at a time; others queue")
    prefill_tokens_per_s: PositiveFloat = Field(20000.0, description="prompt tokens per second")
    stage_s: NonNegativeFloat = Field(5.0, description="seconds to stage a version, while generation goes on")
    swap_s: NonNegativeFloat = Field(0.5, description="seconds that generation pauses for the swap")
    recompute_tokens_per_s: NonNegativeFloat = Field(
        0.0, description="after a swap the cache is computed again at this rate; 0: it is kept"
    )
    sleep_s: NonNegativeFloat = Field(1.0, description="seconds to release the memory, if the server shares devices")
    wake_s: NonNegativeFloat = Field(
        2.0, description="seconds to take it again; then it stages, swaps, and computes the cache by prefill"
    )
    start_s: PositiveFloat = Field(60.0, description="seconds from a death to the next start")


class TrainerSettings(Section):
    """The MasterWorker with its ModelWorkers."""

    step_s: NonNegativeFloat = Field(60.0, description="seconds of a step, without the part per token")
    step_s_per_token: NonNegativeFloat = Field(0.0, description="seconds of a step per trained token")
    publish_s: NonNegativeFloat = Field(1.0, description="seconds to write and publish a version, during the next step")
    move_s: NonNegativeFloat = Field(
        2.0, description="seconds of the ranks to leave devices that servers share, and again to return"
    )
    start_s: PositiveFloat = Field(120.0, description="seconds from a death to the roll-back of the next start")


class HostSettings(Section):
    """One host whose cores all servers and ranks share. What computes gets equal shares of the cores."""

    cores: NonNegativeFloat = Field(0.0, description="cores of the host; 0: every process has a device of its own")
    server_cores: PositiveFloat = Field(1.0, description="cores that a server uses while it samples")
    trainer_cores: PositiveFloat = Field(1.0, description="cores that the ranks use together during a step")
    cpu_s_per_token: NonNegativeFloat = Field(
        0.0, description="seconds of a core that the other processes need per sampled token"
    )


class FaultSettings(Section):
    """Mean hours between two faults of each kind in the whole trial; 0: none. They follow a Poisson process."""

    server_dies: NonNegativeFloat = 0.0
    worker_dies: NonNegativeFloat = 0.0
    manager_restarts: NonNegativeFloat = 0.0
    trainer_restarts: NonNegativeFloat = 0.0
    false_report: NonNegativeFloat = Field(0.0, description="a rollout reports a server that is well")
    update_fails: NonNegativeFloat = Field(0.0, description="a server cannot load a version, sleep or wake")
    reply_lost: NonNegativeFloat = Field(0.0, description="a reply of the manager is lost, and the call repeated")
    notice_lost: NonNegativeFloat = Field(0.0, description="a stored group is lost before the master hears of it")
    rollout_fails: NonNegativeFloat = Field(0.0, description="an agent fails with its whole group")


class SimSettings(Section):
    """Size, costs and faults. The simulation ends after ``hours`` or train ``steps``, at the first limit."""

    steps: NonNegative = Field(300, description="train steps; 0: no limit")
    hours: NonNegativeFloat = Field(0.0, description="simulated hours; 0: no limit")
    prompts: Positive = Field(1_000_000, description="prompts of the train split")
    prompt_tokens: Positive = Field(512, description="tokens of a prompt")
    judge_s: NonNegativeFloat = Field(0.5, description="seconds from the last token of a group to its rewards")
    success: Probability = Field(0.5, description="share of completions that are correct")
    difficulty: NonNegativeFloat = Field(
        0.0, description="standard deviation over the prompts of the logit of success; 0: all are as hard"
    )
    call_s: NonNegativeFloat = Field(0.002, description="seconds of a call between two processes")
    notice_s: PositiveFloat = Field(20.0, description="seconds until the manager learns of a dead process")
    check_every: NonNegative = Field(0, description="events between two checks of all invariants; 0: at the end only")
    stalled_h: PositiveFloat = Field(4.0, description="hours without a train step that count as a failure")
    lengths: LengthSettings = LengthSettings()
    server: ServerSettings = ServerSettings()
    trainer: TrainerSettings = TrainerSettings()
    host: HostSettings = HostSettings()
    faults: FaultSettings = FaultSettings()


_PAPER_LIKE = {
    "allocation": "serve.d8+d8",
    "train.batch_groups": 64,
    "train.total_steps": 1_000_000,  # grants never end: the last batches of a run are biased in length
    "rollout.group_size": 16,
    "rollout.workers": 32,
    "asynchronous.max_staleness": 4,
    "sim.trainer.step_s": 60.0,
}
#: lognormal, pareto: workloads in which much can be wasted, because lengths and times of episodes have long tails.
#: faults: a small trial in which many faults fall into each other, with all checks after every event.
SCENARIOS: dict[str, dict[str, Any]] = {
    "lognormal": _PAPER_LIKE,
    # 20 to 1,800 s at 40 tokens per second
    "pareto": _PAPER_LIKE
    | {
        "sim.lengths.kind": "pareto",
        "sim.lengths.exponent": 1.1,
        "sim.lengths.shortest": 800,
        "sim.lengths.longest": 72000,
    },
    "faults": {
        "allocation": "serve.d3+d1",
        "train.batch_groups": 4,
        "train.total_steps": 1_000_000,
        "rollout.group_size": 2,
        "rollout.workers": 4,
        "rollout.max_concurrent": 8,
        "asynchronous.max_staleness": 2,
        "generation.sampling.new_tokens_per_chunk": 2048,
        "checkpoint.every_steps": 5,
        "evaluation.every_steps": 20,
        "evaluation.every_problems": 8,
        "sim.steps": 0,
        "sim.hours": 100.0,
        "sim.check_every": 1,
        "sim.prompts": 20_000,
        "cluster.request_timeout_s": 36_000.0,  # faults may take a group many times
        "sim.lengths.mean": 6000.0,
        "sim.trainer.step_s": 120.0,
        "sim.faults.server_dies": 0.5,
        "sim.faults.worker_dies": 0.5,
        "sim.faults.manager_restarts": 1.0,
        "sim.faults.trainer_restarts": 2.0,
        "sim.faults.false_report": 0.5,
        "sim.faults.update_fails": 0.5,
        "sim.faults.reply_lost": 0.05,
        "sim.faults.notice_lost": 0.2,
        "sim.faults.rollout_fails": 0.2,
    },
}


@dataclass(frozen=True, slots=True)
class Plan:
    """One simulation: the configuration of the trial, and the costs."""

    scenario: str
    config: Config
    sim: SimSettings
    overrides: tuple[str, ...] = ()

    def command(self) -> str:
        """Return the command that repeats this simulation."""
        return " ".join(["realsys simulate", self.scenario, *self.overrides])


def plan(scenario: str, overrides: Sequence[str] = ()) -> Plan:
    """Read a scenario, by its name or file, with overrides on top. Raises ConfigError."""
    tree: dict[str, Any] = {}
    for path, value in [*_scenario(scenario).items(), *map(_parsed, overrides)]:
        *sections, name = path.split(".")
        branch = tree
        for section in sections:
            branch = branch.setdefault(section, {})
            if not isinstance(branch, dict):
                raise ConfigError(path, value, f"{section} is a field, not a section")
        branch[name] = value
    sim = tree.pop("sim", {})
    try:
        settings = SimSettings.model_validate(sim)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(["sim", *map(str, first["loc"])])
        raise ConfigError(field, first.get("input"), first["msg"]) from None
    config = validate(tree)
    if (accept := config.train.ppo.filter.accept) not in FILTER.builtin:
        problem = f"a simulation has no episodes for it: use {' or '.join(FILTER.builtin)}"
        raise ConfigError(FILTER.field, accept, problem)
    return Plan(scenario, config, settings, tuple(overrides))


def _scenario(name: str) -> dict[str, Any]:
    if name in SCENARIOS:
        return SCENARIOS[name]
    try:
        tree = yaml.safe_load(Path(name).read_text("utf-8"))
    except OSError:
        known = ", ".join(SCENARIOS)
        raise ConfigError("SCENARIO", name, f"must be one of {known}, or a YAML file") from None
    except yaml.YAMLError as error:
        raise ConfigError("SCENARIO", name, f"cannot be read as YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError("SCENARIO", name, "must contain a mapping of fields")
    return dict(_leaves(tree))


def _leaves(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in tree.items():
        path = f"{prefix}{key}"
        found += _leaves(value, f"{path}.") if isinstance(value, dict) and value else [(path, value)]
    return found


def _parsed(override: str) -> tuple[str, Any]:
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise ConfigError("OVERRIDE", override, "must be field.path=value")
    try:
        return path, yaml.safe_load(text) if text else ""
    except yaml.YAMLError:
        raise ConfigError(path, text, "cannot be read as a YAML value") from None
