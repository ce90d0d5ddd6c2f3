"""The allocation expression: what generates, and which model role trains on which workers with which layout.

    serve.d4p1m1+d2p2m1                       4 servers; the actor on 4 workers
    serve.d2+actor.d2p2,critic.d1m2           `,` shares workers: the critic sits on the first 2 of the actor's 4
    serve.d2+actor.d2+critic.m2,ref.m2        `+` sets apart: actor on workers 0-1, critic and ref both on 2-3

d data, p pipeline, m tensor parallel; a layout without a role is the actor's; the parts may come in any order. A role
that the algorithm needs and that is not named shares the actor's workers and layout.

`generation.backend` chooses the engine. The name of a built-in backend (`sglang.d2+d2`) is read as `serve`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from realsys.config.doors import BACKEND
from realsys.errors import ConfigError

ACTOR = "actor"
_AXES = re.compile(r"([dpm])(\d+)")
SERVE = "serve"
_INFERENCE = frozenset({SERVE, *BACKEND.builtin})


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Sizes of the three axes; their product is the number of workers."""

    data: int = 1
    pipeline: int = 1
    tensor: int = 1

    @property
    def world_size(self) -> int:
        return self.data * self.pipeline * self.tensor

    def __str__(self) -> str:
        return f"d{self.data}p{self.pipeline}m{self.tensor}"


@dataclass(frozen=True, slots=True)
class Placement:
    """A role's layout and the index of the first worker that it sits on."""

    layout: ParallelLayout
    first: int = 0


@dataclass(frozen=True, slots=True)
class Allocation:
    """Layouts of what generates and what trains. ``inference.data`` is the number of GenerationServers.

    ``roles``: the roles that were named, the actor always among them. ``workers``: ModelWorkers in all.
    """

    inference: ParallelLayout
    roles: dict[str, Placement]
    workers: int

    @property
    def actor(self) -> ParallelLayout:
        return self.roles[ACTOR].layout

    def placement(self, role: str) -> Placement:
        """Where ``role`` sits; with the actor when it was not named."""
        return self.roles.get(role, self.roles[ACTOR])

    def check_roles(self, needed: Iterable[str], text: str) -> None:
        """Raises ConfigError when a named role is none that the dataflow calls."""
        known = {ACTOR, *needed}
        for role in self.roles:
            if role not in known:
                problem = f"places role {role!r}, which the dataflow does not call; it calls {', '.join(sorted(known))}"
                raise ConfigError("allocation", text, problem)


def parse_allocation(text: str) -> Allocation:
    """Parse the whole expression. Raises ConfigError naming the part that cannot be read."""
    inference: list[str] = []
    roles: dict[str, Placement] = {}
    workers = 0
    for block in text.split("+"):
        widest = 0
        for part in block.split(","):
            name, dot, layout = part.rpartition(".")
            if name in _INFERENCE:
                inference.append(layout)
                continue
            role = name if dot else ACTOR
            if not re.fullmatch(r"[A-Za-z]\w*", role):
                raise ConfigError("allocation", text, f"cannot read the role in '{part}'; write e.g. critic.d2")
            if role in roles:
                raise ConfigError("allocation", text, f"role '{role}' stands twice")
            roles[role] = Placement(_parse_layout(layout, text), workers)
            widest = max(widest, roles[role].layout.world_size)
        workers += widest
    if len(inference) != 1:
        problem = f"must have exactly one inference part ({SERVE}.), joined by '+': write e.g. {SERVE}.d1+d2"
        raise ConfigError("allocation", text, problem)
    if ACTOR not in roles:
        raise ConfigError("allocation", text, "no part is the actor's; write e.g. serve.d1+d2p2m1")
    parsed = _parse_layout(inference[0], text)
    if parsed.pipeline != 1:
        raise ConfigError("allocation", text, "the inference part must have p1: servers do not pipeline")
    return Allocation(parsed, roles, workers)


def _parse_layout(text: str, whole: str) -> ParallelLayout:
    sizes: dict[str, int] = {}
    position = 0
    for match in _AXES.finditer(text):
        if match.start() != position:
            break
        axis, size = match[1], int(match[2])
        if axis in sizes:
            raise ConfigError("allocation", whole, f"axis '{axis}' stands twice in '{text}'")
        if size < 1:
            raise ConfigError("allocation", whole, f"axis '{axis}' must be at least 1 in '{text}'")
        sizes[axis] = size
        position = match.end()
    if position != len(text) or not sizes:
        raise ConfigError(
            "allocation", whole, f"cannot read '{text[position:] or text}'; write e.g. serve.d4p1m1+d2p2m1"
        )
    return ParallelLayout(sizes.get("d", 1), sizes.get("p", 1), sizes.get("m", 1))
