"""The ranks of one training mesh find each other, and Megatron's process groups over them.

rank 0: binds a TCPStore on port 0 -> registers its address      others: wait for the address -> connect
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from realsys.cluster.name_store import NameStore
from realsys.config.allocation import ParallelLayout
from realsys.config.schema import ClusterConfig
from realsys.train.device import Device, bind_gloo_to
from realsys.train.megatron import parallel_state


def rendezvous(
    store: NameStore, key: str, rank: int, world: int, cluster: ClusterConfig, device: Device
) -> contextlib.AbstractContextManager[None]:
    """Join torch.distributed through the name store. ``key`` must be new for every start of the mesh.

    Raises WaitTimeout naming rank 0 when its address does not come within ``cluster.connect_timeout_s``.
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
        store.add(key, f"{cluster.host}:{port}", replace=True)
    else:
        address = store.wait(key, cluster.connect_timeout_s, "the torch store of model_worker/0")
        host, _, port_text = address.rpartition(":")
        tcp = TCPStore(host, int(port_text), world, is_master=False, timeout=timeout, wait_for_workers=False)
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
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def form_mesh(layout: ParallelLayout, device: Device) -> None:
    """Megatron's groups. Its default order is ours: pipe-major, then data, then tensor (realsys.cluster.topology)."""
    with device.active():
        parallel_state.initialize_model_parallel(
            layout.tensor, layout.pipeline, order="tp-cp-ep-dp-pp", create_gloo_process_groups=False
        )


def data_parallel_group() -> dist.ProcessGroup:
    group: dist.ProcessGroup = parallel_state.get_data_parallel_group()
    return group


def tensor_parallel_group() -> dist.ProcessGroup:
    group: dist.ProcessGroup = parallel_state.get_tensor_model_parallel_group()
    return group


def any_rank(flag: bool, device: Device) -> bool:
    """Whether ``flag`` is set on any rank of the mesh. Every rank must call it."""
    if dist.get_world_size() == 1:
        return flag
    value = torch.tensor([float(flag)], device=device.device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return bool(value.item() > 0)
