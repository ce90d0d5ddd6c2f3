"""Makes the trial folder, or gets the one of an earlier run ready to go on in it.

    find      is there such a trial, and may this run go on with it      nothing is written
    prepare   a new one: token, model, data, configuration               or nothing of it is left
              an earlier one: checked, tidied up, configuration          or it is untouched

Everything a user can get wrong is found here; nothing is started.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Self, TypeVar

from realsys.cluster.network import bind_tcp
from realsys.config.allocation import parse_allocation
from realsys.config.dataflow import dataflow_of
from realsys.config.dump import newest_dump, read_config, write_config
from realsys.config.paths import TrialPaths
from realsys.config.rules.checks import check_made_model
from realsys.config.schema import Config
from realsys.config.schema_train import RoleConfig, RolesConfig
from realsys.errors import ConfigError, RealsysError
from realsys.launch.lock import TrialLock, held_by, running_launcher
from realsys.launch.recover import (
    EarlierRun,
    changes,
    check_fixed,
    check_rest,
    earlier_run,
    newer_data,
    tidy,
    where_from,
)
from realsys.launch.resume import check_inputs, check_resume, resume_path, start_ledger

Role = TypeVar("Role", bound=RoleConfig)

_LOOK_AGAIN_S = 0.1
_KILLED_WITHIN_S = 4.0  # beyond their own time to stop: what a killed launcher's workers need to be gone
DEFAULT_TRIAL = str(Config.model_fields["trial"].default)


def resolve(config: Config, *, now: datetime) -> Config:
    """Give the trial a name if it has none, and make every path absolute, for workers that run elsewhere.

    Raises ConfigError when ``resume`` names no checkpoint, or no trial is there with ``recover=resume``.
    """
    fileroot = Path(config.fileroot).resolve()
    update: dict[str, object] = {"fileroot": str(fileroot)}
    if config.trial == DEFAULT_TRIAL:
        update["trial"] = _newest_name(config, fileroot) if config.recover == "resume" else _free_name(config, now)
    if config.model.path:
        update["model"] = config.model.model_copy(update={"path": _absolute(config.model.path)})
    update["roles"] = _absolute_roles(config.roles)
    data = config.data
    files = {"train": _absolute(data.train), "eval": _absolute(data.eval), "demos": _absolute(data.demos)}
    update["data"] = data.model_copy(update=files)
    resolved = config.model_copy(update=update)
    return resolved.model_copy(update={"resume": _resume(resolved)})


def _resume(config: Config) -> str:
    """The checkpoint that a new trial begins from. A trial that exists keeps its own, though it may be gone by now."""
    if config.resume and config.recover != "off" and (dump := TrialPaths.of(config).config).exists():
        begun_from = read_config(dump).resume
        if begun_from and Path(config.resume).resolve() in (Path(begun_from), *Path(begun_from).parents[1:2]):
            return begun_from
    return resume_path(config.resume)


def _absolute(path: str) -> str:
    return str(Path(path).resolve()) if path else ""


def _absolute_roles(roles: RolesConfig) -> RolesConfig:
    def moved(role: Role) -> Role:
        return role.model_copy(update={"path": _absolute(role.path)})

    custom = {name: moved(role) for name, role in roles.custom.items()}
    return RolesConfig(ref=moved(roles.ref), critic=moved(roles.critic), reward=moved(roles.reward), custom=custom)


def _free_name(config: Config, now: datetime) -> str:
    """The time of the start; with a number when two runs start within one second."""
    parent = Path(config.fileroot).resolve() / config.experiment
    stem = now.strftime("%Y%m%d-%H%M%S")
    name, number = stem, 2
    while (parent / name).exists():
        name, number = f"{stem}-{number}", number + 1
    return name


def _newest_name(config: Config, fileroot: Path) -> str:
    newest = newest_dump(fileroot, config.experiment)
    if newest is None:
        problem = f"there is no trial of experiment {config.experiment!r} in {fileroot} to go on with"
        raise ConfigError("recover", config.recover, problem)
    return newest.parent.name


def find(config: Config, paths: TrialPaths) -> EarlierRun | None:
    """The trial that this run goes on with; None for a new one. Writes nothing. Raises ConfigError."""
    if not paths.root.exists():
        if config.recover == "resume":
            raise ConfigError("trial", config.trial, f"there is no such trial in {paths.root.parent} to go on with")
        return None
    if config.recover == "off":
        problem = f"exists already in {paths.root}; choose another name, or go on with it: recover=auto"
        raise ConfigError("trial", config.trial, problem)
    if (pid := running_launcher(paths.lock)) is not None:
        raise held_by(pid, config.trial)
    earlier = earlier_run(paths)
    if earlier is None:
        if not paths.lock.exists():
            raise ConfigError("trial", config.trial, f"{paths.root} exists and is no trial; choose another name")
        if trained := [path.name for path in (paths.checkpoints, paths.steps, paths.weights().parent) if path.exists()]:
            problem = f"{paths.root} has {', '.join(trained)} and no {paths.config.name}: restore that, or remove all"
            raise ConfigError("trial", config.trial, problem)
    return earlier


def examine(config: Config, paths: TrialPaths, earlier: EarlierRun) -> list[str]:
    """Whether ``config`` can go on with the trial; what there is to say of it. Writes nothing.

    Raises ConfigError, ModelError or DataError.
    """
    state = check_fixed(config, earlier)
    sizes = _read_inputs(config, paths)
    if state is not None:
        check_inputs(config, paths, state, sizes, "trial", config.trial)
    check_rest(config, paths, earlier, sizes)
    lines = [_data_line(sizes), *newer_data(config, paths), *where_from(earlier)]
    for field, old, new in changes(earlier.config.model_dump(), config.model_dump()):
        lines.append(f"changed: {field}={new!r} (was {old!r})")
    return lines


@dataclass(frozen=True, slots=True)
class Ready:
    """A trial whose workers can start. Nobody else can run it until this context is left, after their end."""

    paths: TrialPaths
    lock: TrialLock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.lock.close()


def prepare(config: Config, say: Callable[[str], None]) -> Ready:
    """Make the folder of a resolved trial ready for its workers.

    Raises ConfigError, ModelError or DataError; then nothing is left of a new folder, and an old one is untouched.
    """
    paths = TrialPaths.of(config)
    found = find(config, paths)
    if found is None:
        check_resume(config)
        try:
            paths.root.mkdir(parents=True, exist_ok=paths.lock.exists())
        except FileExistsError:
            raise ConfigError("trial", config.trial, f"{paths.root} was made by another at this moment") from None
        except OSError as exc:
            raise ConfigError("fileroot", config.fileroot, f"cannot make {paths.root}: {exc.strerror}") from None
    try:
        lock = TrialLock(
            paths.lock, config.trial, retry_timeout_s=config.cluster.stop_timeout_s + _KILLED_WITHIN_S, say=say
        )
    except ConfigError:
        if found is None:
            with contextlib.suppress(OSError):  # it may be another's by now
                paths.root.rmdir()
        raise
    try:
        earlier = earlier_run(paths)  # again: its last workers may have written until now
        if earlier is not None:
            _go_on(config, paths, earlier, say)
        else:
            _make(config, paths, say)
        lock.sign()
    except OSError as exc:
        lock.close()
        problem = f"{paths.root} cannot be made ready: {exc.filename or 'a file in it'}: {exc.strerror}"
        raise ConfigError("fileroot", config.fileroot, problem) from None
    except BaseException:
        lock.close()
        raise
    return Ready(paths, lock)


def _make(config: Config, paths: TrialPaths, say: Callable[[str], None]) -> None:
    """A new trial, in a folder that has nothing but the lock, or what a launcher left that was killed in here."""
    try:
        refuse_taken_address(config)
        _empty(paths)
        for folder in (paths.logs, paths.errors, paths.data):
            folder.mkdir()
        _write_token(paths.token)
        _make_inputs(config, paths)
        sizes = _read_inputs(config, paths)
        say(_data_line(sizes))
        resumed = check_resume(config)
        if resumed is not None:
            start_ledger(config, paths, resumed, sizes)
            say(f"continuing at step {resumed.step} from {config.resume}")
        _clear_names(config, paths, say)
        write_config(config, paths.config)  # last: with it the folder is a trial
    except BaseException:
        shutil.rmtree(paths.root, ignore_errors=True)
        raise


def _empty(paths: TrialPaths) -> None:
    for path in paths.root.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path != paths.lock:
            path.unlink()


def _go_on(config: Config, paths: TrialPaths, earlier: EarlierRun, say: Callable[[str], None]) -> None:
    refuse_taken_address(config)
    lines = examine(config, paths, earlier)
    _clear_names(config, paths, say)
    for folder in (paths.logs, paths.errors):
        folder.mkdir(exist_ok=True)
    tidy(paths)
    if not paths.token.exists():
        _write_token(paths.token)
    write_config(config, paths.config)
    for line in lines:
        say(line)


def refuse_taken_address(config: Config) -> None:
    """The address of the run's own name store must be free. Raises ConfigError."""
    settings = config.cluster.name_store
    if not settings.start:
        return
    host, _, port = settings.address.rpartition(":")
    try:
        bind_tcp(host, int(port)).close()
    except RealsysError:
        problem = "cannot be bound; set another port, or cluster.name_store.start=false to use what listens there"
        raise ConfigError("cluster.name_store.address", settings.address, problem) from None


