"""The settings of the SGLang backend: which interpreter runs it, which of its options may be set."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import realsys
from realsys.config.schema import SamplingConfig, SglangConfig
from realsys.errors import ConfigError

#: made by `make sglang-cpu`, beside the package in a checkout
DEFAULT_VENV = Path(realsys.__file__).resolve().parents[1] / ".venv-sglang"
#: where it listens and what it serves is decided here
_OURS = frozenset({"host", "port", "model-path", "model"})
#: what SGLang applies to the logits before it takes the log-probs that it returns
_IN_LOGPROBS = ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_new_tokens")
_SCALARS = (str, int, float, bool, type(None))


def interpreter(settings: SglangConfig, default_venv: Path = DEFAULT_VENV) -> str:
    """The interpreter to run SGLang with: the configured one, else that of ``default_venv``, else this one."""
    if settings.python:
        return settings.python
    python = default_venv / "bin" / "python"
    return str(python) if python.exists() else sys.executable


def options(settings: SglangConfig) -> dict[str, Any]:
    """SGLang's options as on its command line, without the leading dashes."""
    return {_normal(name): value for name, value in settings.args.items()}


def check_sglang(settings: SglangConfig, default_venv: Path = DEFAULT_VENV) -> None:
    """Raises ConfigError for an interpreter that cannot be run, and for options that SGLang must not be given."""
    python = interpreter(settings, default_venv)
    if settings.python and not os.access(python, os.X_OK):
        raise ConfigError("generation.sglang.python", python, "is no interpreter that can be run here")
    if python == sys.executable and importlib.util.find_spec("sglang") is None:
        problem = "this interpreter has no sglang: name one that has, or make one for the CPU with `make sglang-cpu`"
        raise ConfigError("generation.sglang.python", settings.python, problem)
    seen: dict[str, str] = {}
    for name, value in settings.args.items():
        field, normal = f"generation.sglang.args.{name}", _normal(name)
        if normal in _OURS:
            raise ConfigError(field, value, "is set by realsys; take it out")
        if normal in seen:
            raise ConfigError(field, value, f"is the same option as {seen[normal]}; keep one")
        if not isinstance(value, _SCALARS) and not _is_list(value):
            raise ConfigError(field, value, "must be a number, a text, true, false, or a list of numbers and texts")
        seen[normal] = name


def check_sglang_sampling(sampling: SamplingConfig) -> None:
    """Raises ConfigError where SGLang's log-probs are not those of softmax(logits / temperature), which is trained."""
    for name in _IN_LOGPROBS:
        value, off = getattr(sampling, name), SamplingConfig.model_fields[name].default
        if value != off:
            problem = (
                f"SGLang would put it into the log-probs to train on; leave it at {off} or use generation=embedded"
            )
            raise ConfigError(f"generation.sampling.{name}", value, problem)


def flags(options: Mapping[str, Any]) -> list[str]:
    """As arguments. True: the flag alone; False and None: left out; a list: its items behind the flag."""
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
