"""Allocation expression: the servers that generate, and the workers and the layout of each model role.

    serve.d4p1m1+d2p2m1                       4 servers; the actor on 4 workers
    serve.d2+actor.d2p2,critic.d1m2           `,` shares workers: the critic has the first 2 of the actor's 4
    serve.d2+actor.d2+critic.m2,ref.m2        `+` separates workers: actor on 0-1, critic and ref both on 2-3

d is data, p pipeline, m tensor parallelism. A layout without a role belongs to the actor. The order of the parts does
not matter. A role that the algorithm needs and the expression does not name shares the actor's workers and layout.

`generation.backend` chooses the engine. The name of a built-in backend (`sglang.d2+d2`) means the same as `serve`.
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
    """Sizes of the three axes. Their product is the number of workers."""

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
    """Layout of a role, and the index of its first worker."""

    layout: ParallelLayout
    first: int = 0


@dataclass(frozen=True, slots=True)
class Allocation:
    """Layouts of servers and model roles. ``inference.data`` is the number of GenerationServers.

    roles    the roles that the expression names, including the actor
    workers  number of ModelWorkers
    """

    inference: ParallelLayout
    roles: dict[str, Placement]
    workers: int

    @property
    def actor(self) -> ParallelLayout:
        return self.roles[ACTOR].layout

    def placement(self, role: str) -> Placement:
        """Return the placement of ``role``: the actor's if the expression does not name the role."""
        return self.roles.get(role, self.roles[ACTOR])

    def check_roles(self, needed: Iterable[str], text: str) -> None:
        """Raise ConfigError if the expression names a role that the dataflow does not call."""
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
                raise ConfigError("allocation", text, f"role '{role}' is given twice")
            roles[role] = Placement(_parse_layout(layout, text), workers)
            widest = max(widest, roles[role].layout.world_size)
        workers += widest
    if len(inference) != 1:
        problem = f"must have exactly one inference part ({SERVE}.), joined by '+': write e.g. {SERVE}.d1+d2"
        raise ConfigError("allocation", text, problem)
    if ACTOR not in roles:
        raise ConfigError("allocation", text, "the actor has no part; write e.g. serve.d1+d2p2m1")
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
            raise ConfigError("allocation", whole, f"axis '{axis}' is given twice in '{text}'")
        if size < 1:
            raise ConfigError("allocation", whole, f"axis '{axis}' must be at least 1 in '{text}'")
        sizes[axis] = size
        position = match.end()
    if position != len(text) or not sizes:
        raise ConfigError(
            "allocation", whole, f"cannot read '{text[position:] or text}'; write e.g. serve.d4p1m1+d2p2m1"
        )
    return ParallelLayout(sizes.get("d", 1), sizes.get("p", 1), sizes.get("m", 1))


def allocation_text(inference: ParallelLayout, actor: ParallelLayout) -> str:
    """Return an allocation expression, without the axes of size 1."""
    return f"serve.{_axes(inference)}+{_axes(actor)}"


def _axes(layout: ParallelLayout) -> str:
    axes = {"p": layout.pipeline, "m": layout.tensor}
    return f"d{layout.data}" + "".join(f"{name}{size}" for name, size in axes.items() if size > 1)
