"""Keys of a trial in a name store that outlives it: claimed before its processes start, removed at its end.

    start    wait for the leases of the last run ──> remove its keys ──> write where the trial's folder is
    end      remove all keys, those of killed processes too

A launcher that was killed removes nothing: then `realsys gc` does. The key ``folder`` names the folder of the
trial, whose lock tells if it runs.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from realsys.cluster.store.base import NameStore
from realsys.cluster.store.connect import make_name_store, trial_names
from realsys.cluster.store.names import Names
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.errors import ConfigError, RealsysError

_POLL_S = 0.1
_END_S = 3.0  # the end of a run waits this long for a name store that does not answer


class TrialFolder(msgspec.Struct, frozen=True):
    """Value of the key ``folder``."""

    host: str
    path: str


def outlives_trials(config: Config) -> bool:
    """Return True if the name store is outside the trial folder: its keys stay when all processes have ended."""
    settings = config.cluster.name_store
    return not settings.start and (settings.backend == "etcd" or bool(settings.root))


def claim_keys(config: Config, paths: TrialPaths, say: Callable[[str], None]) -> None:
    """Remove the keys of an earlier run, and write where the trial's folder is.

    Raises ConfigError if a trial of this name runs in another folder: without its keys its workers would stop.
    """
    if not outlives_trials(config):
        return  # ``tidy`` removes it with the rest of the trial folder
    names = trial_names(config)
    store = make_name_store(config, paths)
    try:
        _outlive_leases(store, names, config, say)
        store.clear_subtree(names.root)
        store.add(names.folder, msgspec.json.encode(TrialFolder(socket.gethostname(), str(paths.root))).decode())
    finally:
        store.close()


def _outlive_leases(store: NameStore, names: Names, config: Config, say: Callable[[str], None]) -> None:
    """Return when no worker has a lease. Those of this folder have ended, but killed ones left theirs."""
    bound_s = 2 * config.cluster.lease_s
    deadline, said = time.monotonic() + bound_s, False
    while alive := store.get_subtree(names.heartbeats):
        key, value = next(iter(alive.items()))
        if time.monotonic() >= deadline:
            problem = f"runs in another folder, with the same name store ({key}: {value:.200})"
            raise ConfigError("trial", config.trial, f"{problem}: stop that first, or choose another name")
        if not said:
            say(f"waiting up to {bound_s:g} s for {len(alive)} leases of its last run to lapse")
        said = True
        threading.Event().wait(_POLL_S)


def remove_keys(config: Config, paths: TrialPaths, say: Callable[[str], None]) -> None:
    """Remove the keys of a trial whose processes have ended. If the name store does not answer, they stay."""
    if not outlives_trials(config):
        return
    try:
        store = make_name_store(config, paths, _END_S)
        try:
            store.clear_subtree(trial_names(config).root)
        finally:
            store.close()
    except RealsysError as error:
        say(f"the keys of this trial stay in the name store, until `realsys gc {paths.root}` removes them: {error}")


def folder_in(value: str) -> Path | None:
    """Return the trial folder in a value of the key ``folder``; None if it is on another host and not seen here.

    Raises ValueError for another value.
    """
    folder = msgspec.json.decode(value, type=TrialFolder)
    path = Path(folder.path)
    return path if folder.host == socket.gethostname() or path.is_dir() else None
