"""Forms the process groups of every mesh among the ModelWorkers, which ``rendezvous`` has connected.

All workers are ranks of one world, and a worker's index is its rank there. A mesh is some of them;
meshes may overlap:

    actor.d2p2,critic.m2        actor    stage 0:  workers 0 1      critic   tensor ranks:  workers 0 1
                                         stage 1:  workers 2 3

Megatron keeps the groups of one mesh in globals of ``parallel_state``. Here every mesh has its own
values of those globals, and ``MeshGroups.active()`` puts them in place while a call on that mesh
runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from realsys.cluster.topology import Mesh
from realsys.config.schema_cluster import ClusterConfig
from realsys.train.megatron.device import Device
from realsys.train.megatron.megatron_core import ALIASES, parallel_state

#: Megatron's globals before any group is formed. A mesh starts from these: a global that it does
#: not set must not keep another mesh's group.
_UNFORMED = {name: value for name, value in vars(parallel_state).items() if name.startswith("_") and name.isupper()}


@dataclass(frozen=True, slots=True, eq=False)
class MeshGroups:
    """One mesh as one of its workers sees it: the worker's place on it, and the process groups the
    worker is in.

    Ranks of ``whole`` are ranks of the mesh; those of ``data``, ``tensor`` and ``pipeline`` count
    along that axis.
    """

    mesh: Mesh
    rank: int  # on the mesh
    data_rank: int
    tensor_rank: int
    pipeline_rank: int
    whole: dist.ProcessGroup
    data: dist.ProcessGroup
    tensor: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    # name of a Megatron global -> its value on this mesh
    _parallel_state: Mapping[str, Any] = field(repr=False)

    @property
    def first_stage(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def last_stage(self) -> bool:
        return self.pipeline_rank == self.mesh.layout.pipeline - 1

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Make Megatron work on this mesh inside the block; restore the state before it afterwards.
        May be nested.

        Enter around every call into Megatron, and only on the thread that serves requests: the
        globals belong to the process.
        """
        with _replaced(parallel_state, self._parallel_state), _replaced(dist, self._world_functions()):
            yield

    def _world_functions(self) -> dict[str, Any]:
        """Return the functions of torch.distributed that Megatron calls without a group, for this
        mesh.

        Megatron's optimizers agree on their parameter groups over the whole world. Ranks outside
        the mesh make no such call, so over the world it would never return.
        """
        # Taken from ``distributed_c10d``: ``dist`` itself has the replacements while a block is
        # nested in another.
        size, gather = dist.distributed_c10d.get_world_size, dist.distributed_c10d.all_gather_object
        return {
            "get_world_size": lambda group=None: size(group or self.whole),
            "all_gather_object": lambda gathered, own, group=None: gather(gathered, own, group or self.whole),
        }

    def any_rank(self, flag: bool, device: Device) -> bool:
        """Return True on every rank if ``flag`` is set on any rank of the mesh.

        Every rank must call it.
        """
        if self.mesh.layout.world_size == 1:
            return flag
        value = torch.tensor([float(flag)], device=device.device)
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self.whole)
        return bool(value.item() > 0)


def form_meshes(
    meshes: Mapping[str, Mesh], worker: int, cluster: ClusterConfig, device: Device
) -> dict[str, MeshGroups]:
    """Return role -> its groups, for the roles whose mesh includes ``worker``. Needs
    ``rendezvous``.

    Every worker of the world calls it with the same ``meshes``, including one that is on no mesh.
    If workers are together in several groups, these share one communicator: it costs memory on a
    GPU, and calls run one at a time. All groups of one member share that worker's group of itself.
    """
    # Explicit: torch's default is 10 minutes on NCCL, whatever the world's timeout is.
    timeout = timedelta(seconds=cluster.request_timeout_s)
    world = dist.get_world_size()
    made: dict[tuple[int, ...], Any] = {tuple(range(world)): dist.group.WORLD}
    # All workers make the splits in the same order, because the members of a group wait for each other.
    for split in splits(meshes.values(), world):
        (own,) = (workers for workers in split if worker in workers)
        made.setdefault(own, _split_off(split, own, timeout, device))
    # The buffer of sequence parallelism. Calls run one at a time, so all meshes share it.
    scratch = parallel_state.GlobalMemoryBuffer()
    formed = {mesh: _groups(mesh, worker, made, scratch) for mesh in set(meshes.values()) if worker in mesh.workers}
    return {role: formed[mesh] for role, mesh in meshes.items() if mesh in formed}


