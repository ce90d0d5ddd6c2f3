"""Makes the trial folder: token, model, data, resolved configuration. Everything a user can get wrong is found here.

Nothing is started. If it fails, the folder is gone again, so that the same trial name can be used for the next try.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from launch.resume import check_resume, resume_path, start_ledger
from realsys.config.allocation import parse_allocation
from realsys.config.checks import check_made_model
from realsys.config.dataflow import dataflow_of
from realsys.config.dump import write_config
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.config.schema_train import RoleConfig, RolesConfig
from realsys.errors import ConfigError

Role = TypeVar("Role", bound=RoleConfig)

DEFAULT_TRIAL = str(Config.model_fields["trial"].default)


def resolve(config: Config, *, now: datetime) -> Config:
    """Give the trial a name if it has none, and make every path absolute, for workers that run elsewhere.

    Raises ConfigError when ``resume`` names no checkpoint.
    """
    update: dict[str, object] = {"fileroot": str(Path(config.fileroot).resolve())}
    if config.trial == DEFAULT_TRIAL:
        update["trial"] = _free_name(Path(config.fileroot).resolve() / config.experiment, now)
    if config.model.path:
        update["model"] = config.model.model_copy(update={"path": _absolute(config.model.path)})
    update["roles"] = _absolute_roles(config.roles)
    update["resume"] = resume_path(config.resume)
    data = config.data
    files = {"train": _absolute(data.train), "eval": _absolute(data.eval), "demos": _absolute(data.demos)}
    update["data"] = data.model_copy(update=files)
    return config.model_copy(update=update)


def _absolute(path: str) -> str:
    return str(Path(path).resolve()) if path else ""


def _absolute_roles(roles: RolesConfig) -> RolesConfig:
    def moved(role: Role) -> Role:
        return role.model_copy(update={"path": _absolute(role.path)})

    custom = {name: moved(role) for name, role in roles.custom.items()}
    return RolesConfig(ref=moved(roles.ref), critic=moved(roles.critic), reward=moved(roles.reward), custom=custom)


def _free_name(parent: Path, now: datetime) -> str:
    """The time of the start; with a number when two runs start within one second."""
    stem = now.strftime("%Y%m%d-%H%M%S")
    name, number = stem, 2
    while (parent / name).exists():
        name, number = f"{stem}-{number}", number + 1
    return name


def refuse_existing(paths: TrialPaths, config: Config) -> None:
    """A trial folder is written once. Raises ConfigError."""
    if paths.root.exists():
        problem = f"exists already in {paths.root}; choose another name, or leave it out for one made of date and time"
        raise ConfigError("trial", config.trial, problem)


def prepare(config: Config, say: Callable[[str], None]) -> TrialPaths:
    """Make the folder of a resolved trial ready for its workers.

    Raises ConfigError, ModelError or DataError; then nothing is left of the folder.
    """
    paths = TrialPaths.of(config)
    refuse_existing(paths, config)
    resumed = check_resume(config)
    try:
        paths.root.mkdir(parents=True)
    except OSError as exc:
        raise ConfigError("fileroot", config.fileroot, f"cannot make {paths.root}: {exc.strerror}") from None
    try:
        for folder in (paths.logs, paths.errors, paths.data):
            folder.mkdir()
        _write_token(paths.token)
        sizes = _make_inputs(config, paths, say)
        if resumed is not None:
            start_ledger(config, paths, resumed, sizes)
            say(f"continuing at step {resumed.step} from {config.resume}")
        _clear_names(config, paths)
        write_config(config, paths.config)
    except BaseException:
        shutil.rmtree(paths.root, ignore_errors=True)
        raise
    return paths


def _write_token(path: Path) -> None:
    """A fresh secret that only this user can read; the mode is set at creation, not after it."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w", encoding="ascii") as file:
        file.write(secrets.token_urlsafe(32))


def _make_inputs(config: Config, paths: TrialPaths, say: Callable[[str], None]) -> dict[str, int]:
    """Tiny model and generated data where the trial asks for them; then read every line of the datasets once.

    Returns the number of prompts per split, and of demonstrations.
    """
    from realsys.data.arith import write_dataset
    from realsys.data.char_model import make_tiny_model, write_char_tokenizer
    from realsys.data.check import check_data
    from realsys.data.tokenizer import TextTokenizer

    if config.data.kind == "arith":
        write_dataset(config.data.arith, paths.data, seed=config.seed)
    model = Path(config.model.path) if config.model.path else paths.model
    if not config.model.path:
        write_char_tokenizer(model)
        make_tiny_model(config.model.tiny, model, seed=config.seed)
        check_made_model(model, config, parse_allocation(config.allocation), dataflow_of(config))
    sizes = check_data(config, paths, TextTokenizer(model))
    _check_sizes(config, sizes)
    say("data: " + ", ".join(f"{count:,} {split}" for split, count in sizes.items() if count))
    return sizes


def _check_sizes(config: Config, sizes: Mapping[str, int]) -> None:
    """What only the number of lines can tell. Raises ConfigError."""
    evaluation, train = config.evaluation, config.train
    for field, wanted in (
        ("evaluation.problems", evaluation.problems),
        ("evaluation.every_problems", evaluation.every_problems if evaluation.every_steps else 0),
    ):
        if wanted > sizes["eval"]:
            raise ConfigError(field, wanted, f"only {sizes['eval']} problems are held out")
    if train.total_epochs and train.total_epochs * sizes["train"] < train.batch_groups:
        problem = f"{train.total_epochs} epochs of {sizes['train']} prompts do not fill one batch"
        raise ConfigError("train.batch_groups", train.batch_groups, problem)
    if config.warmup.steps and sizes["demos"] < config.warmup.batch:
        raise ConfigError("warmup.batch", config.warmup.batch, f"there are only {sizes['demos']} demonstrations")


def _clear_names(config: Config, paths: TrialPaths) -> None:
    """A name store outside the trial folder outlives trials: forget an earlier one of the same name."""
    if config.cluster.name_store.backend == "file" and not config.cluster.name_store.root:
        return
    from realsys.cluster.name_store import make_name_store, trial_names

    store = make_name_store(config, paths)
    try:
        store.clear_subtree(trial_names(config).root)
    finally:
        store.close()
