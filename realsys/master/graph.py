"""The dataflow graph of model function calls, declared as data and checked before anything starts.

A call is ready when every key it reads is there. PPO without critic and reference:

    (stream) tokens, behav_logprobs, versions
        ├──> actor_inf   -> prox_logprobs
        └──> actor_train <- prox_logprobs
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from realsys.errors import ConfigError

#: what a trajectory brings with it when it arrives at a DP head
SOURCE_KEYS = frozenset({"tokens", "behav_logprobs", "versions"})


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """One model function call: which interface of which role reads and makes which keys."""

    name: str
    role: str
    interface: str
    inputs: frozenset[str]
    outputs: frozenset[str] = frozenset()


class Dataflow:
    """A checked set of calls. Raises ConfigError on a double name, a key nobody makes, a key made twice, or a cycle."""

    def __init__(self, calls: Iterable[FunctionCall], source_keys: Iterable[str] = SOURCE_KEYS) -> None:
        self.calls = tuple(calls)
        self.source_keys = frozenset(source_keys)
        names = [call.name for call in self.calls]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError("dataflow", name, "two calls have this name")
        makers: dict[str, str] = dict.fromkeys(self.source_keys, "the stream")
        for call in self.calls:
            for key in sorted(call.outputs):
                if key in makers:
                    raise ConfigError("dataflow", call.name, f"makes key {key!r}, which {makers[key]} makes already")
                makers[key] = call.name
        for call in self.calls:
            for key in sorted(call.inputs - makers.keys()):
                raise ConfigError("dataflow", call.name, f"reads key {key!r}, which nothing makes")
        self._check_cycles()

    def _check_cycles(self) -> None:
        available, left = set(self.source_keys), list(self.calls)
        while left:
            ready = [call for call in left if call.inputs <= available]
            if not ready:
                raise ConfigError("dataflow", ", ".join(c.name for c in left), "these calls wait for one another")
            for call in ready:
                available |= call.outputs
            left = [call for call in left if call not in ready]

    def ready(self, available: Iterable[str], started: Iterable[str]) -> list[FunctionCall]:
        """Calls not yet started whose keys are all there, in declaration order."""
        have, gone = set(available), set(started)
        return [call for call in self.calls if call.name not in gone and call.inputs <= have]

    def last_consumers(self) -> dict[str, set[str]]:
        """Key -> names of the calls that read it; when all have run, the key may be dropped."""
        readers: dict[str, set[str]] = {}
        for call in self.calls:
            for key in call.inputs:
                readers.setdefault(key, set()).add(call.name)
        return readers


def ppo_dataflow(*, decoupled: bool) -> Dataflow:
    """Actor-only PPO. Without the decoupled loss the proximal policy is the behaviour policy: no inference call."""
    source = frozenset({"tokens", "behav_logprobs"})
    if not decoupled:
        return Dataflow([FunctionCall("actor_train", "actor", "actor_train", source)])
    return Dataflow(
        [
            FunctionCall("actor_inf", "actor", "actor_inf", source, frozenset({"prox_logprobs"})),
            FunctionCall("actor_train", "actor", "actor_train", source | {"prox_logprobs"}),
        ]
    )


def sft_dataflow() -> Dataflow:
    """Supervised warm-up of the actor."""
    return Dataflow([FunctionCall("sft", "actor", "sft", frozenset({"tokens"}))], source_keys={"tokens"})
