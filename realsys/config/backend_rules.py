"""Rules of a generation backend that other processes than its server need.

    launcher ──────> check, check_machine, capacity, running, sizes, memory_bytes, own_torch, sleeps, holding, sharing
    RolloutWorker ─> start_timeout_s

A backend (``realsys.generation.backend.Backend``) derives from BackendRules and adds ``build``. Launcher and
RolloutWorkers import the module of the backend, so it must import torch inside ``build``, not at the top.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from realsys.config.allocation import Allocation
from realsys.config.doors import BACKEND
from realsys.config.machine import Machine, NodeDevices
from realsys.config.schema import Config, SamplingConfig, SglangConfig
from realsys.errors import ConfigError

#: completions that a server runs and queues if its backend sets no limit
DEFAULT_CAPACITY = 8192
#: share of a GPU that a process may use: blocks of torch's allocator never fit exactly
GPU_SHARE = 0.97


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

    def running(self, cached: Callable[[], int]) -> int:
        """Return how many completions one server samples at the same time.

        ``cached`` gives how many of them its cache holds, if the engine takes all of the GPU's memory for that.
        """
        return min(self.capacity(), cached())

    def grammars(self) -> bool:
        """Return True if the engine can keep a completion to a grammar (``SamplingParams.structural_tag``)."""
        return False

    def adapters(self) -> str:
        """Return why its servers cannot sample a request from the weights that it names; "" if they can."""
        return "its servers sample only from the weights that they have loaded: use generation=embedded, vllm or sglang"

    def sleeps(self, *, on_gpu: bool) -> bool:
        """Return True if a server can release the memory of weights and cache, so that ranks may use its device."""
        return False

    def start_timeout_s(self) -> float:
        """Return how many seconds one server may take to start and load the model."""
        return 600.0

    def sizes(self, allocation: Allocation) -> ServerSizes:
        """Return the parallel sizes of one server. Raises ConfigError."""
        return ServerSizes(tensor=allocation.inference.tensor)

    def memory_bytes(self, node: NodeDevices) -> int:
        """Return the host memory of one server in bytes, beyond that of a process that has imported torch."""
        return 0

    def gpu_share(self) -> float:
        """Return the share of its GPUs' memory that a server may use for weights and cache."""
        return GPU_SHARE

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


# ---- engines in a child process: their interpreter and options


_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class EnginePackage:
    """A package that an interpreter of its own may have. ``name`` is that of its module.

    version  that ``make <target>`` installs and the tests use
    field    setting of its interpreter
    venv     what the target makes in the root of a checkout, with a torch for CPUs
    """

    name: str
    version: str
    field: str
    target: str
    venv: Path

    def interpreter(self, python: str, *, gpus: bool) -> str:
        """Return ``python``; if it is empty that of the venv, for servers without ``gpus``, else this one."""
        if python:
            return python
        own = self.venv / "bin" / "python"
        return str(own) if own.exists() and not gpus else sys.executable

    def check(self, python: str, *, gpus: bool) -> None:
        """Raise ConfigError for an interpreter that cannot be run or lacks the package."""
        chosen = self.interpreter(python, gpus=gpus)
        if python and not os.access(chosen, os.X_OK):
            raise ConfigError(self.field, chosen, "is not an executable file")
        if chosen == sys.executable and importlib.util.find_spec(self.name) is None:
            problem = f"this interpreter has no {self.name}: set one that has it"
            if gpus:
                problem += f", of a virtual environment of its own with `pip install {self.name}=={self.version}`"
            elif (_ROOT / "Makefile").exists():  # not in an installation
                problem += f", or make one for CPU with `make {self.target}`"
            raise ConfigError(self.field, python, problem)


def named_options(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with the names of the command line, without the leading dashes."""
    return {_normal(name): value for name, value in args.items()}


def check_options(field: str, args: Mapping[str, Any], ours: frozenset[str]) -> None:
    """Raise ConfigError for options that the user must not set: ``ours``, and doubles."""
    seen: dict[str, str] = {}
    for name, value in args.items():
        option, normal = f"{field}.{name}", _normal(name)
        if normal in ours:
            raise ConfigError(option, value, "is set by realsys: remove it")
        if normal in seen:
            raise ConfigError(option, value, f"is the same option as {seen[normal]}: remove one of them")
        if not isinstance(value, _SCALARS) and not (
            isinstance(value, list) and all(isinstance(item, _SCALARS) for item in value)
        ):
            raise ConfigError(option, value, "must be a number, text, true, false, or a list of numbers and texts")
        seen[normal] = name


def _normal(name: str) -> str:
    return name.lstrip("-").replace("_", "-")


def command_line_flags(options: Mapping[str, Any]) -> list[str]:
    """Return ``options`` as command-line arguments.

    True gives the flag without a value, False and None give nothing, a list gives the flag and its items.
    """
    arguments: list[str] = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        arguments.append(f"--{name}")
        if value is not True:
            arguments += [str(item) for item in (value if isinstance(value, list) else [value])]
    return arguments


_SCALARS = (str, int, float, bool, type(None))


# ---- SGLang: its options, and what its log-probs would include


SGLANG = EnginePackage("sglang", "0.5.21", "generation.sglang.python", "sglang-cpu", _ROOT / ".venv-sglang")
#: options of address, model and device, which realsys sets; logits are in the trainer's dtype (``model.head_dtype``)
SGLANG_OURS = frozenset(
    {
        *("host", "port", "model-path", "model", "nnodes", "node-rank", "dist-init-addr"),
        *("base-gpu-id", "gpu-id-step", "enable-fp32-lm-head"),
    }
)
STATIC_SHARE = "mem-fraction-static"
#: axis -> SGLang's names of its size
_SIZES = {
    "tensor": ("tp-size", "tensor-parallel-size"),
    "pipeline": ("pp-size", "pipeline-parallel-size"),
    "data": ("dp-size", "data-parallel-size"),
}
#: settings that SGLang applies to the logits before it computes the log-probs that it returns
_IN_LOGPROBS = ("penalties.repetition", "penalties.presence", "penalties.frequency", "min_new_tokens")


def check_sglang_sampling(sampling: SamplingConfig) -> None:
    """Raise ConfigError if SGLang's log-probs would not be those of softmax(logits / temperature)."""
    for name in _IN_LOGPROBS:
        value, off = attrgetter(name)(sampling), attrgetter(name)(SamplingConfig())
        if value != off:
            problem = f"SGLang would include it in the log-probs: set it to {off}, or use generation=embedded"
            raise ConfigError(f"generation.sampling.{name}", value, problem)


def sglang_server_sizes(settings: SglangConfig, tensor: int) -> ServerSizes:
    """Return the parallel sizes of one SGLang server. ``tensor``: that of the allocation, which an option replaces.

    Raises ConfigError for a size that is not a positive whole number.
    """
    given, sizes = sglang_options(settings), {"tensor": tensor}
    for axis, names in _SIZES.items():
        for name in (name for name in names if name in given):
            size = given[name]
            if not isinstance(size, int) or size < 1:
                raise ConfigError(f"generation.sglang.args.{name}", size, "must be a whole number of at least 1")
            sizes[axis] = size
    if given.get("enable-dp-attention"):  # its data ranks share the GPUs of the tensor ranks
        sizes["data"] = 1
    return ServerSizes(**sizes)


def sglang_options(settings: SglangConfig) -> dict[str, Any]:
    """Return SGLang's options with the names of its command line, without the leading dashes."""
    return named_options(settings.args)
