"""Finds the model that `realsys eval` or `realsys export` names: a Hugging Face directory, or weights of a trial.

    MODEL_DIR            the directory
    TRIAL_DIR            its trained model ({trial}/model), else its newest weights
    TRIAL_DIR --step N   {trial}/hf/step-N, the trained model if that is of step N, version N of its weights, or the
                         actor of its checkpoint of step N
    EXPERIMENT/TRIAL     the trial of that name under runs/

A weight version is exported before an evaluation, because a trial that runs removes old ones. So is a checkpoint, whose
format no server reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from realsys.config.dump import read_config
from realsys.config.paths import TrialPaths
from realsys.errors import CheckpointError, ConfigError, WeightsError
from realsys.launch.commands.trials.finding import EVALUATIONS, RUNS
from realsys.train.checkpoint.checkpoint_files import checkpoint_incarnation, complete_checkpoints
from realsys.weights.disk.manifest import complete_versions, load_manifest
from realsys.weights.disk.tensor_files import materialise

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
    """Return the step of exported weights, None if the folder is not complete."""
    try:
        return load_manifest(folder).step
    except WeightsError:
        return None
