"""Finds the model that `realsys eval` names: a Hugging Face directory, or weights of a trial.

    MODEL_DIR            the directory
    TRIAL_DIR            its trained model ({trial}/model), else its newest weights
    TRIAL_DIR --step N   {trial}/hf/step-N, the trained model if that is of step N, or version N of its weights
    EXPERIMENT/TRIAL     the trial of that name under runs/

A weight version is exported first, because a trial that runs removes old ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from realsys.config.paths import TrialPaths
from realsys.errors import ConfigError, WeightsError
from realsys.train.checkpoint.checkpoint_files import complete_checkpoints
from realsys.weights.disk.manifest import complete_versions, load_manifest
from realsys.weights.disk.tensor_files import materialise

_RUNS = Path("runs")
EVALUATIONS = "eval"  # folder of what `realsys eval` makes, in a trial or under runs/
EXPORTS = "models"  # folder of exported weight versions, one per step, in that folder


@dataclass(frozen=True, slots=True)
class Target:
    """A model to evaluate.

    model    HF directory, or the folder of a weight version
    step     train steps of its weights; 0 for a model without a trial
    trial    None for a model without a trial
    version  True if ``model`` is a weight version of a trial, to be exported
    """

    model: Path
    step: int = 0
    trial: TrialPaths | None = None
    version: bool = False


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
    """Return an HF directory with the weights of ``target``, and write it if they are a weight version.

    Raises ConfigError if the version is damaged, or the disk is full.
    """
    if not target.version or target.trial is None:
        return target.model
    folder = target.trial.root / EVALUATIONS / EXPORTS / f"{target.step:08d}"
    try:
        if folder.is_dir() and load_manifest(folder).incarnation == load_manifest(target.model).incarnation:
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        materialise(target.model, folder)
    except (WeightsError, OSError) as error:
        raise ConfigError("TARGET", str(target.model), f"its weights cannot be exported: {error}") from None
    return folder


def _folder(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.is_dir() and not path.is_absolute() and (_RUNS / path).is_dir():
        path = _RUNS / path
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
        return max(found, key=lambda target: (target.step, not target.version))
    checkpoints = [number for number, _ in complete_checkpoints(paths.checkpoints)]
    if step is None:
        raise ConfigError("TARGET", str(paths.root), "has no weights yet: it was stopped before its first version")
    known = ", ".join(str(number) for number in sorted({target.step for target in _weights(paths)})) or "none"
    problem = f"{paths.root} has no model of this step; of these it has: {known}"
    if step in checkpoints:
        problem += "; its checkpoint is training state, which servers cannot load: set checkpoint.hf_every_steps"
    raise ConfigError("--step", step, problem)


def _weights(paths: TrialPaths) -> Iterator[Target]:
    """Yield every complete set of weights of a trial. Exports are models, versions of the last trainer may refer to
    others. Versions that an earlier trainer wrote and that a roll-back undid are passed over.
    """
    for folder in (paths.final_model, *sorted((paths.root / "hf").glob("*"))):
        if folder.is_dir() and (step := _step(folder)) is not None:
            yield Target(folder, step, paths)
    versions: dict[int, Path] = {}
    for number, _, folder in complete_versions(paths.weights()):
        versions = {version: path for version, path in versions.items() if version < number} | {number: folder}
    for folder in versions.values():
        if (step := _step(folder)) is not None:
            yield Target(folder, step, paths, version=True)


def _step(folder: Path) -> int | None:
    """Return the step of exported weights, None if the folder is not complete."""
    try:
        return load_manifest(folder).step
    except WeightsError:
        return None
