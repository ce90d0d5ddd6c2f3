"""The GserverManager process: parse, build from realsys, run, close."""

from __future__ import annotations

import uvloop

from realsys.cluster.aio import stop_event
from realsys.cluster.worker import WorkerContext, worker_main
from realsys.data.prompts import split_sizes
from realsys.manager.process import Manager, ManagerParts
from realsys.manager.routes import Pages
from realsys.observe.page.app import SECRET, routes
from realsys.observe.step_log import LatestRecords


async def serve(ctx: WorkerContext) -> None:
    """Run the manager until the worker is asked to stop."""

    def register(address: str) -> None:
        ctx.register(ctx.names.gserver_manager, address)
        ctx.set_state("serving")

    parts = ManagerParts(
        config=ctx.config,
        names=ctx.names,
        store=ctx.store,
        token=ctx.token,
        ledger=ctx.paths.ledger,
        split_sizes=split_sizes(ctx.config, ctx.paths),
        register=register,
        check_alive=ctx.check_alive,
        count=ctx.count,
        pages=lambda live: Pages(routes(ctx.paths, live), SECRET, LatestRecords(ctx.paths.steps).read),
    )
    await Manager(parts).run(stop_event(ctx))


def main() -> None:
    worker_main("gserver_manager", lambda ctx: uvloop.run(serve(ctx)))


if __name__ == "__main__":
    main()
