"""Rules of a generation backend that other processes than its server need.

    launcher ──────> check, check_machine, capacity, sizes, memory_bytes, own_torch, holding, sharing
    RolloutWorker ─> start_timeout_s

A backend (``realsys.generation.backend.Backend``) derives from BackendRules and adds ``build``. Launcher and
RolloutWorkers import the module of the backend, so it must import torch inside ``build``, not at the top.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from realsys.config.allocation import Allocation
from realsys.config.devices.device_plan import NodeDevices
from realsys.config.doors import BACKEND
from realsys.config.rules.machine import Machine
from realsys.config.schema import Config
from realsys.errors import ConfigError

#: completions that a server runs and queues if its backend sets no limit
DEFAULT_CAPACITY = 8192


@dataclass(frozen=True, slots=True)
class ServerSizes:
    """Parallel sizes of one server, whose product is its GPUs. ``data`` counts copies of the model."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline * self.data


class BackendRules:
    """Default rules: the engine runs inside the GenerationServer process, with the torch of this interpreter."""

    #: field that increases ``capacity``, for error messages; may be empty
    capacity_field: str = ""
    #: True if the engine brings another torch, which may use GPUs that this interpreter's torch cannot
    own_torch: bool = False
    #: copies of the weights in host memory that a server makes of a version before it swaps
    fused_copies: int = 1

    def __init__(self, config: Config) -> None:
        self.config = config

    def check(self, allocation: Allocation) -> None:
        """Refuse what the engine cannot serve, before anything starts. Raises ConfigError."""
        if allocation.inference.tensor > 1:
            problem = f"the {self.config.generation.backend} engine must have m1; add servers with d"
            raise ConfigError("allocation", self.config.allocation, problem)

    def check_machine(self, machine: Machine) -> None:
        """Refuse a machine on which the engine should not run, before anything starts. Raises ConfigError."""
        return

    def capacity(self) -> int:
        """Return how many completions one server runs and queues."""
        return DEFAULT_CAPACITY

    def start_timeout_s(self) -> float:
        """Return how many seconds one server may take to start and load the model."""
        return 600.0

    def sizes(self, allocation: Allocation) -> ServerSizes:
        """Return the parallel sizes of one server. Raises ConfigError."""
        return ServerSizes(tensor=allocation.inference.tensor)

    def memory_bytes(self, node: NodeDevices) -> int:
        """Return the host memory of one server in bytes, beyond that of a process that has imported torch."""
        return 0

    def holding(self, episodes: int, spare: Callable[[], int]) -> dict[str, Any]:
        """Return the fields to set, and their values, if a server has ``episodes`` in progress.

        ``spare`` gives the bytes that each server may take in addition to its predicted memory.
        """
        return {}

    def sharing(self, share: float) -> dict[str, Any]:
        """Return the fields to set, and their values, if a server may take ``share`` of the memory of its GPUs."""
        return {}


def backend_rules(config: Config) -> BackendRules:
    """Make the backend that ``generation.backend`` names. Raises ConfigError."""
    rules: BackendRules = BACKEND.make(config.generation.backend, config, config.generation.backend_args)
    return rules


def sizes_of(config: Config, allocation: Allocation) -> ServerSizes:
    """Return the parallel sizes of one server of ``allocation``. Raises ConfigError."""
    backend = backend_rules(config)
    with BACKEND.guard(config.generation.backend, "sizes raised"):
        return backend.sizes(allocation)
