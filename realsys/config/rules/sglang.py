"""Rules for the settings of the SGLang backend: its interpreter and its options."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import realsys
from realsys.config.rules.backend_rules import ServerSizes
from realsys.config.schema import SamplingConfig, SglangConfig
from realsys.errors import ConfigError

_ROOT = Path(realsys.__file__).resolve().parents[1]
#: `make sglang-cpu` makes it in the root of a checkout
DEFAULT_VENV = _ROOT / ".venv-sglang"
#: version of SGLang that `make sglang-cpu` installs and the tests use
TESTED_VERSION = "0.5.21"
#: options of address, model and device, which realsys sets
_OURS = frozenset(
    {"host", "port", "model-path", "model", "nnodes", "node-rank", "dist-init-addr", "base-gpu-id", "gpu-id-step"}
)
STATIC_SHARE = "mem-fraction-static"
#: axis -> SGLang's names of its size
_SIZES = {
    "tensor": ("tp-size", "tensor-parallel-size"),
    "pipeline": ("pp-size", "pipeline-parallel-size"),
    "data": ("dp-size", "data-parallel-size"),
}
#: settings that SGLang applies to the logits before it computes the log-probs that it returns
_IN_LOGPROBS = ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_new_tokens")
_SCALARS = (str, int, float, bool, type(None))


def interpreter(settings: SglangConfig, *, gpus: bool, default_venv: Path = DEFAULT_VENV) -> str:
    """Return the interpreter that runs SGLang: the configured one, else that of ``default_venv``, else this one.

    ``default_venv`` has a torch for CPUs, so servers with ``gpus`` do not use it.
    """
    if settings.python:
        return settings.python
    python = default_venv / "bin" / "python"
    return str(python) if python.exists() and not gpus else sys.executable


def options(settings: SglangConfig) -> dict[str, Any]:
    """Return SGLang's options with the names of its command line, without the leading dashes."""
    return {_normal(name): value for name, value in settings.args.items()}


def check_interpreter(settings: SglangConfig, *, gpus: bool, default_venv: Path = DEFAULT_VENV) -> None:
    """Raise ConfigError for an interpreter that cannot be run or has no SGLang. ``gpus``: True if servers have GPUs."""
    python = interpreter(settings, gpus=gpus, default_venv=default_venv)
    if settings.python and not os.access(python, os.X_OK):
        raise ConfigError("generation.sglang.python", python, "is not an executable file")
    if python == sys.executable and importlib.util.find_spec("sglang") is None:
        problem = "this interpreter has no sglang: set one that has it"
        if gpus:
            problem += f", of a virtual environment of its own with `pip install sglang=={TESTED_VERSION}`"
        elif (_ROOT / "Makefile").exists():  # not in an installation
            problem += ", or make one for CPU with `make sglang-cpu`"
        raise ConfigError("generation.sglang.python", settings.python, problem)


def check_sglang(settings: SglangConfig) -> None:
    """Raise ConfigError for options that the user must not set."""
    seen: dict[str, str] = {}
    for name, value in settings.args.items():
        field, normal = f"generation.sglang.args.{name}", _normal(name)
        if normal in _OURS:
            raise ConfigError(field, value, "is set by realsys: remove it")
        if normal in seen:
            raise ConfigError(field, value, f"is the same option as {seen[normal]}: remove one of them")
        if not isinstance(value, _SCALARS) and not _is_list(value):
            raise ConfigError(field, value, "must be a number, text, true, false, or a list of numbers and texts")
        seen[normal] = name


def server_sizes(settings: SglangConfig, tensor: int) -> ServerSizes:
    """Return the parallel sizes of one SGLang server. ``tensor``: that of the allocation, which an option replaces.

    Raises ConfigError for a size that is not a positive whole number.
    """
    given, sizes = options(settings), {"tensor": tensor}
    for axis, names in _SIZES.items():
        for name in (name for name in names if name in given):
            size = given[name]
            if not isinstance(size, int) or size < 1:
                raise ConfigError(f"generation.sglang.args.{name}", size, "must be a whole number of at least 1")
            sizes[axis] = size
    if given.get("enable-dp-attention"):  # its data ranks share the GPUs of the tensor ranks
        sizes["data"] = 1
    return ServerSizes(**sizes)


def check_sglang_sampling(sampling: SamplingConfig) -> None:
    """Raise ConfigError if SGLang's log-probs would not be those of softmax(logits / temperature)."""
    for name in _IN_LOGPROBS:
        value, off = getattr(sampling, name), SamplingConfig.model_fields[name].default
        if value != off:
            problem = f"SGLang would include it in the log-probs: set it to {off}, or use generation=embedded"
            raise ConfigError(f"generation.sampling.{name}", value, problem)


def flags(options: Mapping[str, Any]) -> list[str]:
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


def _normal(name: str) -> str:
    return name.lstrip("-").replace("_", "-")


def _is_list(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, _SCALARS) for item in value)
