"""A reward service process: the verifier pool behind HTTP, for all RolloutWorkers of the trial. Stateless."""

from __future__ import annotations

import asyncio
import os
import socket

import msgspec
import uvloop

from realsys.cluster.aio import stop_event
from realsys.cluster.http_server import HttpServer
from realsys.cluster.worker import WorkerContext, worker_main
from realsys.errors import ConfigError
from realsys.reward.open_verifiers import make_pool
from realsys.reward.reward_server import MOST_ITEMS, RewardServer
from realsys.types import ServerAddress


async def serve(ctx: WorkerContext) -> None:
    """Judge what RolloutWorkers send, until asked to stop."""
    reward = ctx.config.rollout.reward
    if not reward.services:
        raise ConfigError("rollout.reward.services", 0, "the RolloutWorkers of this trial use no service: set it to 1")
    pool = make_pool(ctx.config, judgements=1)  # the client has an item judged again, by another service
    server = RewardServer(pool, MOST_ITEMS, token=ctx.token, check_alive=ctx.check_alive)
    ctx.count(lambda: server.refused)
    http = HttpServer(server.app, ctx.config.cluster.host)
    address = ServerAddress(ctx.name, http.url, os.getpid(), socket.gethostname(), ctx.incarnation)
    stop, listening = stop_event(ctx), asyncio.Event()
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(http.serve(listening.set), name="http")
            await listening.wait()
            key, value = ctx.names.reward_service(ctx.index), msgspec.json.encode(address).decode()
            await asyncio.to_thread(ctx.register, key, value)
            ctx.set_state("serving")
            await stop.wait()
            http.stop()
    finally:
        await pool.close()


def main() -> None:
    worker_main("reward_service", lambda ctx: uvloop.run(serve(ctx)))


if __name__ == "__main__":
    main()