def splits(meshes: Iterable[Mesh], world: int) -> list[list[tuple[int, ...]]]:
    """Return the splits of a world of ``world`` workers that make all groups of ``meshes``: at most 8 for one mesh.

    A split is a partition of all workers: first each alone, then the groups along one axis. Meshes on separate
    workers share splits. A group of all workers is the world, and needs none. Workers without a group on an axis
    are alone in its split, because torch names a group by the number of groups that the process has made before:
    all members must have made as many.
    """
    made: list[set[tuple[int, ...]]] = []
    for mesh in dict.fromkeys(meshes):
        around = [_workers_by_group(mesh, rank) for rank in range(mesh.layout.world_size)]
        for axis in around[0]:
            groups = {groups[axis] for groups in around if 1 < len(groups[axis]) < world}.difference(*made)
            if not groups:
                continue
            home = next((split for split in made if _members(split).isdisjoint(_members(groups))), None)
            if home is None:
                made.append(groups)
            else:
                home |= groups
    alone: list[tuple[int, ...]] = [(worker,) for worker in range(world)]
    return [split for split in (alone, *(_padded(split, alone) for split in made)) if len(split) > 1]


def _members(groups: Iterable[tuple[int, ...]]) -> set[int]:
    return {worker for group in groups for worker in group}


