"""The doors: each part that a user may replace, its built-in names, and what a replacement must offer.

    config value ──built-in name──> "module:attribute" of realsys ──import──> object
                 └─"package.module:attribute" of the user ─────────import──> object, checked against the contract

This table is the only list of names. It holds strings, so reading it imports nothing: the launcher checks a built-in
name without torch, and imports only what the user has named. A check raises ConfigError, which ends the launcher with
one line and exit code 2.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from realsys.errors import ConfigError, RealsysError

#: Takes a loaded object and returns what is wrong with it; "" if it satisfies the contract.
Contract = Callable[[Any], str]


@dataclass(frozen=True, slots=True)
class Door:
    """One replaceable part. ``field``: where the configuration names it; ``kind``: what one of them is called."""

    field: str
    kind: str
    builtin: Mapping[str, str]
    contract: Contract

    def check(self, value: str, arguments: Mapping[str, Any] | None = None) -> None:
        """Check a name before anything starts. Built-in names are not imported; import strings are.

        ``arguments``: the keyword arguments that the configuration gives to the part, checked against its signature.
        Raises ConfigError.
        """
        if value in self.builtin:
            return
        loaded = self.load(value)
        if arguments is not None:
            self._check_arguments(value, loaded, arguments)

    def load(self, value: str) -> Any:
        """Import the object that ``value`` names, and check it against the contract. Raises ConfigError."""
        path = self.builtin.get(value, value)
        module, colon, attribute = path.partition(":")
        if not (module and colon and attribute):
            known = ", ".join(sorted(self.builtin))
            raise ConfigError(self.field, value, f"unknown {self.kind}: use one of {known}, or package.module:name")
        loaded = self._import(value, module, attribute)
        if problem := self.contract(loaded):
            raise ConfigError(self.field, value, f"is not a {self.kind}: {problem}")
        return loaded

    def _import(self, value: str, module: str, attribute: str) -> Any:
        try:
            found: Any = importlib.import_module(module)
        except RealsysError:
            raise
        except ModuleNotFoundError as error:
            if error.name and (module == error.name or module.startswith(f"{error.name}.")):
                problem = f"no module named {error.name!r}: set PYTHONPATH to the folder that holds it"
                raise ConfigError(self.field, value, problem) from None
            raise ConfigError(self.field, value, f"cannot be imported: {error}") from error
        except Exception as error:  # the module is the user's: it may raise anything
            problem = " ".join(f"{type(error).__name__}: {error}".split())[:500]
            raise ConfigError(self.field, value, f"cannot be imported: {problem}") from error
        for name in attribute.split("."):
            if not hasattr(found, name):
                raise ConfigError(self.field, value, f"module {module} has no attribute {attribute!r}")
            found = getattr(found, name)
        return found

    def _check_arguments(self, value: str, loaded: Any, arguments: Mapping[str, Any]) -> None:
        try:
            inspect.signature(loaded).bind(None, **arguments)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self.field}_args", dict(arguments), f"do not fit {value}: {error}") from None


def takes(*names: str) -> Contract:
    """Contract of a callable: it can be called with this many positional arguments."""

    def problem(loaded: Any) -> str:
        if not callable(loaded):
            return f"it must be a function ({', '.join(names)}), not {type(loaded).__name__}"
        try:
            signature = inspect.signature(loaded)
        except (TypeError, ValueError):  # a callable without a signature cannot be checked
            return ""
        try:
            signature.bind(*names)
        except TypeError:
            positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            fit = [p for p in signature.parameters.values() if p.kind in positional]
            if len(fit) != len(names) and not any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values()):
                return f"it must take ({', '.join(names)}), it takes {signature}"
        return ""

    return problem


def builds(*methods: str) -> Contract:
    """Contract of a class (or a function) that is called with the parts, and whose instances have ``methods``."""

    def problem(loaded: Any) -> str:
        if not callable(loaded):
            return f"it must be a class, not {type(loaded).__name__}"
        missing = [name for name in methods if not callable(getattr(loaded, name, None))]
        if inspect.isclass(loaded) and missing:
            return f"the class lacks {', '.join(missing)}"
        return ""

    return problem


def has(*functions: str) -> Contract:
    """Contract of a class or module with these functions."""

    def problem(loaded: Any) -> str:
        missing = [name for name in functions if not callable(getattr(loaded, name, None))]
        return f"it lacks {', '.join(missing)}" if missing else ""

    return problem


AGENT = Door(
    "rollout.agent",
    "agent",
    {
        "single_turn": "realsys.rollout.agents.single_turn:SingleTurn",
        "multi_turn": "realsys.rollout.agents.multi_turn:MultiTurn",
    },
    builds("run"),
)

ENVIRONMENT = Door(
    "rollout.environment",
    "environment",
    {"verifier": "realsys.rollout.environments.verifier:VerifierEnvironment"},
    builds("judge"),
)

VERIFIER = Door(
    "data.verifier",
    "verifier",
    {"exact": "realsys.reward.verifiers.exact:exact", "math": "realsys.reward.verifiers.math:math"},
    takes("item"),
)
