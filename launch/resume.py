"""Going on from a checkpoint: what has to fit. Everything that cannot work is found here.

resume_path ──> the checkpoint folder       before anything is written
check_checkpoint  against the configuration before anything is written: its own one (recover) or another's (resume=DIR)
check_resume      of resume=DIR, and its schedule
check_inputs      against model and data, once they are in the trial's folder
start_ledger      of a new trial that continues another: its first record
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from realsys.config.dataflow import dataflow_of, saved_roles
from realsys.config.paths import TrialPaths
from realsys.config.roles import role_field, role_settings
from realsys.config.schema import Config
from realsys.errors import CheckpointError, ConfigError
from realsys.manager.ledger.events import Resumed
from realsys.manager.ledger.journal import Journal
from realsys.master.checkpoints import describe_role
from realsys.train.checkpoint.checkpoint_files import CheckpointState, check_sizes, find_checkpoint, read_state


def resume_path(text: str) -> str:
    """The checkpoint folder that ``resume=text`` means, absolute; empty when there is nothing to resume.

    Raises ConfigError.
    """
    if not text:
        return ""
    try:
        return str(find_checkpoint(Path(text).resolve()))
    except CheckpointError as error:
        raise ConfigError("resume", text, str(error)) from None


def check_checkpoint(config: Config, directory: Path, field: str, value: str) -> CheckpointState:
    """Complete, of the same roles and optimizers. Raises ConfigError for ``field=value``, which asked for it."""
    try:
        state = read_state(directory)
        check_sizes(directory, state)
    except CheckpointError as error:
        raise ConfigError(field, value, str(error)) from None
    flow = dataflow_of(config)
    for role in saved_roles(config, flow):
        trained = role in flow.trained_roles
        if role not in state.roles:
            problem = (
                f"{directory} has no role {role!r}, which this run trains; it has: {', '.join(state.roles)}"
                if trained
                else f"{directory} has no role {role!r}, which starts as the warmed-up actor (warmup.steps); name its "
                f"directory in {role_field(role)}.path"
            )
            raise ConfigError(field, value, problem)
        theirs, ours = state.roles[role].optimizer, role_settings(config, role).optimizer.name
        if trained and theirs != ours:
            problem = f"{directory}: role {role!r} has the state of {theirs}, not of {ours}"
            raise ConfigError(field, value, problem)
    return state


def check_resume(config: Config) -> CheckpointState | None:
    """What ``resume`` names, with steps left to train; None when nothing is resumed.

    ``config`` is resolved. Raises ConfigError.
    """
    if not config.resume:
        return None
    state = check_checkpoint(config, Path(config.resume), "resume", config.resume)
    _check_schedule(config, state)
    return state


def _check_schedule(config: Config, state: CheckpointState) -> None:
    train = config.train
    if state.step >= train.total_steps:
        problem = f"is at step {state.step} and train.total_steps is {train.total_steps}: nothing is left; raise that"
        raise ConfigError("resume", config.resume, problem)
    if config.seed != state.seed:
        problem = f"the prompts are in the order of seed {state.seed}; in another order some would be missed"
        raise ConfigError("seed", config.seed, f"must be {state.seed}, as in resume={config.resume}: {problem}")
    if train.total_epochs and train.batch_groups != state.batch_groups:
        problem = (
            f"resume={config.resume} has trained with {state.batch_groups}: with another batch size epochs cannot be "
            "counted in steps; keep it, or set train.total_steps and train.total_epochs=0"
        )
        raise ConfigError("train.batch_groups", train.batch_groups, problem)


def check_inputs(
    config: Config, paths: TrialPaths, state: CheckpointState, sizes: Mapping[str, int], field: str, value: str
) -> None:
    """Model and data are those of the checkpoint. ``sizes``: prompts per split. Raises ConfigError for ``field``."""
    wanted = saved_roles(config, dataflow_of(config))
    for role, theirs in state.roles.items():
        if role not in wanted:
            continue  # this run has no use for its state any more
        ours = describe_role(config, paths, role, "").sizes
        for name, size in ours.items():
            if theirs.sizes.get(name) != size:
                problem = f"is of another model: role {role!r} has {name} {theirs.sizes.get(name)} there, {size} here"
                raise ConfigError(field, value, problem)
    prompts = state.position.prompts
    if sizes["train"] != prompts:
        problem = f"was trained on {prompts} prompts, and the train split has {sizes['train']}: use the same data"
        raise ConfigError(field, value, problem)


def start_ledger(config: Config, paths: TrialPaths, state: CheckpointState, sizes: Mapping[str, int]) -> None:
    """Write the first record of the new trial's ledger, once its model and its data are known to be the same.

    ``sizes``: prompts per split. Raises ConfigError.
    """
    check_inputs(config, paths, state, sizes, "resume", config.resume)
    position, epochs = state.position, config.train.total_epochs
    if epochs and position.cursor >= epochs * position.prompts and len(position.pending) < config.train.batch_groups:
        problem = f"resume={config.resume} has used these epochs up: nothing is left; raise that"
        raise ConfigError("train.total_epochs", epochs, problem)
    groups = state.step * config.train.batch_groups
    with Journal(paths.ledger) as journal:
        journal.append([Resumed(config.resume, state.step, groups, position.cursor, position.pending, time.time())])
        journal.sync()
