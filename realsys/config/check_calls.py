"""Whether somebody has registered the interfaces and hooks that the calls of a dataflow name.

    a name of ours ──> fine          any other, with plugins.train ──> asked of a process that imports those modules

They need torch, and so does what registers them, which takes seconds: whoever calls only what realsys has never waits.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import msgspec

from realsys.config.dataflow import Dataflow
from realsys.config.registry import unknown
from realsys.errors import ConfigError

#: what ``realsys.train`` registers by itself
INTERFACES = ("actor_inf", "actor_train", "advantages", "critic_inf", "critic_train", "ref_inf", "reward_inf", "sft")
HOOKS = ("offload", "onload")
_FIELD = "plugins.train"
_IMPORT_TIMEOUT_S = 300.0  # torch and Megatron from a cold disk


class Registered(msgspec.Struct, frozen=True, tag=True):
    interfaces: Sequence[str] = INTERFACES
    hooks: Sequence[str] = HOOKS

    def first_unknown(self, flow: Dataflow) -> ConfigError | None:
        for call in flow.calls:
            hooks = ((hook, "hook", self.hooks) for hook in (*call.pre_hooks, *call.post_hooks))
            for name, kind, known in ((call.interface, "interface", self.interfaces), *hooks):
                if name not in known:
                    problem = f"names {name!r}: {unknown(kind, sorted(known), _FIELD)}"
                    return ConfigError("dataflow", call.name, problem)
        return None


class NotImported(msgspec.Struct, frozen=True, tag=True):
    module: str
    problem: str


def check_calls(flow: Dataflow, modules: Sequence[str]) -> None:
    """``modules``: those of plugins.train. Raises ConfigError naming the call, and what there is."""
    names = Registered()
    if modules and names.first_unknown(flow):
        names = registered_with(modules)
    if error := names.first_unknown(flow):
        raise error


def registered_with(modules: Sequence[str]) -> Registered:
    """What is registered once ``modules`` are imported. Raises ConfigError for one that cannot be."""
    command = [sys.executable, "-m", "realsys.train.registered", *modules]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_IMPORT_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(_FIELD, list(modules), f"not imported within {_IMPORT_TIMEOUT_S:g} s") from None
    # Not simply the last line: a module may print at its exit.
    line = next((line for line in reversed(done.stdout.splitlines()) if line.startswith('{"type":')), None)
    if line is None:  # a module that ends the process
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise ConfigError(_FIELD, list(modules), f"cannot be imported: exit code {done.returncode}: {last}")
    answer = msgspec.json.decode(line, type=Registered | NotImported)  # type: ignore[arg-type]
    if isinstance(answer, NotImported):
        raise ConfigError(_FIELD, answer.module, answer.problem)
    return answer
