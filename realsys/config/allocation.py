"""Allocation expression: the servers that generate, and the workers and the layout of each model role.

    serve.d4p1m1+d2p2m1                       4 servers; the actor on 4 workers
    serve.d2+actor.d2p2,critic.d1m2           `,` shares workers: the critic has the first 2 of the actor's 4
    serve.d2+actor.d2+critic.m2,ref.m2        `+` separates workers: actor on 0-1, critic and ref both on 2-3
    serve.d2|d2p2                             2 servers and 4 workers use the same devices in turn
    serve.d2+serve.d1|d2                      2 servers of their own, and one on a device of the actor
    d2p2                                      no servers: a supervised run does not generate

`|` and `,` mean the same: what they join shares devices. A server that shares is lent its devices while no worker
computes (``realsys.manager.routing.lending``).

d is data, p pipeline, m tensor parallelism. A layout without a role belongs to the actor. The order of the parts does
not matter. A role that the algorithm needs and the expression does not name shares the actor's workers and layout.

`generation.backend` chooses the engine. The name of a built-in backend (`sglang.d2+d2`) means the same as `serve`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from realsys.config.doors import BACKEND
from realsys.errors import ConfigError

if TYPE_CHECKING:
    from realsys.config.schema import Config

ACTOR = "actor"
AUTO = "auto"  # until the launcher has chosen
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
    """Layouts of servers and model roles. ``inference.data`` is the number of GenerationServers; 0: none.

    roles      the roles that the expression names, including the actor
    workers    number of ModelWorkers
    lent       number of servers that use devices of workers in turn with them; they have the last indexes
    lent_from  index of the worker on whose device the first of them is; the others follow
    """

    inference: ParallelLayout
    roles: dict[str, Placement]
    workers: int
    lent: int = 0
    lent_from: int = 0

    @property
    def actor(self) -> ParallelLayout:
        return self.roles[ACTOR].layout

    def is_lent(self, server: int) -> bool:
        """Return True if the server of this index uses devices of workers in turn with them."""
        return server >= self.inference.data - self.lent

    @property
    def lending(self) -> range:
        """Indexes of the workers whose devices servers use in turn with them."""
        return range(self.lent_from, self.lent_from + self.lent * self.inference.tensor)

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
    """Parse the whole expression. Raises ConfigError naming the part that cannot be read.

    ``realsys.config.rules.check`` refuses one without servers if the run needs them.
    """
    own: list[ParallelLayout] = []
    lent: list[tuple[ParallelLayout, int]] = []
    roles: dict[str, Placement] = {}
    workers = 0
    for block in text.split("+"):
        widest, serving = 0, []
        for part in re.split("[,|]", block):
            name, dot, layout = part.rpartition(".")
            if name in _INFERENCE:
                serving.append(_parse_layout(layout, text))
                continue
            role = name if dot else ACTOR
            if not re.fullmatch(r"[A-Za-z]\w*", role):
                raise ConfigError("allocation", text, f"cannot read the role in '{part}'; write e.g. critic.d2")
            if role in roles:
                raise ConfigError("allocation", text, f"role '{role}' is given twice")
            roles[role] = Placement(_parse_layout(layout, text), workers)
            widest = max(widest, roles[role].layout.world_size)
        if widest:
            lent += [(layout, workers) for layout in serving]
        else:
            own += serving
        if serving and 0 < widest < serving[0].world_size:
            problem = f"has servers on {serving[0].world_size} devices of workers, and '{block}' has {widest} of them"
            raise ConfigError("allocation", text, problem)
        workers += widest
    if len(own) > 1 or len(lent) > 1:
        raise servers_wanted(text)
    parts = own + [layout for layout, _ in lent] or [ParallelLayout(0)]
    if ACTOR not in roles:
        raise ConfigError("allocation", text, "the actor has no part; write e.g. serve.d1+d2p2m1")
    first = parts[0]
    if any(layout.tensor != first.tensor for layout in parts):
        raise ConfigError("allocation", text, "its servers must have the same m: any of them continues any completion")
    if any(layout.pipeline != 1 for layout in parts):
        raise ConfigError("allocation", text, "the inference part must have p1: servers do not pipeline")
    servers = ParallelLayout(sum(layout.data for layout in parts), 1, first.tensor)
    return Allocation(servers, roles, workers, sum(layout.data for layout, _ in lent), sum(first for _, first in lent))


def servers_wanted(text: str) -> ConfigError:
    """Return the error of an expression without servers, or with too many parts of them."""
    example = f"{SERVE}.d1+d2 or {SERVE}.d1|d2"
    problem = f"must have exactly one inference part ({SERVE}.), joined by '+' or '|', or one of each: write {example}"
    return ConfigError("allocation", text, problem)


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


def lent_servers(config: Config) -> frozenset[str]:
    """Return the names of the servers that use devices of workers in turn with them. Raises ConfigError."""
    if config.evaluate_only or config.allocation == AUTO:
        return frozenset()
    allocation = parse_allocation(config.allocation)
    return frozenset(f"generation_server/{n}" for n in range(allocation.inference.data) if allocation.is_lent(n))


def has_servers(config: Config) -> bool:
    """Return False if the run does not generate: it has no servers, RolloutWorkers and reward services either.

    Raises ConfigError.
    """
    return config.allocation == AUTO or parse_allocation(config.allocation).inference.data > 0


def has_agents(config: Config) -> bool:
    """Return True if the run has RolloutWorkers, and may have reward services. Raises ConfigError."""
    return has_servers(config) and not config.is_service


def own_servers(config: Config) -> int:
    """Return the number of servers with devices of their own. Raises ConfigError."""
    if config.evaluate_only or config.allocation == AUTO:
        return 0
    allocation = parse_allocation(config.allocation)
    return allocation.inference.data - allocation.lent


def allocation_text(inference: ParallelLayout, actor: ParallelLayout, lent: int = 0) -> str:
    """Return an allocation expression, without the axes of size 1. ``lent``: servers that share the actor's devices."""
    own = ParallelLayout(inference.data - lent, 1, inference.tensor)
    shared = f"serve.{_axes(ParallelLayout(lent, 1, inference.tensor))}|" if lent else ""
    return (f"serve.{_axes(own)}+" if own.data else "") + shared + _axes(actor)


def _axes(layout: ParallelLayout) -> str:
    axes = {"p": layout.pipeline, "m": layout.tensor}
    return f"d{layout.data}" + "".join(f"{name}{size}" for name, size in axes.items() if size > 1)
