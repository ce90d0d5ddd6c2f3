"""Configuration of an evaluation: that of a trial or of an experiment, without its training.

The data sets, the sampling, the servers, the agent and the verifier stay. What belongs to training, and to the machines
on which the trial ran, gets its default.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from realsys.config.allocation import AUTO, ParallelLayout, allocation_text, parse_allocation
from realsys.config.compose import compose, given_fields, quoted, validate, with_overrides
from realsys.config.evaluation_sets import EvaluationSet, evaluation_sets
from realsys.config.paths import TrialPaths, read_config
from realsys.config.schema import AsyncConfig, Config, WarmupConfig, WeightsConfig
from realsys.config.schema_cluster import ClusterConfig
from realsys.config.schema_data import HELD_OUT, EvalSetConfig
from realsys.config.schema_train import CheckpointConfig, RecordConfig, TrainConfig, with_built_in_roles
from realsys.config.trial_sizes import longest_sequence
from realsys.errors import CheckpointError, ConfigError, WeightsError
from realsys.launch.commands.options import EVALUATIONS, RUNS
from realsys.train.checkpoint.checkpoint_files import checkpoint_incarnation, complete_checkpoints
from realsys.weights.disk.manifest import complete_versions, load_manifest
from realsys.weights.disk.plain_folders import materialise

_EXPERIMENT = "experiment"
#: sections that only training reads
_OF_TRAINING = {
    "roles": with_built_in_roles({}),
    "warmup": WarmupConfig(),
    "checkpoint": CheckpointConfig(every_steps=0, at_end=False, on_stop=False),
    "record": RecordConfig(keep_steps=0),
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
        if name in ("model.path", "trial", "resume", "recover", "train.loop"):
            raise ConfigError("override", name, "belongs to training: TARGET, --step and --name say what is evaluated")
    if target.trial is None:
        overrides = [*([] if _EXPERIMENT in overridden else [f"{_EXPERIMENT}=math"]), *choices.overrides]
        config = compose([*overrides, f"model.path={quoted(str(target.model))}"], config_dir=choices.config_dir)
        given = given_fields(overrides, config_dir=choices.config_dir)
    else:
        config = _stored(target, choices)
        given = {*type(config).model_fields}
    fileroot = config.fileroot if target.trial is None or "fileroot" in overridden else str(target.trial.root)
    allocation = config.allocation if "allocation" in overridden else AUTO
    if allocation != AUTO:
        whole = allocation if set("+|,") & set(allocation) else f"{allocation}+d1"
        # No process takes the actor's part, so no server shares its devices with one.
        allocation = allocation_text(parse_allocation(whole).inference, ParallelLayout())
    tokens = max(TrainConfig().microbatch_tokens, longest_sequence(config))
    update = {
        **_OF_TRAINING,
        "train": TrainConfig(loop="evaluate", microbatch_tokens=tokens, engine_check=0.0),
        "model": config.model.model_copy(update={"path": str(target.model)}),
        **_held_out_only(config),
        "fileroot": fileroot,
        "experiment": EVALUATIONS,
        "trial": choices.name or _name(now, fileroot),
        "allocation": allocation,
        "resume": "",
        "recover": "off",
    }
    made = config.model_copy(update=update)
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


# ---- target
#
# Finds the model that `realsys eval` or `realsys export` names: a Hugging Face directory, or weights of a trial.
#
#     MODEL_DIR            the directory
#     TRIAL_DIR            its trained model ({trial}/model), else its newest weights
#     TRIAL_DIR --step N   {trial}/hf/step-N, the trained model if that is of step N, version N of its weights, or the
#                          actor of its checkpoint of step N
#     EXPERIMENT/TRIAL     the trial of that name under runs/
#
# A weight version is exported before an evaluation, because a trial that runs removes old ones. So is a checkpoint,
# whose format no server reads.


EXPORTS = "models"  # folder of exported weight versions, one per step, in that folder


Form = Literal["model", "version", "checkpoint"]
#: if weights of one step are there in several forms, the first one is taken
_FORMS: tuple[Form, ...] = ("model", "version", "checkpoint")


@dataclass(frozen=True, slots=True)
class Target:
    """A model to evaluate.

    model  folder in the form ``form``: an HF directory, a weight version, or a checkpoint
    step   train steps of its weights; 0 for a model without a trial
    trial  None for a model without a trial
    """

    model: Path
    step: int = 0
    trial: TrialPaths | None = None
    form: Form = "model"


def find_target(text: str, step: int | None) -> Target:
    """Return the model that ``text`` and ``--step`` name. Reads only. Raises ConfigError."""
    path = _folder(text)
    if any(path.glob("*.safetensors")):
        if step is not None:
            raise ConfigError("--step", step, f"{path} is a model folder, which has one state only: leave it out")
        return Target(path)
    return _of_trial(trial_of(text), step)


def trial_of(text: str) -> TrialPaths:
    """Return the paths of the trial that ``text`` names. Raises ConfigError."""
    paths = TrialPaths(_folder(text))
    if not paths.config.is_file() or not paths.lock.exists():
        problem = "has neither *.safetensors nor the files of a trial: name a model folder, or the folder of a trial"
        raise ConfigError("TARGET", text, problem)
    return paths


def exported(target: Target) -> Path:
    """Return an HF directory with the weights of ``target``, and write it if they are in another form.

    Raises ConfigError if they are damaged, or the disk is full.
    """
    if target.form == "model" or target.trial is None:
        return target.model
    folder = target.trial.root / EVALUATIONS / EXPORTS / f"{target.step:08d}"
    try:
        if folder.is_dir() and load_manifest(folder).incarnation == _incarnation(target):
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        write_model(target, folder)
    except (WeightsError, CheckpointError, OSError) as error:
        raise ConfigError("TARGET", str(target.model), f"its weights cannot be exported: {error}") from None
    return folder


def write_model(target: Target, folder: Path) -> None:
    """Write the weights of ``target`` to ``folder``, as an HF directory that refers to nothing else.

    Raises WeightsError, CheckpointError or ModelError.
    """
    if target.form != "checkpoint" or target.trial is None:
        materialise(target.model, folder)
        return
    from realsys.train.checkpoint.model_export import export_checkpoint  # needs torch and Megatron

    config = read_config(target.trial.config)
    export_checkpoint(target.model, folder, config, target.trial.base_model(config))


def _incarnation(target: Target) -> str:
    """Return a text that differs if the weights of this step were made again."""
    if target.form == "checkpoint":
        return checkpoint_incarnation(target.model)
    return load_manifest(target.model).incarnation


def _folder(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.is_dir() and not path.is_absolute() and (RUNS / path).is_dir():
        path = RUNS / path
    if not path.is_dir():
        raise ConfigError("TARGET", text, "is not a directory: name a model folder, or the folder of a trial")
    return path.resolve()


def _of_trial(paths: TrialPaths, step: int | None) -> Target:
    """Return the weights of ``step``; without one those of the trained model, or else the newest."""
    found = list(_weights(paths))
    if step is not None:
        found = [target for target in found if target.step == step]
    elif plain := [target for target in found if target.model == paths.final_model]:
        return plain[0]
    if found:
        return max(found, key=lambda target: (target.step, -_FORMS.index(target.form)))
    if step is None:
        raise ConfigError("TARGET", str(paths.root), "has no weights yet: it was stopped before its first version")
    known = ", ".join(str(number) for number in sorted({target.step for target in _weights(paths)}))
    problem = f"has the weights of these steps only: {known}" if known else "has neither weights nor a checkpoint"
    remedy = "set checkpoint.hf_every_steps to keep those of later steps"
    raise ConfigError("--step", step, f"{paths.root} {problem}; {remedy}")


def _weights(paths: TrialPaths) -> Iterator[Target]:
    """Yield every complete set of weights of a trial. Versions that an earlier trainer wrote and that a roll-back undid
    are passed over.
    """
    for folder in (paths.final_model, *sorted((paths.root / "hf").glob("*"))):
        if folder.is_dir() and (step := _step(folder)) is not None:
            yield Target(folder, step, paths)
    versions: dict[int, Path] = {}
    for number, _, folder in complete_versions(paths.weights()):
        versions = {version: path for version, path in versions.items() if version < number} | {number: folder}
    for folder in versions.values():
        if (step := _step(folder)) is not None:
            yield Target(folder, step, paths, "version")
    for step, folder in complete_checkpoints(paths.checkpoints):
        yield Target(folder, step, paths, "checkpoint")


def _step(folder: Path) -> int | None:
    """Return the step of weights; None if the folder is not complete, or if they were in the memory of a trainer."""
    try:
        manifest = load_manifest(folder)
    except WeightsError:
        return None
    return manifest.step if all((folder / file).exists() for file in manifest.ranks) else None
