"""Configuration of an evaluation: that of a trial or of an experiment, without its training.

The data sets, the sampling, the servers, the agent and the verifier stay. What belongs to training, and to the machines
on which the trial ran, gets its default.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from realsys.config.compose import compose, given_fields, quoted, validate, with_overrides
from realsys.config.dump import read_config
from realsys.config.evaluation_sets import EvaluationSet, evaluation_sets
from realsys.config.rules.lengths import longest_sequence
from realsys.config.schema import AsyncConfig, Config, WarmupConfig, WeightsConfig
from realsys.config.sections.schema_cluster import ClusterConfig
from realsys.config.sections.schema_evaluation import HELD_OUT, EvalSetConfig
from realsys.config.sections.schema_train import CheckpointConfig, RecordConfig, RolesConfig, TrainConfig
from realsys.errors import ConfigError
from realsys.launch.commands.trials.finding import EVALUATIONS
from realsys.launch.evaluate.target import EXPORTS, Target
from realsys.launch.fit import AUTO

_EXPERIMENT = "experiment"
#: sections that only training reads
_OF_TRAINING = {
    "roles": RolesConfig(),
    "warmup": WarmupConfig(),
    "checkpoint": CheckpointConfig(every_steps=0, at_end=False, on_stop=False),
    "record": RecordConfig(samples=False),
    "asynchronous": AsyncConfig(),
    "weights": WeightsConfig(),
}


@dataclass(frozen=True, slots=True)
class Choices:
    """Options of the command line. ``name``: of the evaluation; None: the time of its start."""

    overrides: Sequence[str] = ()
    config_dir: Path | None = None
    name: str | None = None


def evaluation_config(target: Target, choices: Choices, now: datetime) -> tuple[Config, set[str]]:
    """Return the configuration of an evaluation of ``target``, and the fields that the user has set.

    It is not fitted to the model and the machine yet. Raises ConfigError.
    """
    if choices.name == EXPORTS:
        raise ConfigError("--name", EXPORTS, "is the folder of exported weights: choose another name")
    overridden = {text.partition("=")[0].lstrip("+") for text in choices.overrides}
    for name in sorted(overridden):
        if name in ("model.path", "trial", "resume", "recover", "evaluate_only"):
            raise ConfigError("override", name, "belongs to training: TARGET, --step and --name say what is evaluated")
    if target.trial is None:
        overrides = [*([] if _EXPERIMENT in overridden else [f"{_EXPERIMENT}=math"]), *choices.overrides]
        config = compose([*overrides, f"model.path={quoted(str(target.model))}"], config_dir=choices.config_dir)
        given = given_fields(overrides, config_dir=choices.config_dir)
    else:
        config = _stored(target, choices)
        given = {*type(config).model_fields}
    fileroot = config.fileroot if target.trial is None or "fileroot" in overridden else str(target.trial.root)
    made = _without_training(config, target, overridden, fileroot, choices.name or _name(now, fileroot))
    made = validate(made.model_dump())
    sets_to_evaluate(made)
    return made, given


def sets_to_evaluate(config: Config) -> dict[str, EvaluationSet]:
    """Return the data sets that are evaluated, by name. Raises ConfigError if there are none."""
    sets = {name: made for name, made in evaluation_sets(config).items() if made.problems}
    if not sets:
        raise ConfigError("evaluation.problems", 0, "nothing is evaluated: set it")
    return sets


def _stored(target: Target, choices: Choices) -> Config:
    """Return the configuration of a trial, for processes of this machine."""
    assert target.trial is not None
    config = read_config(target.trial.config)
    here = config.model_copy(update={"cluster": ClusterConfig()})
    return with_overrides(here, choices.overrides)


def _name(now: datetime, fileroot: str) -> str:
    """Return a name by the time, with a number if two evaluations start within one second."""
    stem = name = now.strftime("%Y%m%d-%H%M%S")
    number = 2
    while (Path(fileroot) / EVALUATIONS / name).exists():
        name, number = f"{stem}-{number}", number + 1
    return name


def _without_training(config: Config, target: Target, overridden: Collection[str], fileroot: str, name: str) -> Config:
    allocation = config.allocation if "allocation" in overridden else AUTO
    if allocation != AUTO and "+" not in allocation:
        allocation += "+d1"  # the actor's part, which no process takes
    tokens = max(TrainConfig().microbatch_tokens, longest_sequence(config))
    update = {
        **_OF_TRAINING,
        "agreement": config.agreement.model_copy(update={"sample_tokens": 0}),
        "train": TrainConfig(microbatch_tokens=tokens),
        "model": config.model.model_copy(update={"path": str(target.model)}),
        **_held_out_only(config),
        "fileroot": fileroot,
        "experiment": EVALUATIONS,
        "trial": name,
        "allocation": allocation,
        "resume": "",
        "recover": "off",
        "evaluate_only": True,
    }
    return config.model_copy(update=update)


def _held_out_only(config: Config) -> dict[str, object]:
    """Return data and evaluation that read the held-out problems alone: the rows to train on may be gone, or not given.

    They stay ``data.eval``, so that a source which has several splits gives its held-out one. If only sets are given,
    the data of the first one is read as held-out problems, and these are not evaluated. Raises ConfigError if nothing
    is given.
    """
    data, evaluation = config.data, config.evaluation.model_copy(update={"every_steps": 0})
    if data.kind == "arith" or (not data.eval and (data.train or data.mixture)):
        return {"data": data, "evaluation": evaluation}
    alone: dict[str, object] = {"train": "", "mixture": [], "demos": ""}
    if not data.eval:
        first = next((own for own in evaluation.sets.values() if own.path), None)
        if first is None:
            raise ConfigError("data.eval", "", "name the problems to evaluate on, or a set: evaluation.sets.NAME.path")
        source = ("layout", "layout_args", "source_args")
        alone |= {"eval": first.path, **{name: getattr(first, name) for name in source}}
        off = {HELD_OUT: EvalSetConfig(problems=0)}
        evaluation = evaluation.model_copy(update={"sets": {**evaluation.sets, **off}})
    return {"data": data.model_copy(update=alone), "evaluation": evaluation}
