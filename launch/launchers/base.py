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

from realsys.config.paths import TrialPaths
from realsys.config.schema import Config


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
