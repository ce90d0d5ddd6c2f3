"""Decides how a trial starts. ``read_trial`` reads the disk, once; ``decide_start`` is pure.

    read_trial ──> Trial ──decide_start(config)──> TrialStart ──> {trial}/start.json ──> MasterWorker
                     └──────check_inputs(sizes)    once model and data are in place

Both raise ConfigError for what cannot be continued. Nothing is written here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from realsys.config.dataflow import dataflow_of, role_field, role_settings, saved_roles, takes_prompts
from realsys.config.paths import TrialPaths, read_config
from realsys.config.schema import Config
from realsys.data.prompts import is_converted
from realsys.errors import CheckpointError, ConfigError, LedgerError
from realsys.launch.words import path_setting
from realsys.manager.ledger.events import Opened, Resumed, RolledBack, Snapshot, Trained
from realsys.manager.ledger.journal import read_journal
from realsys.observe.step_log import surviving_steps
from realsys.train.checkpoint.checkpoint_files import (
    STATE,
    CheckpointState,
    check_sizes,
    complete_checkpoints,
    read_state,
)
from realsys.train.master.checkpoints import describe_role
from realsys.train.master.recovery import SettingChange, TrainingStart, TrialStart, decide
from realsys.train.master.session import planned_steps

#: settings that the trial's folder and its ledger were made with; everything else may change
_FIXED = ("seed", "train.batch_groups", "rollout.group_size", "resume", "data.kind", "data.order")
_FIXED_IF_MADE = {"data.kind": ("arith", "data.arith"), "model.path": ("", "model.tiny")}


# ---- resume=TEXT


def resume_path(text: str) -> str:
    """Return the checkpoint folder that ``resume=text`` means, absolute; empty if ``text`` is empty.

    ``text`` names a trial folder, its checkpoints folder or one checkpoint. Raises ConfigError.
    """
    if not text:
        return ""
    path = Path(os.path.expanduser(text)).resolve()
    if not path.is_dir():
        raise ConfigError("resume", text, "is not a directory: name a trial folder or a checkpoint")
    if (path / STATE).exists() or path.name.startswith("step-"):
        return str(path)
    root = path.parent if path.name == TrialPaths(path).checkpoints.name else path
    paths = TrialPaths(root)
    if complete := complete_checkpoints(paths.checkpoints):
        return str(complete[-1][1])
    if any(path.glob("*.safetensors")):
        problem = "is a plain model without training state: start a new trial from it with"
        raise ConfigError("resume", text, f"{problem} {path_setting('model.path', path)}")
    if not (paths.ledger.exists() or paths.steps.exists() or paths.checkpoints.is_dir()):
        raise ConfigError("resume", text, "is neither a trial folder nor a checkpoint: name one of them")
    problem = "is a trial without a complete checkpoint: run it with checkpoint.every_steps or checkpoint.at_end"
    if paths.final_model.is_dir():
        problem += f"; or start from its trained model with {path_setting('model.path', paths.final_model)}"
    raise ConfigError("resume", text, problem)


# ---- reading


@dataclass(frozen=True, slots=True)
class StoredTrial:
    """Everything on disk that decides how a trial starts."""

    config: Config | None = None  # that of the last start; None: the trial does not exist yet
    begin: TrainingStart = field(default_factory=TrainingStart)  # checkpoint to load
    state: CheckpointState | None = None  # content of that checkpoint
    steps: int = 0  # trained, as far as they still hold
    done: bool = False  # its MasterWorker had finished
    has_ledger: bool = False
    prompts: int | None = None  # prompts that the ledger was begun with; None: not recorded
    newest: int = -1  # newest version that the ledger has trained; -1: none


def read_trial(config: Config, paths: TrialPaths) -> StoredTrial:
    """Read the trial folder and the checkpoint that ``config.resume`` names. Raises ConfigError."""
    exists = paths.config.exists()
    begin, state = _read_checkpoints(config, paths if exists else None)
    if not exists:
        return StoredTrial(begin=begin, state=state)
    steps, phase = 0, None
    for record in surviving_steps(paths.steps):
        steps += record["kind"] == "train"
        phase = record.get("phase") if record["kind"] == "phase" else phase
    prompts, newest = _read_ledger(config, paths)
    return StoredTrial(
        config=read_config(paths.config),
        begin=begin,
        state=state,
        steps=steps,
        done=phase == "done",
        has_ledger=paths.ledger.exists(),
        prompts=prompts,
        newest=newest,
    )


def _read_checkpoints(config: Config, paths: TrialPaths | None) -> tuple[TrainingStart, CheckpointState | None]:
    """Find the checkpoint to load as the MasterWorker does, but check the sizes of its files, not their checksums."""
    states: dict[Path, CheckpointState] = {}

    def examine(directory: Path) -> CheckpointState:
        states[directory] = read_state(directory)
        check_sizes(directory, states[directory])
        return states[directory]

    own = complete_checkpoints(paths.checkpoints) if paths else []
    try:
        begin = decide(own, config.resume, examine)
    except CheckpointError as error:
        name, value = ("trial", config.trial) if own else ("resume", config.resume)
        raise ConfigError(name, value, str(error)) from None
    return begin, states[begin.checkpoint] if begin.checkpoint else None


def _read_ledger(config: Config, paths: TrialPaths) -> tuple[int | None, int]:
    """Return the prompts and the newest version in the ledger. Reads all of it, so it is not damaged.

    Raises ConfigError.
    """
    prompts, newest = None, -1
    try:
        for event, _ in read_journal(paths.ledger) if paths.ledger.exists() else ():
            opened = event.opened if isinstance(event, Snapshot) else event
            if prompts is None and isinstance(opened, Opened):
                prompts = opened.prompts
            match event:
                case Snapshot():
                    newest = event.newest
                case Resumed():
                    newest = event.step
                case RolledBack():
                    newest = event.version
                case Trained():
                    newest = max(newest, event.version)
    except LedgerError as error:
        raise ConfigError("trial", config.trial, str(error)) from None
    return prompts, newest


# ---- deciding


def decide_start(config: Config, trial: StoredTrial) -> TrialStart:
    """Decide how ``config`` starts the trial. Pure. Raises ConfigError if it cannot."""
    if trial.config is not None:
        _check_fixed(config, trial.config)
    if trial.state is not None:
        _check_roles(config, trial)
        if trial.config is None:
            _check_schedule(config, trial.state)
    if trial.begin.own and trial.begin.step > 0 and not trial.has_ledger:
        problem = "has checkpoints and no ledger.jsonl, which says which prompts are trained: restore it from a copy"
        remedy = f"start a new trial with resume={trial.begin.checkpoint}"
        raise ConfigError("trial", config.trial, f"{problem}, or {remedy}")
    if trial.begin.own and trial.begin.step > max(trial.newest, 0):  # roll_back refuses it, too
        problem = f"ledger.jsonl ends at version {max(trial.newest, 0)}, before {trial.begin.checkpoint}: restore it"
        remedy = f"remove the younger checkpoints, or start a new trial with resume={trial.begin.checkpoint}"
        raise ConfigError("trial", config.trial, f"{problem} from a copy, {remedy}")
    return TrialStart(
        kind="resumed" if trial.begin.checkpoint and not trial.begin.own else "recovered" if trial.config else "new",
        checkpoint=str(trial.begin.checkpoint or ""),
        step=trial.begin.step,
        trained=trial.steps,
        changed=list(changes(trial.config.model_dump(), config.model_dump())) if trial.config else [],
        damaged=list(trial.begin.damaged.values()),
    )


def _check_fixed(config: Config, earlier: Config) -> None:
    ours, theirs = config.model_dump(), earlier.model_dump()
    fields = list(_FIXED)
    for name, (made, section) in _FIXED_IF_MADE.items():
        if made in (_at(ours, name), _at(theirs, name)):
            fields += [name, section]
    for name in fields:
        for change in changes(_at(theirs, name), _at(ours, name), name):
            problem = f"trial {config.trial!r} was begun with {change.old!r}: keep that, or choose another trial name"
            raise ConfigError(change.field, change.new, problem)


def _check_roles(config: Config, trial: StoredTrial) -> None:
    """The checkpoint has every trained role, with the same optimizer. Raises ConfigError."""
    assert trial.state is not None
    directory, name, value = trial.begin.checkpoint, *_named_by(config, trial)
    flow = dataflow_of(config)
    for role in saved_roles(config, flow):
        is_trained = role in flow.trained_roles
        if role not in trial.state.roles:
            problem = (
                f"{directory} has no role {role!r}, which this run trains; it has: {', '.join(trial.state.roles)}"
                if is_trained
                else f"{directory} has no role {role!r}, which starts as the warmed-up actor (warmup.steps): name its "
                f"directory in {role_field(role)}.path"
            )
            raise ConfigError(name, value, problem)
        theirs, ours = trial.state.roles[role].optimizer, role_settings(config, role).optimizer.name
        if is_trained and theirs != ours:
            raise ConfigError(name, value, f"{directory}: role {role!r} has the state of {theirs}, not of {ours}")


def _named_by(config: Config, trial: StoredTrial) -> tuple[str, str]:
    """Return the setting that led to the checkpoint, with its value."""
    return ("trial", config.trial) if trial.begin.own else ("resume", config.resume)


def _check_schedule(config: Config, state: CheckpointState) -> None:
    train = config.train
    if state.step >= train.total_steps:
        problem = f"is at step {state.step}, and train.total_steps ({train.total_steps}) is reached: increase it"
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


def check_inputs(config: Config, paths: TrialPaths, trial: StoredTrial, sizes: Mapping[str, int]) -> None:
    """Check that model and data are those of the checkpoint and the ledger, and that steps are left to train.

    ``sizes``: number of prompts per split. Raises ConfigError.
    """
    if trial.state is not None:
        _check_state(config, paths, trial, sizes)
    if trial.prompts not in (None, sizes["train"]) and takes_prompts(config):
        problem = (
            f"trial {config.trial!r} was begun with {trial.prompts} prompts, and the train split has "
            f"{sizes['train']}: use the same data, or choose another trial name"
        )
        raise ConfigError("data.train", config.data.train, problem)
    rows = rows_of_epoch(config, sizes)
    if trial.done and trial.steps >= planned_steps(config, rows):
        by_epochs = planned_steps(config, rows) < config.train.total_steps
        name = "train.total_epochs" if by_epochs else "train.total_steps"
        value = config.train.total_epochs if by_epochs else config.train.total_steps
        problem = f"trial {config.trial!r} has trained its {trial.steps} steps: increase it to continue"
        raise ConfigError(name, value, problem)


def rows_of_epoch(config: Config, sizes: Mapping[str, int]) -> int:
    """Return the prompts of the train split, or in a supervised run the lines of data.demos to train on."""
    return sizes["train"] if takes_prompts(config) else sizes.get("demos", 0)


def is_complete(config: Config, trial: StoredTrial) -> bool:
    """Return True if the trial has ended and has trained all steps of ``config``, as far as the trial alone tells.

    The ledger of a supervised run does not know its lines: with epochs such a trial is complete if the limits are those
    that it ended with.
    """
    if trial.config is None or not trial.done:
        return False
    if config.train.total_epochs and not takes_prompts(config):
        limits = ((each.train.total_steps, each.train.total_epochs) for each in (config, trial.config))
        return len(set(limits)) == 1
    if config.train.total_epochs and trial.prompts is None:
        return False
    return trial.steps >= planned_steps(config, trial.prompts or 0)


def _check_state(config: Config, paths: TrialPaths, trial: StoredTrial, sizes: Mapping[str, int]) -> None:
    assert trial.state is not None
    name, value = _named_by(config, trial)
    wanted = saved_roles(config, dataflow_of(config))
    for role in (role for role in trial.state.roles if role in wanted):
        for size, ours in describe_role(config, paths, role, "").sizes.items():
            if (theirs := trial.state.roles[role].sizes.get(size)) != ours:
                problem = f"is of another model: role {role!r} has {size} {theirs} there, {ours} here"
                raise ConfigError(name, value, problem)
    position, epochs = trial.state.position, config.train.total_epochs
    if sizes["train"] != position.prompts and takes_prompts(config):
        problem = f"was trained on {position.prompts} prompts, and the train split has {sizes['train']}: "
        raise ConfigError(name, value, problem + "use the same data")
    is_used_up = position.cursor >= epochs * position.prompts and len(position.pending) < config.train.batch_groups
    if trial.config is None and epochs and is_used_up:
        problem = f"resume={config.resume} has trained all prompts of these epochs: increase it"
        raise ConfigError("train.total_epochs", epochs, problem)


def _at(tree: Any, name: str) -> Any:
    for part in name.split("."):
        tree = tree[part]
    return tree


def changes(old: Any, new: Any, name: str = "") -> Iterator[SettingChange]:
    """Compare two plain trees of values; yield what differs."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in dict.fromkeys([*old, *new]):
            yield from changes(old.get(key), new.get(key), f"{name}.{key}" if name else str(key))
    elif old != new:
        yield SettingChange(name, old, new)


# ---- for people


def describe(start: TrialStart, *, service: bool = False) -> Iterator[str]:
    """Say from where training continues, and with which settings changed; nothing for a new trial.

    ``service``: it has no checkpoints of its own.
    """
    yield from (f"damaged: {problem}" for problem in start.damaged)
    if start.kind == "resumed":
        yield f"continuing at step {start.step} from {start.checkpoint}"
    elif start.checkpoint:
        yield f"continuing from {Path(start.checkpoint).name}; {start.trained} steps had been trained"
    elif start.kind == "recovered" and not service:
        yield "starting again from the beginning: there is no complete checkpoint yet"
    yield from (f"changed: {change.field}={change.new!r} (was {change.old!r})" for change in start.changed)


def newer_data(config: Config, paths: TrialPaths) -> Iterator[str]:
    """Name data files that were written after the trial's last start: the ledger knows prompts by number alone."""
    began = paths.config.stat().st_mtime
    is_own = config.data.kind == "arith" or is_converted(paths)
    for split in () if is_own else ("train", "eval"):
        file = Path(getattr(config.data, split))
        if file.is_file() and file.stat().st_mtime > began:
            yield f"data.{split} was written after the last start: {file} must hold the same prompts in the same order"
