"""ModelWorkers as forked processes: the imports are paid once, and torch.distributed is real."""

import os
import pickle
import socket
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from realsys.cluster.gpu_environment import prepare_environment
from realsys.cluster.network import take_address
from realsys.cluster.topology import Mesh, whole_mesh
from realsys.config.allocation import ACTOR, ParallelLayout
from realsys.config.schema import Config
from realsys.train.megatron.device import Device, prepare_device
from realsys.train.megatron.mesh import MeshGroups, form_meshes
from realsys.train.megatron.rendezvous import process_groups
from realsys.train.worker.call_handlers import Role
from realsys.train.worker.call_service import make_role
from realsys.train.worker.data_manager import DataManager

Body = Callable[[int, Device], Any]

#: of this forked process: role -> its groups, filled before the body runs
FORMED: dict[str, MeshGroups] = {}


def run_ranks(
    world: int,
    body: Body,
    config: Config,
    layout: ParallelLayout | None = None,
    *,
    joined: bool = True,
    meshes: Mapping[str, Mesh] | None = None,
) -> list[Any]:
    """``body(rank, device)`` in ``world`` forked ranks of one process group; their results in rank order.

    ``layout`` forms the actor's mesh on the first workers, ``meshes`` any others (``FORMED``); without ``joined`` there
    is no torch.distributed at all. Fails with the traceback of the first rank that raised.
    """
    placed = ({ACTOR: whole_mesh(layout)} if layout is not None else {}) | dict(meshes or {})
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, socket.create_server(("127.0.0.1", 0)) as listener:
        group = _World(world, config, placed, listener) if joined else None
        pids = [_fork(rank, config, group, body, Path(folder)) for rank in range(world)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        results = [Path(folder, f"{rank}.pickle") for rank in range(world)]
        errors = [Path(folder, f"{rank}.error") for rank in range(world)]
        failed = sorted((e for e in errors if e.exists()), key=lambda e: e.stat().st_mtime_ns)
        if failed:
            raise AssertionError(f"rank {failed[0].stem} failed:\n{failed[0].read_text()}")
        assert codes == [0] * world, f"exit codes {codes}"
        return [pickle.loads(path.read_bytes()) for path in results]


@dataclass(frozen=True)
class _World:
    size: int
    config: Config
    meshes: Mapping[str, Mesh]
    listener: socket.socket

    def run(self, rank: int, body: Body, device: Device) -> Any:
        host, port = self.listener.getsockname()
        fd = self.listener.detach() if rank == 0 else None
        tcp = TCPStore(host, port, self.size, is_master=rank == 0, wait_for_workers=False, master_listen_fd=fd)
        with process_groups(tcp, rank, self.size, self.config.cluster, device):
            FORMED.update(form_meshes(self.meshes, rank, self.config.cluster, device))
            result = body(rank, device)
            dist.barrier()  # rank 0 serves the store: it leaves last
            return result


def _fork(rank: int, config: Config, group: _World | None, body: Body, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        warnings.simplefilter("ignore")
        # as a worker does when it starts
        prepare_environment(os.environ, deterministic=config.train.deterministic)
        take_address(config)
        device = prepare_device(rank, 1, deterministic=config.train.deterministic)
        result = group.run(rank, body, device) if group is not None else body(rank, device)
        (folder / f"{rank}.pickle").write_bytes(pickle.dumps(result))
        code = 0
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def build_role(
    config: Config,
    layout: ParallelLayout,
    rank: int,
    device: Device,
    model: Path,
    role: str = ACTOR,
    trainable: bool = True,
) -> Role:
    """Build a role as a ModelWorker does at ``initialize``, on the mesh that ``run_ranks`` formed for it.

    A role without a mesh shares the actor's, as in an allocation.
    """
    groups = FORMED.get(role) or FORMED[ACTOR]
    assert groups.mesh.layout == layout, f"run_ranks formed {groups.mesh.layout}, not {layout}"
    return make_role(config, role, model, groups, DataManager(rank), device, trainable=trainable)


def coordinates(layout: ParallelLayout, rank: int) -> tuple[int, int, int]:
    return whole_mesh(layout).coordinates(rank)


def cat_exports(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The tensors of all writers; fails when two wrote the same."""
    merged: dict[str, torch.Tensor] = {}
    for part in parts:
        doubled = merged.keys() & part.keys()
        assert not doubled, f"written twice: {sorted(doubled)}"
        merged.update(part)
    return merged
