"""One replay, as the MasterWorker of `realsys replay` runs it: replay.json -> Replay ->
result.json.
"""

from __future__ import annotations

import msgspec

from realsys.cluster.stream.master_stream import MasterStream, RoutedStream
from realsys.cluster.topology import routing_table
from realsys.cluster.worker import WorkerContext
from realsys.config.allocation import parse_allocation
from realsys.master.calls.model_workers import ModelWorkers
from realsys.master.records.replayer import Replay, ReplayJob, meshes_of
from realsys.train.records.record_messages import Recorded


async def replay(ctx: WorkerContext, stream: MasterStream) -> None:
    """Repeat the steps that replay.json (ReplayJob) names; write result.json (ReplayResult), equal
    or not.
    """
    config, root = ctx.config, ctx.paths.root
    job = msgspec.json.decode((root / "replay.json").read_bytes(), type=ReplayJob)
    await stream.barrier(range(parse_allocation(config.allocation).workers), config.cluster.connect_timeout_s)
    meshes = meshes_of(config)
    workers = ModelWorkers(RoutedStream(stream, routing_table(meshes)), meshes, config.cluster.request_timeout_s)
    run = Replay(config, ctx.paths, job, workers)
    stream.on_notice("recorded", Recorded, run.recorder.written)
    result = await run.run()
    (root / "result.json").write_bytes(msgspec.json.encode(result))