def _write_token(path: Path) -> None:
    """A fresh secret that only this user can read: the mode is set at creation, not after it. There whole or not."""
    staged = path.with_suffix(".tmp")
    fd = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w", encoding="ascii") as file:
        file.write(secrets.token_urlsafe(32))
    staged.replace(path)


def _make_inputs(config: Config, paths: TrialPaths) -> None:
    """Tiny model and generated data, where the trial asks for them."""
    from realsys.data.arith import write_dataset
    from realsys.data.char_model import make_tiny_model, write_char_tokenizer

    if config.data.kind == "arith":
        write_dataset(config.data.arith, paths.data, seed=config.seed)
    if not config.model.path:
        write_char_tokenizer(paths.model)
        make_tiny_model(config.model.tiny, paths.model, seed=config.seed)


def _read_inputs(config: Config, paths: TrialPaths) -> dict[str, int]:
    """Check the made model and every line of the datasets. Returns the number of prompts per split, and of demos."""
    from realsys.data.check import check_data
    from realsys.data.tokenizer import TextTokenizer
    from realsys.rollout import agents

    model = Path(config.model.path) if config.model.path else paths.model
    if not config.model.path:
        check_made_model(model, config, parse_allocation(config.allocation), dataflow_of(config))
    tokenizer = TextTokenizer(model)
    agents.check(config, tokenizer)
    sizes = check_data(config, paths, tokenizer)
    _check_sizes(config, sizes)
    return sizes


