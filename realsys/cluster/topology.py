"""Placement of model shards on workers, and the routing table from shards to workers.

Training ranks are laid out pipe-major, then data, then tensor: ``rank = pp*(DP*TP) + dp*TP + tp``.
Inference ranks are laid out data, then pipe, then tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from realsys.config.allocation import Allocation, ParallelLayout

Coordinates = tuple[int, int, int]  # (dp, tp, pp)


@dataclass(frozen=True, slots=True)
class ModelShardID:
    """One shard of one model role."""

    role: str
    dp: int
    tp: int
    pp: int

    def __str__(self) -> str:
        return f"{self.role}@d{self.dp}t{self.tp}p{self.pp}"


@dataclass(frozen=True, slots=True)
class Mesh:
    """A layout placed on workers. ``workers[rank]`` is the index of the worker that holds training rank ``rank``."""

    layout: ParallelLayout
    workers: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.workers) != self.layout.world_size or len(set(self.workers)) != len(self.workers):
            raise ValueError(
                f"layout {self.layout} must have {self.layout.world_size} distinct workers, got {self.workers}"
            )

    def rank(self, dp: int, tp: int, pp: int) -> int:
        """Return the training rank at these coordinates."""
        layout = self.layout
        return pp * (layout.data * layout.tensor) + dp * layout.tensor + tp

    def coordinates(self, rank: int) -> Coordinates:
        """Return (dp, tp, pp) of a training rank."""
        layout = self.layout
        pp, rank_in_stage = divmod(rank, layout.data * layout.tensor)
        dp, tp = divmod(rank_in_stage, layout.tensor)
        return dp, tp, pp

    def dp_head(self, dp: int) -> int:
        """Return the worker that represents DP rank ``dp``: last pipeline stage, tensor rank 0."""
        return self.workers[self.rank(dp, 0, self.layout.pipeline - 1)]

    def dp_heads(self) -> list[int]:
        """Return the heads of all DP ranks."""
        return [self.dp_head(dp) for dp in range(self.layout.data)]

    def dp_members(self, dp: int) -> list[int]:
        """Return the workers of DP rank ``dp``: all its pipeline stages and tensor ranks."""
        layout = self.layout
        return [self.workers[self.rank(dp, tp, pp)] for pp in range(layout.pipeline) for tp in range(layout.tensor)]


def whole_mesh(layout: ParallelLayout) -> Mesh:
    """Return the mesh on workers 0..world_size-1."""
    return Mesh(layout, tuple(range(layout.world_size)))


def place(allocation: Allocation, roles: Iterable[str]) -> dict[str, Mesh]:
    """Return the mesh of every role. Roles that the allocation does not name share the actor's workers."""
    meshes = {}
    for role in roles:
        placement = allocation.placement(role)
        size = placement.layout.world_size
        meshes[role] = Mesh(placement.layout, tuple(range(placement.first, placement.first + size)))
    return meshes


def routing_table(meshes: Mapping[str, Mesh]) -> dict[str, int]:
    """Return handle -> worker index.

    Handles are the shards of all roles, ``{role}/__data{i}__`` for the DP heads, and plain worker indices. With a
    single role ``__data{i}__`` is a handle as well. Several shards may map to one worker.
    """
    table: dict[str, int] = {}
    for role, mesh in meshes.items():
        for rank, worker in enumerate(mesh.workers):
            dp, tp, pp = mesh.coordinates(rank)
            table[str(ModelShardID(role, dp, tp, pp))] = worker
            table[str(worker)] = worker
        for dp in range(mesh.layout.data):
            table[f"{role}/__data{dp}__"] = mesh.dp_head(dp)
            if len(meshes) == 1:
                table[f"__data{dp}__"] = mesh.dp_head(dp)
    return table


def group_contiguously(n_senders: int, n_receivers: int) -> list[list[int]]:
    """Return, for each sender, the indices of its receivers (push-pull grouping).

    Each receiver gets a contiguous range of senders; the first receivers get one more if the division has a remainder.
    With fewer senders than receivers, each sender has a contiguous range of receivers and serves them in turn.
    Raises ValueError without senders or receivers.
    """
    if n_senders < 1 or n_receivers < 1:
        raise ValueError(f"there must be at least one sender and one receiver, got {n_senders} and {n_receivers}")
    if n_senders < n_receivers:
        return _split(range(n_receivers), n_senders)
    groups = _split(range(n_senders), n_receivers)
    return [[receiver] for receiver, senders in enumerate(groups) for _ in senders]


def receivers_of(sender: int, n_senders: int, n_receivers: int) -> list[int]:
    """Return the receivers of one sender. A sender beyond ``n_senders``, started later, shares those of another."""
    return group_contiguously(n_senders, n_receivers)[sender % n_senders]


def _split(items: Sequence[int], parts: int) -> list[list[int]]:
    """Split ``items`` into contiguous parts whose sizes differ by at most one, the larger ones first."""
    size, extra = divmod(len(items), parts)
    bounds = [0]
    for i in range(parts):
        bounds.append(bounds[-1] + size + (1 if i < extra else 0))
    return [list(items[bounds[i] : bounds[i + 1]]) for i in range(parts)]
