"""Loads the launcher that ``cluster.launcher`` names. Code of the user may raise anything; that becomes one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from realsys.cluster.network import is_loopback
from realsys.config.doors import LAUNCHER
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.errors import ConfigError
from realsys.launch.launchers.base import Launcher


def launcher_settings(config: Config) -> Mapping[str, tuple[Any, str]]:
    """Return the settings that the launcher knows: field -> (value, reason). Raises ConfigError."""
    name = config.cluster.launcher
    with LAUNCHER.guard(name, "settings raised"):
        values: Mapping[str, tuple[Any, str]] = LAUNCHER.load(name).settings(config)
        return values


def check_launcher(config: Config) -> None:
    """Check the launcher of a trial, and the fields that it needs. Raises ConfigError."""
    cluster = config.cluster
    if cluster.spare_nodes and not cluster.nodes:
        problem = "there are no other machines: set cluster.nodes too"
        raise ConfigError("cluster.spare_nodes", cluster.spare_nodes, problem)
    store = cluster.name_store
    hosts = [address.rpartition(":")[0] for address in store.address.split(",")]
    if cluster.machines > 1 and store.backend == "etcd" and not store.start and any(map(is_loopback, hosts)):
        problem = "other nodes cannot reach it: name etcd's address, or set cluster.name_store.start=true"
        raise ConfigError("cluster.name_store.address", store.address, problem)
    with LAUNCHER.guard(cluster.launcher, "check raised"):
        LAUNCHER.load(cluster.launcher).check(config)


def check_start(config: Config) -> None:
    """Check that the launcher of a trial can start agents from here. Raises ConfigError."""
    if config.cluster.nodes:
        with LAUNCHER.guard(config.cluster.launcher, "check_start raised"):
            LAUNCHER.load(config.cluster.launcher).check_start(config)


def make_launcher(config: Config, paths: TrialPaths) -> Launcher:
    """Return the launcher of a trial. Raises ConfigError."""
    made: Launcher = LAUNCHER.make(config.cluster.launcher, config, {"paths": paths})
    return made
