"""A ModelWorker process: one training rank. Joins the mesh, connects to the master, serves requests until stopped."""

from __future__ import annotations

import os

from realsys.cluster.worker import WorkerContext, worker_main


def serve(ctx: WorkerContext) -> None:
    # Imported here: torch and Megatron take seconds, and wrong arguments should not.
    from realsys.cluster.topology import whole_mesh
    from realsys.config.allocation import parse_allocation
    from realsys.stream.push_pull import Puller
    from realsys.stream.request_reply import WorkerEndpoint
    from realsys.stream.security import keys_for
    from realsys.train.data_manager import DataManager
    from realsys.train.device import prepare_device
    from realsys.train.mesh import form_mesh, rendezvous
    from realsys.train.service import ModelWorkerService
    from realsys.weights.shards import write_shard

    config, cluster, rank = ctx.config, ctx.config.cluster, ctx.index
    mesh = whole_mesh(parse_allocation(config.allocation).training)
    heads = mesh.dp_heads()
    keys = keys_for(cluster.host, ctx.paths.root / "keys")
    device = prepare_device(rank, config.train.threads)
    data = DataManager(rank)
    ctx.set_state("connecting")
    # The run's id: what an earlier run of this trial left in the name store must not be found.
    store_key = ctx.names.torch_store(os.environ.get("REALSYS_RUN_ID", "0"))
    with rendezvous(ctx.store, store_key, rank, mesh.layout.world_size, cluster, device):
        form_mesh(mesh.layout, device)
        master = ctx.store.wait(ctx.names.request_reply, cluster.connect_timeout_s, "the address of the MasterWorker")
        puller = Puller(cluster.host, keys=keys) if rank in heads else None
        endpoint = WorkerEndpoint(
            rank,
            master,
            puller,
            data.add_group if puller is not None else None,
            incarnation=ctx.incarnation,
            keys=keys,
        )
        try:
            if puller is not None:
                ctx.register(ctx.names.pull(heads.index(rank)), puller.address)
            ctx.set_state("serving")
            ModelWorkerService(config, ctx.paths, mesh, rank, endpoint, data, device, write_shard).run(ctx.stop)
        finally:
            endpoint.close()


def main() -> None:
    worker_main("model_worker", serve)


if __name__ == "__main__":
    main()
