"""Reward services with real sockets and processes, on the event loop of one test."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from realsys.cluster.http_server import HttpServer
from realsys.reward.dispatch import DispatchBounds
from realsys.reward.open_verifiers import ServiceVerifiers
from realsys.reward.pool import ItemLimits, VerifierPool
from realsys.reward.reward_server import RewardServer
from realsys.types import ServerAddress

TOKEN = "secret"
LIMITS = ItemLimits(5.0, 5.0)


class Service:
    """One service. ``stop`` ends it as a killed process would: connections break."""

    def __init__(self, index: int, limits: ItemLimits, arguments: Any = None, items: int = 4096) -> None:
        self.pool = VerifierPool(1, limits, arguments, judgements=1)
        self.server = RewardServer(self.pool, items, token=TOKEN)
        self.http = HttpServer(self.server.app)
        self.address = ServerAddress(f"reward_service/{index}", self.http.url, 1, "here", "1")
        self._ready = asyncio.Event()
        self._task = asyncio.create_task(self.http.serve(self._ready.set))

    async def ready(self) -> None:
        await self._ready.wait()

    async def stop(self) -> None:
        if not self._task.done():
            for connection in list(self.http._server.server_state.connections):
                connection.transport.abort()
            self.http.stop()
            await self._task
        await self.pool.close()


@contextlib.asynccontextmanager
async def services(count: int, limits: ItemLimits = LIMITS, **settings: Any) -> AsyncIterator[list[Service]]:
    """Run ``count`` services."""
    running = [Service(index, limits, **settings) for index in range(count)]
    try:
        for each in running:
            await each.ready()
        yield running
    finally:
        for each in running:
            await each.stop()


@contextlib.asynccontextmanager
async def client_of(
    running: list[Service], *, retry_timeout_s: float = 20.0, silence_s: float = 15.0, token: str = TOKEN
) -> AsyncIterator[ServiceVerifiers]:
    """Run a client that knows these services."""
    client = ServiceVerifiers(DispatchBounds(retry_timeout_s, 60.0), token, silence_s=silence_s)
    client.registered(registrations(running))
    try:
        yield client
    finally:
        await client.close()


def registrations(running: list[Service]) -> dict[str, str]:
    """Return the entries of the services in the name store."""
    return {f"t/{each.address.name}": msgspec.json.encode(each.address).decode() for each in running}


@contextlib.asynccontextmanager
async def verifiers(kind: str, limits: ItemLimits = LIMITS, arguments: Any = None) -> AsyncIterator[Any]:
    """Run a VerifierPool, or two services and a client of them: the same interface."""
    if kind == "pool":
        pool = VerifierPool(1, limits, arguments)
        try:
            yield pool
        finally:
            await pool.close()
    else:
        async with services(2, limits, arguments=arguments) as running, client_of(running) as client:
            yield client


def run(kind: str, body: Any, limits: ItemLimits = LIMITS, arguments: Any = None) -> None:
    """Run ``body(verifiers)``; 60 s bound all of it."""

    async def main() -> None:
        async with asyncio.timeout(60), verifiers(kind, limits, arguments) as made:
            await body(made)

    asyncio.run(main())
