"""List what ended trials left, and remove it with --yes.

Leftovers are keys in the name store, half-written files, old weight versions, copies in shared memory, sockets of
killed processes. A trial that runs is left alone.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from realsys.cluster.files import MEMBERS, PREFIX
from realsys.cluster.names.connect import is_known, make_name_store, store_address, trial_names
from realsys.cluster.names.contract import ROOT, Names, NameStore, Tree
from realsys.cluster.stream.sockets import socket_folder
from realsys.config.doors import TRANSPORT
from realsys.config.paths import TrialPaths, read_config
from realsys.config.schema import Config
from realsys.errors import ConfigError, RealsysError
from realsys.launch.commands.options import RUNS
from realsys.launch.slurm.client import LIVES, JobState, SlurmError, job_state
from realsys.launch.slurm.trial_job import TrialJob, describe_job
from realsys.launch.trial_folder import (
    TrialLock,
    folder_in,
    half_written,
    is_held,
    outlives_trials,
    own_stores,
    ran_here,
    remove_path,
)
from realsys.launch.words import command_line
from realsys.weights.disk.manifest import superfluous


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "folder", nargs="?", type=Path, metavar="DIR", default=RUNS, help="a trial, or all trials of a fileroot"
    )
    parser.add_argument("--yes", action="store_true", help="remove what is listed")


def run(args: Namespace) -> int:
    """List the leftovers of a trial, or of all trials in a folder; remove them with ``--yes``.

    Returns 1 if something could not be removed. Raises ConfigError if there is no such folder.
    """
    folder: Path = args.folder
    if not folder.is_dir() and (RUNS / folder).is_dir():
        folder = RUNS / folder
    if not folder.is_dir():
        raise ConfigError("DIR", str(folder), "is not a directory: name a trial, or a folder of trials (fileroot)")
    console = Console(highlight=False, soft_wrap=True, markup=False)
    finder = Finder(folder, console.print)
    try:
        trials = finder.find()
        problems = [problem for trial in trials for problem in _handle(trial, console, yes=args.yes)]
    finally:
        finder.close()
    left = [each for trial in trials for each in trial.leftovers]
    for problem in problems:
        console.print(f"! {problem}")
    size = sum(each.size for each in left)
    if not left:
        console.print("nothing is left over")
    elif not args.yes:
        console.print(f"{len(left)} leftovers, {_size(size)}; to remove them: {command_line('gc', folder, '--yes')}")
    elif not problems:
        console.print(f"removed {len(left)} leftovers, {_size(size)}")
    return 1 if problems else 0


def _handle(trial: EndedTrial, console: Console, *, yes: bool) -> list[str]:
    """Show a trial, and remove its leftovers if ``yes``. Returns the problems."""
    if trial.alone:
        console.print(f"{trial.name}: left alone: {trial.alone}")
    if not trial.leftovers:
        return []
    console.print(f"{trial.name}:")
    for leftover in trial.leftovers:
        console.print(f"  {leftover.what}{f' ({_size(leftover.size)})' if leftover.size else ''}")
    return remove(trial) if yes else []


def _size(size: int) -> str:
    """Return a number of bytes for people."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} KB"


# ---- finds what ended trials left: keys, half-written folders, weight versions, copies in shared memory
#
#     folder ──> trials ──> locked, a living job, or a worker with a lease? ──yes, in doubt──> left alone, with a reason
#                                  └──no──> leftovers, each with its removal
#
# `never-touch-a-running-trial`: in doubt a trial counts as running. It has ended if
#
#     no process has its lock         the launcher and all workers of this machine do
#     its job lives no longer         a file system may have no locks over several hosts
#     no worker has a lease           those of other machines do
#
# A lease that no process renews lapses, so the finder waits for it. An own etcd that does not answer has ended with
# its trial, or cannot be reached from this machine: then a trial over several nodes has ended only if its launcher
# wrote a summary, its job has ended, or its launcher ran on this machine, whose locks are all known.


_MARGIN_S = 4.0  # etcd grants at least two whole seconds, and ends a lease late when it has much to do
_POLL_S = 0.1
_ANSWER_S = 3.0
_NEW_S = 60.0


@dataclass(frozen=True, slots=True)
class Leftover:
    """One thing to remove. ``size``: bytes on a disk."""

    what: str
    size: int
    remove: Callable[[], None]


@dataclass(slots=True)
class EndedTrial:
    """A trial, or the keys of one. ``alone``: why it is left alone; empty if it has ended."""

    name: str
    paths: TrialPaths | None = None
    config: Config | None = None
    store: NameStore | None = None
    names: Names | None = None
    alone: str = ""
    leftovers: list[Leftover] = field(default_factory=list)

    def leases(self) -> Tree:
        """Return the heartbeats of workers whose lease has not lapsed. Raises NameStoreError."""
        return self.store.get_subtree(self.names.heartbeats) if self.store and self.names else {}

    def lock(self) -> contextlib.AbstractContextManager[object]:
        """Keep launchers away. Raises ConfigError if a launcher holds the lock."""
        if self.paths is None or not self.paths.root.is_dir():
            return contextlib.nullcontext()
        return contextlib.closing(TrialLock(self.paths.lock, self.paths.root.name, retry_timeout_s=0.0))


