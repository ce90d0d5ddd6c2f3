"""`realsys run` of a trial that exists: it goes on in its folder. Everything that cannot work is found here.

    earlier_run ──> what is in the folder
    check_fixed     what the folder was made with must not have changed     nothing is written
    check_rest      there is something left to train                        nothing is written
    tidy            what the dead run left: names, half-written files, its report

Which checkpoint training goes on from is found by the MasterWorker, with the same function (realsys.master.recovery):
it reads all of the files, the launcher only looks at their sizes.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realsys.config.dump import read_config
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.errors import CheckpointError, ConfigError, LedgerError
from realsys.launch.resume import check_checkpoint
from realsys.manager.ledger.events import Opened, Snapshot
from realsys.manager.ledger.journal import read_journal
from realsys.master.loop import planned_steps
from realsys.master.recovery import Start, decide
from realsys.telemetry.steps import surviving_steps
from realsys.train.checkpoint.checkpoint_files import CheckpointState, check_sizes, complete_checkpoints, read_state

#: what the trial's folder and its ledger were made with; everything else may change
_FIXED = ("seed", "train.batch_groups", "rollout.group_size", "resume", "data.kind")
_FIXED_IF_MADE = {"data.kind": ("arith", "data.arith"), "model.path": ("", "model.tiny")}
_KEPT_ERRORS = 50  # files of earlier starts
_HALF_WRITTEN = ("*.tmp", "weights/*/*.tmp", "checkpoints/*.tmp", "hf/*.tmp", "record/*.tmp", "errors/.*")


@dataclass(frozen=True, slots=True)
class EarlierRun:
    """A trial that exists: the configuration of its last start, where it goes on, what it had done."""

    config: Config
    start: Start
    steps: int  # trained, as far as they still hold
    done: bool  # its MasterWorker had finished


def earlier_run(paths: TrialPaths) -> EarlierRun | None:
    """What is in the trial's folder; None if it was never made, or not completely. Raises ConfigError."""
    if not paths.config.exists():
        return None
    steps, phase = 0, None
    for record in surviving_steps(paths.steps):
        steps += record["kind"] == "train"
        phase = record.get("phase") if record["kind"] == "phase" else phase
    try:
        start = decide(complete_checkpoints(paths.checkpoints), "", _whole)
    except CheckpointError as error:
        raise ConfigError("trial", paths.root.name, str(error)) from None
    return EarlierRun(
        config=read_config(paths.config),
        start=start,
        steps=steps,
        done=phase == "done",
    )


def _whole(directory: Path) -> CheckpointState:
    state = read_state(directory)
    check_sizes(directory, state)
    return state


def check_fixed(config: Config, earlier: EarlierRun) -> CheckpointState | None:
    """The state of the checkpoint that ``config`` goes on from, None without one. Raises ConfigError."""
    ours, theirs = config.model_dump(), earlier.config.model_dump()
    fields = list(_FIXED)
    for field, (made, section) in _FIXED_IF_MADE.items():
        if made in (_at(ours, field), _at(theirs, field)):
            fields += [field, section]
    for field in fields:
        for name, old, new in changes(_at(theirs, field), _at(ours, field), field):
            problem = f"trial {config.trial!r} was begun with {old!r}; keep that, or choose another name for the trial"
            raise ConfigError(name, new, problem)
    if earlier.start.checkpoint is not None:
        return check_checkpoint(config, earlier.start.checkpoint, "trial", config.trial)
    return check_checkpoint(config, Path(config.resume), "resume", config.resume) if config.resume else None


def check_rest(config: Config, paths: TrialPaths, earlier: EarlierRun, sizes: Mapping[str, int]) -> None:
    """The data is the same, and there is something left to do. ``sizes``: prompts per split. Raises ConfigError."""
    prompts = _check_ledger(config, paths, earlier)
    if prompts not in (None, sizes["train"]):
        problem = (
            f"trial {config.trial!r} was begun with {prompts} prompts, and the train split has "
            f"{sizes['train']}: use the same data, or choose another name for the trial"
        )
        raise ConfigError("data.train", config.data.train, problem)
    planned = planned_steps(config, sizes["train"])
    if earlier.done and earlier.steps >= planned:
        by_epochs = planned < config.train.total_steps
        field = "train.total_epochs" if by_epochs else "train.total_steps"
        value = config.train.total_epochs if by_epochs else config.train.total_steps
        problem = f"trial {config.trial!r} has trained its {earlier.steps} steps: nothing is left; raise that to go on"
        raise ConfigError(field, value, problem)