def _padded(split: set[tuple[int, ...]], alone: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the groups of a split with all other workers alone, sorted."""
    members = _members(split)
    return sorted([*split, *(group for group in alone if group[0] not in members)])


def _split_off(
    split: list[tuple[int, ...]], own: tuple[int, ...], timeout: timedelta, device: Device
) -> dist.ProcessGroup:
    """Return the group ``own`` of a split. Every worker of the world must call it."""
    group: dist.ProcessGroup | None
    if device.is_cuda:
        # One operation of NCCL for all groups of the split; ``new_group`` would need one for each.
        group = dist.split_group(split_ranks=[list(workers) for workers in split], timeout=timeout)
    else:
        # gloo cannot split. Only the members connect.
        group = dist.new_group(own, timeout=timeout, backend=device.backend, use_local_synchronization=True)
    assert group is not None, f"torch made no group {own}"
    return group


def _groups(mesh: Mesh, worker: int, made: Mapping[tuple[int, ...], dist.ProcessGroup], scratch: object) -> MeshGroups:
    """Return the groups of ``mesh`` for ``worker``.

    ``made``: workers -> their group; ``scratch``: Megatron's buffer.
    """
    rank = mesh.workers.index(worker)
    data_rank, tensor_rank, pipeline_rank = mesh.coordinates(rank)
    workers = _workers_by_group(mesh, rank)
    group = {name: made[members] for name, members in workers.items() if worker in members}
    values = _megatron_globals(worker, workers, group) | {"_GLOBAL_MEMORY_BUFFER": scratch}
    unknown = values.keys() - _UNFORMED.keys()
    # A renamed global would be set without effect, and Megatron would run on the whole world.
    assert not unknown, f"this Megatron-Core has no parallel_state.{', '.join(sorted(unknown))}"
    return MeshGroups(
        mesh,
        rank,
        data_rank,
        tensor_rank,
        pipeline_rank,
        whole=group["whole"],
        data=group["data"],
        tensor=group["tensor"],
        pipeline=group["pipeline"],
        _parallel_state=_UNFORMED | values,
    )


def _megatron_globals(
    worker: int, workers: Mapping[str, tuple[int, ...]], group: Mapping[str, dist.ProcessGroup]
) -> dict[str, Any]:
    """Return the values of Megatron's globals for ``worker``.

    ``workers``, ``group``: group name -> members, group.
    """
    values: dict[str, Any] = {
        "_TENSOR_MODEL_PARALLEL_GROUP": group["tensor"],
        "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS": list(workers["tensor"]),
        "_PIPELINE_MODEL_PARALLEL_GROUP": group["pipeline"],
        "_PIPELINE_GLOBAL_RANKS": list(workers["pipeline"]),
        "_MODEL_PARALLEL_GROUP": group["model"],
        "_MODEL_PARALLEL_GLOBAL_RANKS": list(workers["model"]),
        "_DATA_PARALLEL_GROUP": group["data"],
        "_DATA_PARALLEL_GLOBAL_RANKS": list(workers["data"]),
        "_DATA_PARALLEL_GROUP_WITH_CP": group["data"],
        "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP": list(workers["data"]),
        "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": group["data"],
        "_TENSOR_AND_DATA_PARALLEL_GROUP": group["stage"],
        "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": group["stage"],
        # The norm of the distributed optimizer is reduced over this group: one instance spans the
        # whole mesh.
        "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": group["whole"],
        # Without context parallelism and experts these are groups of one rank, or those of the
        # dense layers.
        "_CONTEXT_PARALLEL_GROUP": group["alone"],
        "_CONTEXT_PARALLEL_GLOBAL_RANKS": [worker],
        "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": group["tensor"],
        "_EXPERT_MODEL_PARALLEL_GROUP": group["alone"],
        "_EXPERT_MODEL_PARALLEL_RANKS": [worker],
        "_EXPERT_TENSOR_PARALLEL_GROUP": group["tensor"],
        "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": group["tensor"],
        "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": group["model"],
        "_EXPERT_DATA_PARALLEL_GROUP": group["data"],
        "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": group["data"],
    }
    if worker in workers["embedding"]:
        values |= {"_EMBEDDING_GROUP": group["embedding"], "_EMBEDDING_GLOBAL_RANKS": list(workers["embedding"])}
    if worker in workers["position_embedding"]:
        values["_POSITION_EMBEDDING_GROUP"] = group["position_embedding"]
        values["_POSITION_EMBEDDING_GLOBAL_RANKS"] = list(workers["position_embedding"])
    return values | {name: values[plain] for name, plain in ALIASES.items()}


def _workers_by_group(mesh: Mesh, rank: int) -> dict[str, tuple[int, ...]]:
    """Return the groups around ``rank``: name -> the workers in it.

    ``rank`` is a member of all, except perhaps of the embedding groups. These are the first and
    last stage, which share tied weights, and the first stage for positions.
    """
    # torch.distributed sorts the ranks of a group: in an unsorted mesh they would differ from the
    # ranks of the mesh.
    assert list(mesh.workers) == sorted(mesh.workers), f"workers of a mesh must ascend: {mesh.workers}"
    layout = mesh.layout
    dp, tp, pp = mesh.coordinates(rank)
    pipeline = tuple(mesh.workers[mesh.rank(dp, tp, stage)] for stage in range(layout.pipeline))
    return {
        "whole": mesh.workers,
        "data": tuple(mesh.workers[mesh.rank(d, tp, pp)] for d in range(layout.data)),
        "tensor": tuple(mesh.workers[mesh.rank(dp, t, pp)] for t in range(layout.tensor)),
        "pipeline": pipeline,
        "model": tuple(mesh.dp_members(dp)),
        "stage": tuple(mesh.workers[mesh.rank(d, t, pp)] for d in range(layout.data) for t in range(layout.tensor)),
        "alone": (mesh.workers[rank],),
        # With one stage, first and last are the same worker, which may be named only once.
        "embedding": tuple(dict.fromkeys((pipeline[0], pipeline[-1]))),
        "position_embedding": pipeline[:1],
    }


@contextlib.contextmanager
def _replaced(module: object, values: Mapping[str, Any]) -> Iterator[None]:
    """Set ``values`` as attributes of the module inside the block."""
    attributes = vars(module)
    before = {name: attributes[name] for name in values}
    attributes.update(values)
    try:
        yield
    finally:
        attributes.update(before)