class Finder:
    """Finds the leftovers below ``folder``: a trial, or a folder of trials. Close it at the end.

    For a folder of trials it also finds keys of trials that are not in it, copies in shared memory, and dead sockets.
    """

    def __init__(self, folder: Path, say: Callable[[str], None], places: Sequence[Path] = ()) -> None:
        self._folder = folder
        self._say = say
        self._places = places or (Path("/dev/shm"), Path(tempfile.gettempdir()), Path("/tmp"))
        self._stores: dict[str, NameStore] = {}
        self._unreachable: dict[str, str] = {}  # store -> the reason
        self._no_slurm = ""  # why SLURM cannot be asked
        self._shared: dict[str, Names] = {}  # stores that outlive trials, with the keys of one trial

    def close(self) -> None:
        """Close the name stores."""
        for store in self._stores.values():
            store.close()

    def find(self) -> list[EndedTrial]:
        """Return all trials, with their leftovers. Waits until leases of dead workers have lapsed."""
        is_trial = _is_trial(self._folder)
        folders = [self._folder] if is_trial else sorted(filter(_is_trial, self._folder.glob("*/*")))
        trials = [self._open(TrialPaths(folder.resolve())) for folder in folders]
        if not is_trial:
            trials += self._without_folder(trials)
        self._outlive_leases(trials)
        for trial in trials:
            if not trial.alone:
                trial.leftovers = list(_leftovers(trial))
        if is_trial:
            return trials
        return [*trials, EndedTrial("this machine", leftovers=[*_copies(self._places), *_sockets(self._places)])]

    def _open(self, paths: TrialPaths) -> EndedTrial:
        """Return a trial with its configuration and name store."""
        trial = EndedTrial(str(paths.root), paths, alone=self._why_alone(paths))
        try:
            if paths.config.exists():
                trial.config = read_config(paths.config)
                trial.names = trial_names(trial.config)
                trial.store = self._store(trial.config, paths)
        except RealsysError as error:
            trial.alone = trial.alone or f"it may run: {error}"
        return trial

    def _why_alone(self, paths: TrialPaths) -> str:
        """Return why a trial runs, or may run, by its lock and its job; empty if both have ended."""
        if is_held(paths.lock, if_unknown=True):
            return "its lock is held: it runs, or its processes have not ended yet"
        try:
            record = TrialJob.read(paths)
            state = None if record is None else self._job_state(record.job)
        except SlurmError as error:
            return "" if _reported_its_end(paths) else f"its job may live: {error}"
        except ConfigError as error:
            return f"it may run: {error}"
        lives = record is not None and state is not None and state.state in LIVES
        return describe_job(record.job, state) if record is not None and lives else ""

    def _job_state(self, job: str) -> JobState | None:
        """Return the state of a job; after a first failure SLURM is not called any more. Raises SlurmError."""
        if self._no_slurm:
            raise SlurmError(self._no_slurm)
        try:
            return job_state(job)
        except SlurmError as error:
            self._no_slurm = str(error)
            raise

    def _store(self, config: Config, paths: TrialPaths) -> NameStore | None:
        """Return the name store of a trial; None if it has ended with the trial. Raises RealsysError."""
        settings = config.cluster.name_store
        place = Path(settings.root) if settings.root else paths.name_store
        if settings.backend == "file" and not place.is_dir():
            return None
        name = str(place) if settings.backend == "file" else f"etcd at {store_address(config, paths)}"
        if not is_known(config, paths):
            problem = "its etcd has not told its address, or has no certificate"
        else:
            # connect once for all trials of the store
            if name not in self._stores and name not in self._unreachable:
                store = make_name_store(config, paths, _ANSWER_S)
                try:
                    store.get_subtree(trial_names(config).heartbeats)
                    self._stores[name] = store
                except RealsysError as error:
                    store.close()
                    self._unreachable[name] = str(error)
            problem = self._unreachable.get(name, "")
        if problem and settings.start:
            cluster = config.cluster
            by_job = cluster.launcher == "slurm" and paths.job.exists()
            if not cluster.nodes or by_job or _reported_its_end(paths) or ran_here(paths.lock):
                return None
            problem += "; if it was killed, run this command on the machine of its launcher, or continue it"
        if problem:
            raise RealsysError(problem)
        if outlives_trials(config):
            self._shared[name] = trial_names(config)
        return self._stores[name]

    def _without_folder(self, trials: Sequence[EndedTrial]) -> list[EndedTrial]:
        """Return the trials of this user that have keys, and no folder among ``trials``."""
        found = []
        for place, names in self._shared.items():
            tree = self._stores[place].get_subtree(f"{ROOT}/{names.user}")
            ours = {trial.names.root for trial in trials if trial.names and trial.store is self._stores[place]}
            for root in dict.fromkeys("/".join(key.split("/")[:4]) for key in tree):
                if root not in ours and root.count("/") == 3:
                    found.append(self._of_keys(root, tree, self._stores[place]))
        return found

    def _of_keys(self, root: str, tree: Tree, store: NameStore) -> EndedTrial:
        """Return the trial to which the keys below ``root`` belong."""
        _, user, experiment, name = root.split("/")
        names = Names(user, experiment, name)
        trial = EndedTrial(f"{root}/", names=names, store=store)
        try:
            folder = folder_in(tree[names.folder]) if names.folder in tree else Path()
        except ValueError:
            folder = None
        if folder is None:
            trial.alone = f"its folder is not on this machine ({tree[names.folder]:.200}): run this command where it is"
        elif folder.is_dir() and folder != Path():
            trial.paths = TrialPaths(folder)
            reason = self._why_alone(trial.paths)
            trial.alone = f"{folder}: {reason}" if reason else ""
        return trial

    def _outlive_leases(self, trials: Sequence[EndedTrial]) -> None:
        """Wait, once for all trials, until each lease has been renewed or has lapsed."""
        suspects = [trial for trial in trials if not trial.alone and trial.leases()]
        if not suspects:
            return
        # Of trials without a configuration here the time is not known; the longest default is that of an etcd cluster.
        bound_s = _MARGIN_S + max(60.0 if trial.config is None else trial.config.cluster.lease_s for trial in suspects)
        self._say(f"waiting up to {bound_s:g} s for the leases of {', '.join(trial.name for trial in suspects)}")
        deadline = time.monotonic() + bound_s
        while suspects and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            suspects = [trial for trial in suspects if trial.leases()]
        for trial in suspects:
            trial.alone = f"it runs: {next(iter(trial.leases()))} has a lease"