def _data_line(sizes: Mapping[str, int]) -> str:
    return "data: " + ", ".join(f"{count:,} {split}" for split, count in sizes.items() if count)


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


def _clear_names(config: Config, paths: TrialPaths, say: Callable[[str], None]) -> None:
    """A name store outside the trial folder outlives trials: forget an earlier one of the same name.

    Raises ConfigError when a trial of this name runs, in another folder: without its names its workers would stop.
    """
    settings = config.cluster.name_store
    if settings.start or (settings.backend == "file" and not settings.root):
        return  # in the trial's folder
    from realsys.cluster.store.connect import make_name_store, trial_names

    names, lease_s = trial_names(config), config.cluster.lease_s
    deadline, said = time.monotonic() + 2 * lease_s, False
    store = make_name_store(config, paths)
    try:
        while alive := store.get_subtree(names.heartbeats):
            key, value = next(iter(alive.items()))
            if time.monotonic() >= deadline:
                problem = f"runs in another folder, with the same name store ({key}: {value:.200})"
                raise ConfigError("trial", config.trial, f"{problem}; stop that first, or choose another name")
            if not said:  # this folder's own workers are gone, but not all of them could say so
                say(f"waiting up to {2 * lease_s:g} s for {len(alive)} leases of its last run to lapse")
            said = True
            threading.Event().wait(_LOOK_AGAIN_S)
        store.clear_subtree(names.root)
    finally:
        store.close()
