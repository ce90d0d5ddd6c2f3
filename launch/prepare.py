"""Makes the trial folder, or gets the folder of an earlier run ready to continue in it.

    resolve   trial name and absolute paths
    examine   what --dry-run does: every check, and nothing is written
    prepare   a new trial: token, model, data, configuration     if it fails, nothing of it is left
              an earlier one: checked, tidied, configuration     if it fails, the folder is untouched

Everything that a user can get wrong is found here. Nothing is started.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Self

import msgspec

from realsys.cluster.files import write_secret
from realsys.cluster.names.connect import check_own_etcd, make_name_store, trial_names
from realsys.cluster.network import bind_problem, is_loopback, take_address
from realsys.cluster.stream.sockets import private_folder
from realsys.config.allocation import parse_allocation
from realsys.config.compose import with_overrides
from realsys.config.dataflow import dataflow_of, role_settings, takes_prompts
from realsys.config.evaluation_sets import evaluation_sets
from realsys.config.paths import TrialPaths, newest_dump, read_config, write_config
from realsys.config.rules import check_made_model
from realsys.config.schema import Config
from realsys.config.schema_data import HELD_OUT, absolute_source
from realsys.config.trial_sizes import disk_bytes, model_of
from realsys.data.check import DataCheck
from realsys.data.convert import check_copy, check_prompts, needs_copy, write_digest
from realsys.data.prompts import write_atomically
from realsys.errors import ConfigError, NameStoreError, StreamError
from realsys.launch.nodes.orders import outlive_agents
from realsys.launch.start import (
    StoredTrial,
    check_inputs,
    decide_start,
    describe,
    is_complete,
    newer_data,
    read_trial,
    resume_path,
)
from realsys.launch.trial_folder import TrialLock, claim_keys, held_by, remove_keys, running_launcher, tidy
from realsys.manager.ledger.events import Resumed
from realsys.manager.ledger.journal import Journal
from realsys.model_files.config_json import read_model
from realsys.model_files.weight_headers import check_weights
from realsys.observe.screen.text_figures import size_text
from realsys.reward.rubric import read_rubric
from realsys.serve.settings import ServeSettings
from realsys.train.master.recovery import TrialStart, write_start

_SET_UP = "setting up: model, data, and a check of every row"  # may take minutes
_KILLED_WITHIN_S = 4.0  # beyond their own time to stop: how long workers of a killed launcher need to end
_OF_THE_FOLDER = ("experiment", "trial", "fileroot", "recover")
DEFAULT_TRIAL = str(Config.model_fields["trial"].default)


def stored_config(paths: TrialPaths, overrides: Sequence[str]) -> Config:
    """Return the configuration of a trial with ``overrides``. A folder that was moved keeps its trial.

    Raises ConfigError.
    """
    for name in (text.partition("=")[0].lstrip("+") for text in overrides):
        if name in _OF_THE_FOLDER:
            raise ConfigError(name, "", "belongs to the folder of the trial: leave it out, or use realsys run")
    config = with_overrides(read_config(paths.config), overrides)
    if (config.experiment, config.trial) != (paths.root.parent.name, paths.root.name):
        problem = f"is trial {config.experiment}/{config.trial}: give its folder this name again"
        raise ConfigError("TRIAL_DIR", str(paths.root), problem)
    recover = "resume" if config.recover == "off" else config.recover
    return config.model_copy(update={"fileroot": str(paths.root.parent.parent), "recover": recover})


def resolve(config: Config, *, now: datetime) -> Config:
    """Give the trial a name if it has none, and make every path absolute, because workers run elsewhere.

    Raises ConfigError if ``resume`` names no checkpoint, or if ``recover=resume`` and there is no trial.
    """
    config = read_rubric(config)
    fileroot = Path(_absolute(config.fileroot))
    update: dict[str, object] = {"fileroot": str(fileroot)}
    if config.trial == DEFAULT_TRIAL:
        update["trial"] = _newest_name(config, fileroot) if config.recover == "resume" else _free_name(config, now)
    update["model"] = config.model.model_copy(update={"path": _absolute(config.model.path)})
    update["roles"] = {
        name: role.model_copy(update={"path": _absolute(role.path)}) for name, role in config.roles.items()
    }
    data, sglang, store = config.data, config.generation.sglang, config.cluster.name_store
    mixture = [source.model_copy(update={"path": absolute_source(source.path)}) for source in data.mixture]
    files = {
        "train": absolute_source(data.train),
        "eval": absolute_source(data.eval),
        "demos": absolute_source(data.demos),
    }
    sets = {
        name: own.model_copy(update={"path": absolute_source(own.path)}) for name, own in config.evaluation.sets.items()
    }
    update["evaluation"] = config.evaluation.model_copy(update={"sets": sets})
    update["data"] = data.model_copy(update={**files, "mixture": mixture})
    # Not made absolute: the python of a virtual environment is a link, and must be called by its own name.
    sglang = sglang.model_copy(update={"python": os.path.expanduser(sglang.python)})
    update["generation"] = config.generation.model_copy(update={"sglang": sglang})
    update["train"] = config.train.model_copy(update={"loop": _loop(config.train.loop)})
    store = store.model_copy(update={"root": _absolute(store.root)})
    update["cluster"] = config.cluster.model_copy(update={"name_store": store})
    resolved = config.model_copy(update=update)
    return resolved.model_copy(update={"resume": _resume(resolved)})


def _resume(config: Config) -> str:
    """Find the checkpoint that a new trial begins from; an existing trial keeps its own, which may be gone by now."""
    if config.resume and config.recover != "off" and (dump := TrialPaths.of(config).config).exists():
        begun_from = read_config(dump).resume
        if begun_from and Path(_absolute(config.resume)) in (Path(begun_from), *Path(begun_from).parents[:2]):
            return begun_from
    return resume_path(config.resume)


def _loop(name: str) -> str:
    """Return ``train.loop`` with the absolute path of its file, and the name of its function."""
    path, _, function = name.rpartition(":") if ".py:" in name else (name, "", "train")
    return f"{_absolute(path)}:{function}" if path.endswith(".py") else name


def _absolute(path: str) -> str:
    return str(Path(os.path.expanduser(path)).resolve()) if path else ""


def _free_name(config: Config, now: datetime) -> str:
    """Name a trial by the time of its start, with a number if two runs start within one second."""
    parent = Path(_absolute(config.fileroot)) / config.experiment
    stem = now.strftime("%Y%m%d-%H%M%S")
    name, number = stem, 2
    while (parent / name).exists():
        name, number = f"{stem}-{number}", number + 1
    return name


def _newest_name(config: Config, fileroot: Path) -> str:
    newest = newest_dump(fileroot, config.experiment)
    if newest is None:
        problem = f"there is no trial of experiment {config.experiment!r} in {fileroot} to continue"
        raise ConfigError("recover", config.recover, problem)
    return newest.parent.name


def check_folder(config: Config, paths: TrialPaths) -> None:
    """Check that the trial folder may be used: there is none, or it is a trial that this run may continue.

    Raises ConfigError.
    """
    if not paths.root.exists():
        if config.recover == "resume":
            raise ConfigError("trial", config.trial, f"there is no such trial in {paths.root.parent} to continue")
        return
    if config.recover == "off":
        problem = f"exists already in {paths.root}: choose another name, or continue it with recover=auto"
        raise ConfigError("trial", config.trial, problem)
    if (pid := running_launcher(paths.lock)) is not None:
        raise held_by(pid, config.trial)
    if paths.config.exists():
        return
    if not paths.lock.exists():
        raise ConfigError("trial", config.trial, f"{paths.root} exists and is not a trial: choose another name")
    if trained := [path.name for path in (paths.checkpoints, paths.steps, paths.weights().parent) if path.exists()]:
        problem = f"{paths.root} has {', '.join(trained)} and no {paths.config.name}: restore that, or remove all"
        raise ConfigError("trial", config.trial, problem)


@dataclass(frozen=True, slots=True)
class Examined:
    """Result of a dry run. ``sizes``: prompts per split, and demonstrations. ``digest``: of the train prompts."""

    start: TrialStart
    sizes: Mapping[str, int]
    lines: list[str]
    digest: str


def examine(config: Config, paths: TrialPaths, *, other_disk: bool = False) -> Examined:
    """Run every check of a start. Files that a new trial would get are made in a temporary folder.

    ``other_disk``: do not check the room on this machine's disk, because the trial is for other machines.

    Raises ConfigError, ModelError or DataError.
    """
    check_folder(config, paths)
    trial = read_trial(config, paths)
    if trial.config is not None:
        return _examine(config, paths, trial)
    with tempfile.TemporaryDirectory(prefix="realsys-") as scratch:
        inputs = TrialPaths(Path(scratch))
        inputs.data.mkdir()
        check_here(config, paths, other_disk=other_disk)
        make_inputs(config, inputs)
        return _examine(config, inputs, trial)


def complete_start(config: Config, paths: TrialPaths) -> TrialStart | None:
    """Return the start of a trial that has trained all its steps and can be left alone; None for any other.

    Raises ConfigError.
    """
    check_folder(config, paths)
    trial = read_trial(config, paths)
    return decide_start(config, trial) if is_complete(config, trial) else None


def differences(start: TrialStart) -> Iterator[str]:
    """Name the settings of a complete trial that the command does not have. Its results stay as they are."""
    yield from (f"it has {change.field}={change.old!r}, not {change.new!r}" for change in start.changed)


def _examine(config: Config, paths: TrialPaths, trial: StoredTrial) -> Examined:
    """Decide the start and check the inputs under ``paths``. Writes nothing."""
    start = decide_start(config, trial)
    if trial.config is not None:
        _check_made(config, paths)
        check_here(config, paths)
        check_copy(config, trial.config, paths)
    sizes, warnings, digest = _read_inputs(config, paths)
    check_inputs(config, paths, trial, sizes)
    check_prompts(config, paths, digest)
    newer = newer_data(config, paths) if trial.config is not None else ()
    return Examined(
        start, sizes, [_data_line(sizes), *warnings, *newer, *describe(start, service=config.is_service)], digest
    )


def _check_made(config: Config, paths: TrialPaths) -> None:
    """Check that a trial still has the model and the data that its first start made. Raises ConfigError."""
    made = [] if config.model.path else [(paths.start_model, "model")]
    made += [(paths.data, "data")] if config.data.kind == "arith" or needs_copy(config.data) else []
    for path, what in made:
        if not path.is_dir():
            problem = f"{path} is missing, the {what} that the first start of this trial made: restore it from a copy"
            again = f"copy the {path.name} of a new trial with the same settings and version of realsys to its place"
            raise ConfigError("trial", config.trial, f"{problem}, or {again}")


@dataclass(frozen=True, slots=True)
class Ready:
    """A trial whose workers can start. No other launcher can run it until this context is left, after their end.

    ``at_end`` is called then, still with the lock.
    """

    paths: TrialPaths
    lock: TrialLock
    at_end: Callable[[], None]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.at_end()
        finally:
            self.lock.close()


def prepare(config: Config, say: Callable[[str], None], serve: ServeSettings | None = None) -> Ready:
    """Make the folder of a resolved trial ready for its workers. ``serve``: for the clients of a service.

    Raises ConfigError, ModelError or DataError; then nothing is left of a new folder, and an old one is untouched.
    """
    paths = TrialPaths.of(config)
    check_folder(config, paths)
    is_new = not paths.root.exists()
    trial = None
    if is_new:
        trial = read_trial(config, paths)
        _make_folder(config, paths)
    with contextlib.ExitStack() as undo:
        lock = undo.enter_context(contextlib.closing(_lock(config, paths, is_new, say)))
        try:
            if trial is None:  # only now: workers of the last run may have written until the lock was free
                outlive_agents(paths.coordinator, say)  # workers on other nodes do not hold the lock
                trial = read_trial(config, paths)
            if trial.config is not None:
                _continue(config, paths, trial, say, serve)
            else:
                _make(config, paths, trial, say, serve)
            lock.sign()
        except OSError as exc:
            problem = f"{paths.root} cannot be made ready: {exc.filename or 'a file in it'}: {exc.strerror}"
            raise ConfigError("fileroot", config.fileroot, problem) from None
        undo.pop_all()
    return Ready(paths, lock, lambda: remove_keys(config, paths, say))


def _make_folder(config: Config, paths: TrialPaths) -> None:
    try:
        paths.root.mkdir(parents=True)
    except FileExistsError:
        problem = f"another launcher made {paths.root} at this moment: try again"
        raise ConfigError("trial", config.trial, problem) from None
    except OSError as exc:
        raise ConfigError("fileroot", config.fileroot, f"cannot make {paths.root}: {exc.strerror}") from None


def _lock(config: Config, paths: TrialPaths, is_new: bool, say: Callable[[str], None]) -> TrialLock:
    retry_timeout_s = config.cluster.stop_timeout_s + _KILLED_WITHIN_S
    try:
        return TrialLock(paths.lock, config.trial, retry_timeout_s=retry_timeout_s, say=say)
    except ConfigError:
        if is_new:
            with contextlib.suppress(OSError):  # another launcher may use it by now
                paths.root.rmdir()
        raise


def _make(
    config: Config, paths: TrialPaths, trial: StoredTrial, say: Callable[[str], None], serve: ServeSettings | None
) -> None:
    """Make a new trial, in a folder with only the lock, or with what a launcher left that was killed in here."""
    try:
        check_here(config, paths)
        _empty(paths)
        for folder in (paths.logs, paths.errors, paths.data):
            folder.mkdir()
        write_secret(paths.token, secrets.token_urlsafe(32).encode())
        say(_SET_UP)
        make_inputs(config, paths)
        examined = _examine(config, paths, trial)
        write_digest(paths, examined.digest)
        if trial.state is not None:
            _start_ledger(config, paths, trial)
        for line in examined.lines:
            say(line)
        claim_keys(config, paths, say)
        if serve is not None:
            write_secret(paths.serve, msgspec.json.encode(serve))
        write_start(examined.start, paths.start)
        write_config(config, paths.config)  # last: with it the folder is a trial
    except BaseException:
        # the output of a job stays: it has the error
        if paths.job.parent.exists():
            with contextlib.suppress(OSError):
                _empty(paths)
        else:
            shutil.rmtree(paths.root, ignore_errors=True)
        raise


def _start_ledger(config: Config, paths: TrialPaths, trial: StoredTrial) -> None:
    """Write the first record of a trial that resumes another, once its model and data are known to be the same."""
    assert trial.state is not None
    state, position = trial.state, trial.state.position
    groups = state.step * config.train.batch_groups
    # A position in another order has no meaning in this one, which begins anew.
    goes_on = position.order == config.data.order
    cursor, pending = (position.cursor, position.pending) if goes_on else (0, [])
    if any(prompt >= position.prompts for prompt in pending):
        _copy_submitted(config, paths)
    resumed = (config.resume, state.step, groups, cursor, pending, time.time(), position.rates)
    with Journal(paths.ledger) as journal:
        journal.append([Resumed(*resumed)])
        journal.sync()


def _copy_submitted(config: Config, paths: TrialPaths) -> None:
    """Copy the rows that the script of the resumed trial has made: the ledger knows them by their lines."""
    rows = TrialPaths(Path(config.resume).parents[1]).submitted
    try:
        with rows.open("rb") as file:
            write_atomically(paths.submitted, iter(lambda: file.read(1 << 20), b""))
    except OSError as error:
        problem = f"its prompts are in {rows}, which cannot be copied: {error.strerror or error}"
        raise ConfigError("resume", config.resume, problem) from None


def _empty(paths: TrialPaths) -> None:
    for path in paths.root.iterdir():
        if path == paths.job.parent:  # the output of this run, if it is a job
            continue
        if path.is_dir():
            shutil.rmtree(path)
        elif path != paths.lock:
            path.unlink()


def _continue(
    config: Config, paths: TrialPaths, trial: StoredTrial, say: Callable[[str], None], serve: ServeSettings | None
) -> None:
    say(_SET_UP)
    examined = _examine(config, paths, trial)
    claim_keys(config, paths, say)
    for folder in (paths.logs, paths.errors):
        folder.mkdir(exist_ok=True)
    tidy(paths)
    write_digest(paths, examined.digest)
    if not paths.token.exists() or paths.token.stat().st_mode & 0o077:  # others may have read it
        write_secret(paths.token, secrets.token_urlsafe(32).encode())
    if serve is not None:
        write_secret(paths.serve, msgspec.json.encode(serve))
    write_start(examined.start, paths.start)
    write_config(config, paths.config)
    for line in examined.lines:
        say(line)


def make_inputs(config: Config, paths: TrialPaths) -> None:
    """Make the tiny model, and generated or converted data, if the trial uses them."""
    from realsys.data.arith import make_tiny_model, write_char_tokenizer, write_dataset
    from realsys.data.convert import convert, convert_sets

    if config.data.kind == "arith":
        preferences = dataflow_of(config).rows == "preferences"
        write_dataset(config.data.arith, paths.data, seed=config.seed, preferences=preferences)
    if not config.model.path:
        write_char_tokenizer(paths.start_model, chat=config.model.tiny.chat)
        make_tiny_model(config.model.tiny, paths.start_model, seed=config.seed)
    convert(config, paths)
    convert_sets(config, paths)


def _read_inputs(config: Config, paths: TrialPaths) -> DataCheck:
    """Check the made model and every line of the datasets."""
    from realsys.data.check import check_data
    from realsys.data.tokenizer import TextTokenizer
    from realsys.rollout import agents
    from realsys.rollout.check_references import check_references
    from realsys.rollout.gateway.gateway import check as check_gateway

    model = paths.base_model(config)
    if not config.model.path:
        check_made_model(model, config, parse_allocation(config.allocation), dataflow_of(config))
    tokenizer = TextTokenizer(model)
    agents.check(config, tokenizer)
    check_gateway(config, tokenizer)
    checked = check_data(config, paths, tokenizer)
    judging = check_references(config, paths)
    # settings that depend on the number of lines
    evaluation, train = config.evaluation, config.train
    asked: list[tuple[str, int, str]] = []
    for name, made in evaluation_sets(config).items():
        own = evaluation.sets.get(name)
        if own is not None and own.problems is not None:
            asked.append((f"evaluation.sets.{name}.problems", own.problems, made.split))
        elif made.split == HELD_OUT and not config.evaluate_only:  # else all problems are taken if they are fewer
            asked.append(("evaluation.problems", made.problems, HELD_OUT))
    for field, wanted, split in asked:
        if wanted > checked.sizes[split]:
            problems = "problems are held out" if split == HELD_OUT else "problems are in the set"
            raise ConfigError(field, wanted, f"only {checked.sizes[split]} {problems}: lower it")
    prompts = checked.sizes["train"]
    if takes_prompts(config) and 0 < train.total_epochs * prompts < train.batch_groups:
        problem = f"{train.total_epochs} epochs of {prompts} prompts do not fill one batch: lower it"
        raise ConfigError("train.batch_groups", train.batch_groups, problem)
    if config.warmup.steps and checked.sizes["demos"] < config.warmup.batch:
        problem = f"there are only {checked.sizes['demos']} demonstrations: lower it"
        raise ConfigError("warmup.batch", config.warmup.batch, problem)
    warnings = [f"warning: {text}" for text in (tokenizer.eos_warning, *checked.warnings, *judging) if text]
    return checked._replace(warnings=warnings)


def _data_line(sizes: Mapping[str, int]) -> str:
    return "data: " + (", ".join(f"{count:,} {split}" for split, count in sizes.items() if count) or "none")


# ---- checks what only this machine can tell, before anything starts: addresses, etcd, weight files, disk space
#
# The checks over the configuration are in realsys.config.rules. Every error names the field to change.


_ETCD_TIMEOUT_S = 5.0
#: Shortest lease with etcd on another host. An election takes seconds, with a lost host or a slow disk tens of seconds.
ELECTION_LEASE_S = 60.0
_GPUS = "cluster.gpus_per_node"
_MOST_ON_CPUS = 100_000_000  # parameters of a model that may train on CPUs unasked


def check_here(config: Config, paths: TrialPaths, *, other_disk: bool = False) -> None:
    """Run all checks of this module; with ``other_disk`` without that of the disk. Raises ConfigError or ModelError."""
    if not config.cluster.nodes:  # else the addresses are those of other machines
        check_addresses(config)
    check_etcd(config, paths)
    for role in dataflow_of(config).roles:
        settings = role_settings(config, role)
        if settings.path:
            check_weights(Path(settings.path), read_model(Path(settings.path), settings.head))
    is_written = paths.config.exists() or config.evaluate_only  # an evaluation links to the weights that it serves
    if not other_disk and not is_written:
        check_disk(config, disk_bytes(config, dataflow_of(config)))


def check_gpus_are_given(config: Config, given: Collection[str]) -> Iterator[str]:
    """Yield a warning if nothing tells how many GPUs the nodes have. A large model is refused then.

    ``given``: keys of the command line and of chosen files. Raises ConfigError or ModelError.
    """
    cluster = config.cluster
    if not cluster.nodes or cluster.gpus_per_node or _GPUS in given:
        return
    remedy = f"say how many GPUs a node has: {_GPUS}=8, or =0 for CPUs"
    if (parameters := model_of(config).parameters) > _MOST_ON_CPUS:
        problem = f"is the default, and a model of {parameters / 1e9:.1f}B parameters would train on CPUs: {remedy}"
        raise ConfigError(_GPUS, 0, problem)
    yield f"warning: all processes run on CPUs: {remedy}"


def check_addresses(config: Config) -> None:
    """Try every address that the workers will bind, and the folder of their Unix sockets. Raises ConfigError."""
    cluster, port = config.cluster, config.manager.port
    host = take_address(config, dict(os.environ)).cluster.host
    if port and (problem := bind_problem(host, port)):
        remedy = "choose another port, or 0 for any free one"
        raise ConfigError("manager.port", port, f"cannot be bound on {host}: {problem}: {remedy}")
    if is_loopback(host):  # then the streams are Unix sockets
        try:
            private_folder()
        except StreamError as error:
            raise ConfigError("cluster.host", host, str(error)) from None
    if cluster.name_store.start:
        check_own_etcd(cluster.name_store.address)


def check_etcd(config: Config, paths: TrialPaths) -> None:
    """Read from the etcd that the run uses, unless it starts its own. Raises ConfigError."""
    cluster, settings = config.cluster, config.cluster.name_store
    if settings.backend != "etcd" or settings.start:
        return
    hosts = [address.rpartition(":")[0] for address in settings.address.split(",")]
    if cluster.machines > 1 and (loopback := next(filter(is_loopback, hosts), "")):
        problem = f"each of the {cluster.machines} nodes would look for etcd on itself ({loopback})"
        raise ConfigError("cluster.name_store.address", settings.address, f"{problem}: name the host that has it")
    # Of several nodes most are on another host than etcd, wherever it is.
    elsewhere = hosts[0] if cluster.machines > 1 else next((host for host in hosts if bind_problem(host, 0)), "")
    if elsewhere and cluster.lease_s < ELECTION_LEASE_S:
        problem = f"must be at least {ELECTION_LEASE_S:g} with etcd on another host ({elsewhere})"
        reason = "while its members elect a leader no lease is renewed, and the leases of all workers lapse together"
        raise ConfigError("cluster.lease_s", cluster.lease_s, f"{problem}: {reason}")
    store = None
    try:
        store = make_name_store(config, paths, min(_ETCD_TIMEOUT_S, cluster.connect_timeout_s))
        store.get_subtree(trial_names(config).heartbeats)
    except NameStoreError as error:
        raise ConfigError("cluster.name_store.address", settings.address, str(error)) from None
    finally:
        if store is not None:
            store.close()


def check_disk(config: Config, need: int) -> None:
    """Refuse a trial whose weights and checkpoints do not fit on the disk. Raises ConfigError."""
    free = free_bytes(config)
    if need > free:
        sizes = f"weights and checkpoints need about {size_text(need)}, {size_text(free)} are free"
        remedy = "name another disk, or lower checkpoint.keep or weights.keep_versions"
        raise ConfigError("fileroot", config.fileroot, f"{sizes}: {remedy}")


def disk_warnings(config: Config, paths: TrialPaths) -> list[str]:
    """Return a line if a new trial of other machines does not fit on this machine's disk, which may not be theirs."""
    if paths.config.exists():
        return []
    try:
        check_disk(config, disk_bytes(config, dataflow_of(config)))
    except ConfigError as error:
        return [f"warning: if the nodes have the same disk as this machine: {error}"]
    return []


def free_bytes(config: Config) -> int:
    """Return the free space of the disk that has ``fileroot``, or will have it."""
    root = Path(config.fileroot)
    return shutil.disk_usage(next(p for p in (root, *root.parents) if p.exists())).free
