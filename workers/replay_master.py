"""The MasterWorker of a replay: `realsys replay` starts it in a scratch folder, beside the ModelWorkers of the trial.

replay.json (ReplayJob) ──> Replay ──> result.json (ReplayResult), then exit 0, equal or not
"""

from __future__ import annotations

import msgspec
import uvloop

from realsys.cluster.aio import run_until_stopped
from realsys.cluster.process import training_start
from realsys.cluster.topology import routing_table
from realsys.cluster.worker import WorkerContext, worker_main
from realsys.config.allocation import parse_allocation
from realsys.master.calls.model_workers import ModelWorkers
from realsys.master.records.replayer import Replay, ReplayJob, meshes_of
from realsys.stream.head_routing import RoutedStream
from realsys.stream.request_reply import MasterStream
from realsys.types import Recorded


async def serve(ctx: WorkerContext) -> None:
    cluster = ctx.config.cluster
    job = msgspec.json.decode((ctx.paths.root / "replay.json").read_bytes(), type=ReplayJob)
    stream = MasterStream(cluster.host)
    ctx.register(ctx.names.request_reply(training_start()), stream.address)

    async def replay() -> None:
        await stream.barrier(range(parse_allocation(ctx.config.allocation).workers), cluster.connect_timeout_s)
        meshes = meshes_of(ctx.config)
        workers = ModelWorkers(RoutedStream(stream, routing_table(meshes)), meshes, cluster.request_timeout_s)
        run = Replay(ctx.config, ctx.paths, job, workers)
        stream.on_notice("recorded", Recorded, run.recorder.written)
        result = await run.run()
        (ctx.paths.root / "result.json").write_bytes(msgspec.json.encode(result))

    try:
        await run_until_stopped(ctx, replay())
    finally:
        stream.close()


def main() -> None:
    worker_main("replay_master", lambda ctx: uvloop.run(serve(ctx)))


if __name__ == "__main__":
    main()
