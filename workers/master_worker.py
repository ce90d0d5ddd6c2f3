"""The MasterWorker process: opens its connections, runs ``realsys.train.master.run``, closes them."""

from __future__ import annotations

import functools
import sys

import msgspec
import uvloop

from realsys.cluster.aio import run_until_stopped, stop_event
from realsys.cluster.process import training_start
from realsys.cluster.stream.master_stream import MasterStream
from realsys.cluster.stream.security import keys_for
from realsys.cluster.worker import EXIT_STOPPED, WorkerContext, worker_main
from realsys.manager.client import ManagerClient
from realsys.train.master.run import Connections, MasterRun, build_parts
from realsys.train.master.step_statistics import StepLog
from realsys.train.master.stopping import STOP_PROGRESS_S, progress
from realsys.types import TrainerAddress

#: Share of STOP_PROGRESS_S that a stopped run may stand still; the rest is for closing.
_GRACE = 0.9


async def serve(ctx: WorkerContext) -> None:
    """Run the master until it is done or stopped. A stopped master saves the last step.

    Exits with EXIT_STOPPED if the run is not finished.
    """
    cluster, names = ctx.config.cluster, ctx.names
    keys = keys_for(cluster.host, ctx.paths.keys)
    stream = MasterStream(cluster.host, keys=keys, check_alive=ctx.check_alive)
    ctx.count(lambda: {"bad_messages": stream.bad_messages, "rejected_peers": stream.rejected})
    address = TrainerAddress(ctx.incarnation, stream.address, training_start())
    ctx.register(names.request_reply, msgspec.json.encode(address).decode())
    step_log = StepLog(ctx.paths.steps, ctx.check_alive)
    manager = ManagerClient(
        lambda: ctx.store.wait(names.gserver_manager, cluster.start_timeout_s, "the gserver_manager"),
        ctx.token,
        check_alive=ctx.check_alive,
    )
    try:
        parts = build_parts(ctx, Connections(stream, manager, step_log))
        run = MasterRun(ctx, parts, stop_event(ctx))
        first_s, later_s = cluster.stop_timeout_s / 2, _GRACE * STOP_PROGRESS_S
        await run_until_stopped(ctx, run.run(), first_s, functools.partial(progress, ctx.paths), later_s)
    finally:
        await manager.close()
        stream.close()
        step_log.close()
    if not run.finished:
        sys.exit(EXIT_STOPPED)


def main() -> None:
    worker_main("master_worker", lambda ctx: uvloop.run(serve(ctx)))


if __name__ == "__main__":
    main()
