"""A ModelWorker process: a rank of every mesh it is on. Forms them, connects to the master, serves until stopped."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from realsys.cluster.gpu_environment import bind_to_gpus, prepare_environment
from realsys.cluster.process import training_start
from realsys.cluster.worker import WorkerContext, worker_main

if TYPE_CHECKING:
    from realsys.cluster.stream.security import CurveKeys
    from realsys.train.megatron.rendezvous import RankSeat


def serve(ctx: WorkerContext) -> None:
    prepare_environment(os.environ, deterministic=ctx.config.train.deterministic)
    if ctx.config.cluster.bind_cpus != "none":
        bind_to_gpus()
    # Imported here: torch and Megatron take seconds, and wrong arguments should not.
    from realsys.cluster.gpu_devices import make_meter
    from realsys.cluster.stream.push_pull import Puller
    from realsys.cluster.stream.security import keys_for
    from realsys.cluster.stream.worker_endpoint import GroupIntake, WorkerEndpoint
    from realsys.cluster.topology import place
    from realsys.config.allocation import ACTOR, parse_allocation
    from realsys.config.dataflow import dataflow_of
    from realsys.train.megatron.device import prepare_device
    from realsys.train.megatron.mesh import form_meshes
    from realsys.train.megatron.rendezvous import rendezvous
    from realsys.train.step_gate import PauseStepRequest, SettleRequest, StepGate
    from realsys.train.worker.call_service import ModelWorkerService, WorkerParts, load_calls
    from realsys.train.worker.data_manager import DataManager
    from realsys.weights.contract import WriterParts, build_transport

    config, cluster, worker = ctx.config, ctx.config.cluster, ctx.index
    flow = dataflow_of(config)
    load_calls(flow)
    allocation = parse_allocation(config.allocation)
    # The actor even if no call of the dataflow is its own: the warm-up trains it, and its heads receive the groups.
    meshes = place(allocation, [ACTOR, *flow.roles])
    heads = meshes[ACTOR].dp_heads()
    keys = keys_for(cluster.host, ctx.paths.keys)
    device = prepare_device(worker, config.cluster.threads, deterministic=config.train.deterministic)
    data = DataManager(worker, config.train.ppo.top_k)
    ctx.set_state("connecting")
    with rendezvous(_seat(ctx, allocation.workers, keys), device) as master:
        groups = form_meshes(meshes, worker, cluster, device)
        puller = Puller(cluster.host, keys=keys, check_alive=ctx.check_alive) if worker in heads else None
        endpoint = WorkerEndpoint(
            worker,
            master,
            GroupIntake(puller, data.add_group) if puller is not None else None,
            incarnation=ctx.incarnation,
            keys=keys,
            check_alive=ctx.check_alive,
        )
        ctx.count(lambda: {**endpoint.counters(), "superseded_groups": data.refused})
        writer = build_transport(config).writer(WriterParts(worker, ctx.check_alive, ctx.paths.root, ctx.token))
        gate = StepGate()
        endpoint.answer_urgent("pause_step", PauseStepRequest, gate.pause)
        endpoint.answer_urgent("settle_step", SettleRequest, gate.settle)
        meter = make_meter(device.device, config.train.peak_tflops)
        parts = WorkerParts(worker, groups, endpoint, data, device, writer, gate, meter)
        service = ModelWorkerService(config, ctx.paths, parts)
        try:
            if puller is not None:
                ctx.register(ctx.names.pull(heads.index(worker)), puller.address)
            ctx.set_state("serving")
            service.run(ctx.stop)
        finally:
            endpoint.close()


def _seat(ctx: WorkerContext, world: int, keys: CurveKeys | None) -> RankSeat:
    from realsys.cluster.stream.sockets import answers
    from realsys.train.megatron.rendezvous import RankSeat

    return RankSeat(
        ctx.index,
        world,
        ctx.config.cluster,
        ctx.store,
        ctx.names,
        ctx.register,
        answers=lambda address, timeout_s: answers(address, keys, timeout_s),
        on_stop=ctx.on_stop,
        start=training_start(),
    )


def main() -> None:
    worker_main("model_worker", serve)


if __name__ == "__main__":
    main()