def remove(trial: EndedTrial) -> list[str]:
    """Remove the leftovers of a trial that has ended. Returns the problems."""
    problems: list[str] = []
    try:
        with trial.lock():
            if leases := trial.leases():
                return [f"{trial.name} has started meanwhile: {next(iter(leases))}"]
            problems += filter(None, map(_remove, trial.leftovers))
    except RealsysError as error:
        problems.append(str(error))
    return problems


def _remove(leftover: Leftover) -> str:
    """Remove one leftover. Returns the problem, or ""."""
    try:
        leftover.remove()
    except OSError as error:
        return f"{leftover.what} cannot be removed: {error.filename}: {error.strerror}"
    return ""


def _is_trial(folder: Path) -> bool:
    return folder.is_dir() and any((folder / name).exists() for name in ("config.json", "lock"))


def _reported_its_end(paths: TrialPaths) -> bool:
    """Return True if the newest run of a trial has written its summary. A start writes config.json and removes it."""
    if not paths.summary.is_file():
        return False
    begun = [path.stat().st_mtime for path in (paths.config, paths.job) if path.exists()]
    return paths.summary.stat().st_mtime >= max(begun, default=0.0)


def _leftovers(trial: EndedTrial) -> Iterable[Leftover]:
    if trial.store is not None and trial.names is not None:
        names, store = trial.names, trial.store
        if keys := store.get_subtree(names.root):
            yield Leftover(f"keys below {names.root}/: {len(keys)}", 0, lambda: store.clear_subtree(names.root))
    paths = trial.paths
    if paths is None or not paths.root.is_dir():
        return
    if trial.config is None and not paths.config.exists():
        if not any(path.exists() for path in (paths.checkpoints, paths.steps, paths.weights().parent)):
            yield _path(paths.root, "a trial that was not made to its end: ")
        return
    for path in (*own_stores(paths), *half_written(paths)):
        yield _path(path)
    if trial.config is not None and trial.config.weights.transport in TRANSPORT.builtin:
        for role in sorted(paths.weights().parent.glob("*")):
            for version in superfluous(role, keep=1)[0]:
                yield _path(version, "an old version: ")


def _copies(places: Sequence[Path]) -> list[Leftover]:
    """Return the folders of this user in shared memory whose servers have all ended."""
    folders = [folder for place in dict.fromkeys(places) for folder in sorted(place.glob(f"{PREFIX}*"))]
    own = [folder for folder in folders if folder.is_dir() and folder.stat().st_uid == os.getuid()]
    return [
        _path(folder)
        for folder in own
        if (folder / MEMBERS).exists() and not is_held(folder / MEMBERS, if_unknown=True)
    ]


def _sockets(places: Sequence[Path]) -> list[Leftover]:
    """Return the sockets of this user's streams at which no process listens: what killed processes leave."""
    files = [path for place in dict.fromkeys(places) for path in sorted(socket_folder(place).glob("*-*"))]
    return [_path(path, "a socket of a killed process: ") for path in files if _is_dead(path)]


def _is_dead(path: Path) -> bool:
    """Return True if no process listens at the socket ``path``. A new one may not listen yet."""
    try:
        if not path.is_socket() or time.time() - path.stat().st_mtime < _NEW_S:
            return False
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as client:
            client.settimeout(_ANSWER_S)
            client.connect(str(path))
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def _path(path: Path, kind: str = "") -> Leftover:
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return Leftover(f"{kind}{path}", sum(each.lstat().st_size for each in files), lambda: remove_path(path))
