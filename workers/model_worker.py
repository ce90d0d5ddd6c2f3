"""A ModelWorker process: one training rank. Connects to the master, joins the mesh, serves requests until stopped."""

from __future__ import annotations

import os

from realsys.cluster.topology import whole_mesh
from realsys.cluster.worker import WorkerContext, worker_main
from realsys.config.allocation import parse_allocation
from realsys.stream.push_pull import Puller
from realsys.stream.request_reply import WorkerEndpoint
from realsys.train.data_manager import DataManager
from realsys.train.device import prepare_device
from realsys.train.mesh import form_mesh, rendezvous
from realsys.train.service import ModelWorkerService
from realsys.weights.shards import write_shard


def serve(ctx: WorkerContext) -> None:
    config, cluster, names = ctx.config, ctx.config.cluster, ctx.names
    mesh = whole_mesh(parse_allocation(config.allocation).training)
    rank = ctx.index
    data = DataManager(rank)
    device = prepare_device(rank, config.train.threads)
    heads = mesh.dp_heads()
    puller = Puller(cluster.host) if rank in heads else None
    master = ctx.store.wait(names.request_reply, cluster.connect_timeout_s, "the address of the MasterWorker")
    endpoint = WorkerEndpoint(rank, master, puller, data.add_group)
    try:
        # The run's id: a store left over from an earlier run of the trial must not be found.
        key = names.torch_store(os.environ.get("REALSYS_RUN_ID", "0"))
        with rendezvous(ctx.store, key, rank, mesh.layout.world_size, cluster, device):
            form_mesh(mesh.layout, device)
            if puller is not None:
                ctx.register(names.pull(heads.index(rank)), puller.address)
            ctx.set_state("serving")
            ModelWorkerService(config, ctx.paths, mesh, rank, endpoint, data, device, write_shard).run(ctx.stop)
    finally:
        endpoint.close()


def main() -> None:
    worker_main("model_worker", serve)


if __name__ == "__main__":
    main()
