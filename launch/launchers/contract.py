"""Contract of a launcher: brings up one node agent on every machine of a trial, and takes them down.

    check, settings ──> start ──> agents join, the coordinator gives orders ──> stop
                          └── problem: why no more agents can come

A launcher decides nothing about processes. An agent is ``realsys node-agent`` under the name of its machine. The
coordinator binds agents to the nodes of the plan in the order in which they join; the others are spares.

Only trials with ``cluster.nodes`` have a launcher; the others run on this machine without agents.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from realsys.cluster.network import is_loopback
from realsys.config.doors import LAUNCHER
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.errors import ConfigError


class Launcher(ABC):
    """One launcher of one run. All methods but ``check`` and ``settings`` are called on the event loop."""

    def __init__(self, config: Config, paths: TrialPaths) -> None:
        """``paths``: of the trial, whose folder all machines share."""
        self.config = config
        self.paths = paths

    @property
    def machines(self) -> int:
        """Number of agents to start: one for each node of the plan, and the spares."""
        return self.config.cluster.machines

    @classmethod
    def check(cls, config: Config) -> None:
        """Check everything that can be known before anything is written. Raises ConfigError."""
        return

    @classmethod
    def check_start(cls, config: Config) -> None:
        """Check that this process can start agents; a dry run does not ask. Raises ConfigError."""
        return

    @classmethod
    def settings(cls, config: Config) -> Mapping[str, tuple[Any, str]]:
        """Return settings that follow from where this process runs, such as the nodes of an allocation.

        Field -> (value, reason). They are set only where the user has left the field open.
        """
        return {}

    def join_timeout_s(self) -> float:
        """Return how long an agent may take from ``start`` to its join, in seconds."""
        return self.config.cluster.connect_timeout_s

    @abstractmethod
    async def start(self, agent: Sequence[str], say: Callable[[str], None]) -> None:
        """Start ``machines`` agents, and return without waiting for their join.

        ``agent`` is the command, to which each machine adds ``--node NAME``, its own name. It must be run as it is, in
        the environment of the machine. ``say`` shows a line to the user. Raises RealsysError.
        """

    def own_machine(self) -> str:
        """Return the name of the agent on the machine of this process, which gets the first node; "" if it has none."""
        return ""

    def problem(self) -> str:
        """Return why no more agents can come (``srun exited with code 1: ...``); "" if all is well."""
        return ""

    async def stop(self) -> None:
        """End everything that ``start`` began, within a bound. Idempotent.

        The agents have been told to end before this is called, unless there was an error.
        """
        return


# ---- build
#
# Loads the launcher that ``cluster.launcher`` names. Code of the user may raise anything; that becomes one line.


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
