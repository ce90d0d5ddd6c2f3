"""The ModelWorkers find each other, and form the process groups of every mesh among them.

worker 0: binds a TCPStore on port 0 -> registers its address      others: wait for the address -> connect

All workers are ranks of one world, and a worker's index is its rank there. A mesh is some of them; meshes may overlap:

    actor.d2p2,critic.m2        actor    stage 0:  workers 0 1      critic   tensor ranks:  workers 0 1
                                         stage 1:  workers 2 3

Megatron keeps its groups in globals of ``parallel_state``, for one mesh. Here every mesh has its own values of those
globals, and ``MeshGroups.active()`` puts them in place for as long as a call on that mesh runs.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from realsys.cluster.network import advertised_host, join_host_port
from realsys.cluster.store.base import NameStore
from realsys.cluster.topology import Mesh
from realsys.config.schema import ClusterConfig
from realsys.train.megatron.device import Device, bind_gloo_to
from realsys.train.megatron.megatron_core import parallel_state

#: Megatron's state as it is before anything is formed: what a mesh does not set must not be another mesh's.
_UNFORMED = {name: value for name, value in vars(parallel_state).items() if name.startswith("_") and name.isupper()}


def rendezvous(
    store: NameStore, key: str, rank: int, world: int, cluster: ClusterConfig, device: Device
) -> contextlib.AbstractContextManager[None]:
    """Join torch.distributed through the name store. ``key`` must be new for every start of the workers.

    Raises WaitTimeout naming worker 0 when its address does not come within ``cluster.connect_timeout_s``.
    """
    timeout = timedelta(seconds=cluster.connect_timeout_s)
    if rank == 0:
        # Our own socket: TCPStore by itself would listen on every interface.
        listener = socket.create_server((cluster.host, 0), backlog=max(128, world))
        port = listener.getsockname()[1]
        tcp = TCPStore(
            cluster.host,
            port,
            world,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        store.add(key, join_host_port(advertised_host(cluster.host), port), replace=True)
    else:
        address = store.wait(key, cluster.connect_timeout_s, "the torch store of model_worker/0")
        host, _, port_text = address.rpartition(":")
        tcp = TCPStore(
            host.strip("[]"), int(port_text), world, is_master=False, timeout=timeout, wait_for_workers=False
        )
    return process_groups(tcp, rank, world, cluster, device)


@contextlib.contextmanager
def process_groups(tcp: Store, rank: int, world: int, cluster: ClusterConfig, device: Device) -> Iterator[None]:
    """torch.distributed for as long as the block runs.

    After an error the groups are left as they are: taking them down may wait for ranks that wait for this one.
    """
    if device.backend == "gloo":
        bind_gloo_to(cluster.host)
    dist.init_process_group(
        device.backend,
        store=tcp,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=cluster.request_timeout_s),
        device_id=device.device if device.is_cuda else None,
    )
    yield
    dist.destroy_process_group()


@dataclass(frozen=True, slots=True, eq=False)
class MeshGroups:
    """One mesh as one of its workers sees it: where that worker sits, and the process groups it is a member of.

    Ranks of ``whole`` are ranks of the mesh; those of ``data``, ``tensor`` and ``pipeline`` count along that axis.
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
    _parallel_state: Mapping[str, Any] = field(repr=False)  # global of Megatron -> its value on this mesh

    @property
    def first_stage(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def last_stage(self) -> bool:
        return self.pipeline_rank == self.mesh.layout.pipeline - 1

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Megatron works on this mesh inside the block; what was there before is back afterwards. May be nested.

        Enter around every call into Megatron, and only on the thread that serves requests: globals are the process's.
        """
        with _replaced(parallel_state, self._parallel_state), _replaced(dist, self._world_functions()):
            yield

    def _world_functions(self) -> dict[str, Any]:
        """Megatron's optimizers agree on their parameter groups over the world: with these, over this mesh."""
        size, gather = dist.distributed_c10d.get_world_size, dist.distributed_c10d.all_gather_object
        return {
            "get_world_size": lambda group=None: size(group or self.whole),
            "all_gather_object": lambda found, own, group=None: gather(found, own, group or self.whole),
        }

    def any_rank(self, flag: bool, device: Device) -> bool:
        """Whether ``flag`` is set on any rank of the mesh. Every rank must call it."""
        if self.mesh.layout.world_size == 1:
            return flag
        value = torch.tensor([float(flag)], device=device.device)
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self.whole)
        return bool(value.item() > 0)


def form_meshes(meshes: Mapping[str, Mesh], worker: int, device: Device) -> dict[str, MeshGroups]:
    """Role -> its groups, for the roles whose mesh holds ``worker``. Needs ``process_groups``.

    Every worker of the world calls it with the same ``meshes``, also one that is on none. Workers that are together
    in several groups share one communicator: it costs memory on a GPU, and calls run one at a time.
    """
    wanted = {
        workers
        for mesh in meshes.values()
        for rank in range(mesh.layout.world_size)
        for workers in _workers_by_group(mesh, rank).values()
    }
    # All workers make all groups in one order: each takes part of every worker, member or not.
    made = {workers: dist.new_group(workers, backend=device.backend) for workers in sorted(wanted)}
    scratch = parallel_state.GlobalMemoryBuffer()
    formed = {mesh: _groups(mesh, worker, made, scratch) for mesh in set(meshes.values()) if worker in mesh.workers}
    return {role: formed[mesh] for role, mesh in meshes.items() if mesh in formed}


def _groups(mesh: Mesh, worker: int, made: Mapping[tuple[int, ...], dist.ProcessGroup], scratch: object) -> MeshGroups:
    rank = mesh.workers.index(worker)
    data_rank, tensor_rank, pipeline_rank = mesh.coordinates(rank)
    workers = _workers_by_group(mesh, rank)
    group = {name: made[members] for name, members in workers.items()}
    values = {
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
        "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": group["whole"],
        # No context parallelism, no experts.
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
        "_GLOBAL_MEMORY_BUFFER": scratch,  # of sequence parallelism
    }
    if worker in workers["embedding"]:
        values |= {"_EMBEDDING_GROUP": group["embedding"], "_EMBEDDING_GLOBAL_RANKS": list(workers["embedding"])}
    if worker in workers["position_embedding"]:
        values["_POSITION_EMBEDDING_GROUP"] = group["position_embedding"]
        values["_POSITION_EMBEDDING_GLOBAL_RANKS"] = list(workers["position_embedding"])
    unknown = values.keys() - _UNFORMED.keys()
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


def _workers_by_group(mesh: Mesh, rank: int) -> dict[str, tuple[int, ...]]:
    """The groups that concern ``rank``, by the workers in them.

    It is a member of all but perhaps the embedding groups: the first and last stage, which share tied weights, and
    the first stage for positions.
    """
    assert list(mesh.workers) == sorted(mesh.workers), "torch.distributed orders the ranks of a group"
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
        "embedding": tuple(dict.fromkeys((pipeline[0], pipeline[-1]))),
        "position_embedding": pipeline[:1],
    }


@contextlib.contextmanager
def _replaced(module: object, values: Mapping[str, Any]) -> Iterator[None]:
    """``values`` are the module's attributes inside the block."""
    attributes = vars(module)
    before = {name: attributes[name] for name in values}
    attributes.update(values)
    try:
        yield
    finally:
        attributes.update(before)