def _check_ledger(config: Config, paths: TrialPaths, earlier: EarlierRun) -> int | None:
    """The number of prompts that the ledger was begun with, None if it does not say. Reads all of it.

    Raises ConfigError.
    """
    if not paths.ledger.exists():
        if earlier.start.own and earlier.start.step > 0:
            problem = f"{paths.ledger} is gone, and with it what has become of the prompts: restore it from a copy"
            raise ConfigError("trial", config.trial, f"{problem}, or begin a new trial with resume={paths.root}")
        return None
    prompts = None
    try:
        for event, _ in read_journal(paths.ledger):
            opened = event.opened if isinstance(event, Snapshot) else event
            if prompts is None and isinstance(opened, Opened):
                prompts = opened.prompts
    except LedgerError as error:
        raise ConfigError("trial", config.trial, str(error)) from None
    return prompts


def _at(tree: Any, field: str) -> Any:
    for part in field.split("."):
        tree = tree[part]
    return tree


def changes(old: Any, new: Any, field: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted field, old, new) of all values that differ between two plain trees."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in dict.fromkeys([*old, *new]):
            yield from changes(old.get(name), new.get(name), f"{field}.{name}" if field else str(name))
    elif old != new:
        yield field, old, new


def newer_data(config: Config, paths: TrialPaths) -> Iterator[str]:
    """For people: files written after the trial's last start. The ledger knows prompts by their number alone."""
    began = paths.config.stat().st_mtime
    for field in ("train", "eval") if config.data.kind != "arith" else ():
        file = Path(getattr(config.data, field))
        if file.is_file() and file.stat().st_mtime > began:
            yield f"data.{field} was written after the last start: {file} must hold the same prompts in the same order"


def where_from(earlier: EarlierRun) -> Iterator[str]:
    """For people: where training goes on."""
    for problem in earlier.start.damaged.values():
        yield f"damaged: {problem}"
    if earlier.start.checkpoint is not None:
        yield f"going on from {earlier.start.checkpoint.name}; {earlier.steps} steps had been trained"
    elif earlier.config.resume:
        yield f"going on from {earlier.config.resume}: this trial has no complete checkpoint of its own yet"
    else:
        yield "going on from the beginning: there is no complete checkpoint yet"


def tidy(paths: TrialPaths) -> None:
    """Remove what the last run left and the next would trip over; nothing that the trial goes on from.

    Raises OSError.
    """
    for folder in (paths.name_store, paths.own_etcd):
        if folder.exists():
            shutil.rmtree(folder)
    remove_half_written(paths)
    paths.summary.unlink(missing_ok=True)  # `realsys status` would show it as the end
    old = paths.errors / "old"
    for error in sorted(paths.errors.glob("*.json")):  # not to be taken for the first failure of the next run
        old.mkdir(exist_ok=True)
        error.replace(_free(old / error.name))
    for error in sorted(old.glob("*.json"), key=lambda path: path.stat().st_mtime)[:-_KEPT_ERRORS]:
        error.unlink()


def remove_half_written(paths: TrialPaths) -> None:
    """What processes that are dead were writing: nobody will complete it. Raises OSError."""
    for half_written in (f for pattern in _HALF_WRITTEN for f in paths.root.glob(pattern)):
        if half_written.is_dir():
            shutil.rmtree(half_written)
        else:
            half_written.unlink(missing_ok=True)


def _free(path: Path) -> Path:
    """``path``, or with a number: pids come again."""
    found, number = path, 2
    while found.exists():
        found, number = path.with_stem(f"{path.stem}-{number}"), number + 1
    return found
