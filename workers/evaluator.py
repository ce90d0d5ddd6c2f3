"""Process of `realsys eval` in place of the MasterWorker (``realsys.train.master.request_evaluations``)."""

from __future__ import annotations

import sys

import uvloop

from realsys.cluster.aio import run_until_stopped
from realsys.cluster.worker import EXIT_STOPPED, WorkerContext, worker_main
from realsys.manager.client import ManagerClient
from realsys.train.master.request_evaluations import EvaluationRun
from realsys.train.master.step_statistics import StepLog


async def serve(ctx: WorkerContext) -> None:
    """Evaluate until done or stopped."""
    names, connect_s = ctx.names, ctx.config.cluster.start_timeout_s
    step_log = StepLog(ctx.paths.steps, ctx.check_alive)
    manager = ManagerClient(
        lambda: ctx.store.wait(names.gserver_manager, connect_s, "the gserver_manager"),
        ctx.token,
        check_alive=ctx.check_alive,
    )
    try:
        finished = await run_until_stopped(ctx, EvaluationRun(ctx, manager, step_log).run())
    finally:
        await manager.close()
        step_log.close()
    if not finished:
        sys.exit(EXIT_STOPPED)


def main() -> None:
    worker_main("evaluator", lambda ctx: uvloop.run(serve(ctx)))


if __name__ == "__main__":
    main()
