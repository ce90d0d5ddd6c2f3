"""Who sits where on a mesh, and the routing table from shards to workers.

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
    """A layout placed on workers: ``workers[rank]`` is the index of the worker that holds training rank ``rank``."""

    layout: ParallelLayout
    workers: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.workers) != self.layout.world_size or len(set(self.workers)) != len(self.workers):
            raise ValueError(
                f"layout {self.layout} needs {self.layout.world_size} distinct workers, got {self.workers}"
            )

    def rank(self, dp: int, tp: int, pp: int) -> int:
        lay = self.layout
        return pp * (lay.data * lay.tensor) + dp * lay.tensor + tp

    def coordinates(self, rank: int) -> Coordinates:
        lay = self.layout
        pp, rest = divmod(rank, lay.data * lay.tensor)
        dp, tp = divmod(rest, lay.tensor)
        return dp, tp, pp

    def dp_head(self, dp: int) -> int:
        """Worker that speaks for DP rank ``dp``: last pipeline stage, tensor rank 0."""
        return self.workers[self.rank(dp, 0, self.layout.pipeline - 1)]

    def dp_heads(self) -> list[int]:
        return [self.dp_head(dp) for dp in range(self.layout.data)]

    def dp_members(self, dp: int) -> list[int]:
        """All workers of DP rank ``dp``: every stage and tensor rank."""
        lay = self.layout
        return [self.workers[self.rank(dp, tp, pp)] for pp in range(lay.pipeline) for tp in range(lay.tensor)]


def whole_mesh(layout: ParallelLayout) -> Mesh:
    """The mesh on workers 0..world_size-1."""
    return Mesh(layout, tuple(range(layout.world_size)))


def place(allocation: Allocation, roles: Iterable[str]) -> dict[str, Mesh]:
    """The mesh of every role: those that the allocation names where it says, the others with the actor."""
    meshes = {}
    for role in roles:
        placement = allocation.placement(role)
        size = placement.layout.world_size
        meshes[role] = Mesh(placement.layout, tuple(range(placement.first, placement.first + size)))
    return meshes


def inference_rank(layout: ParallelLayout, dp: int, tp: int, pp: int) -> int:
    return dp * (layout.pipeline * layout.tensor) + pp * layout.tensor + tp


def routing_table(meshes: Mapping[str, Mesh]) -> dict[str, int]:
    """Handle -> worker index, for every shard of every role, ``{role}/__data{i}__``, and plain worker indices.

    With a single role the bare ``__data{i}__`` is there too. Several shards may map to one worker.
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
    """For each sender the receivers it serves (push-pull grouping).

    Senders are split over receivers contiguously, the remainder one each to the first receivers. With fewer senders
    than receivers a sender serves several receivers in turn, contiguous again.
    """
    if n_senders < 1 or n_receivers < 1:
        raise ValueError(f"need at least one sender and one receiver, got {n_senders} and {n_receivers}")
    if n_senders < n_receivers:
        return _split(range(n_receivers), n_senders)
    groups = _split(range(n_senders), n_receivers)
    return [[receiver] for receiver, senders in enumerate(groups) for _ in senders]


def _split(items: Sequence[int], parts: int) -> list[list[int]]:
    size, extra = divmod(len(items), parts)
    bounds = [0]
    for i in range(parts):
        bounds.append(bounds[-1] + size + (1 if i < extra else 0))
    return [list(items[bounds[i] : bounds[i + 1]]) for i in range(parts)]
