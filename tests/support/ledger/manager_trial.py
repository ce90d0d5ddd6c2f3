"""A manager to test: its real app on a real port, a memory name store, HTTP generation servers, a real journal."""

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from realsys.cluster.names.contract import Names
from realsys.config.schema import AsyncConfig, Config, ManagerConfig
from realsys.config.schema_rollout import RolloutConfig
from realsys.config.schema_train import TrainConfig
from realsys.generation.protocol import ServerInfo
from realsys.manager.commit_loop import ManagerService, WakeUp
from realsys.manager.decisions import ManagerState
from realsys.manager.process import Manager, ManagerParts
from realsys.manager.routes import Pages
from realsys.observe.step_log import LatestRecords
from realsys.types import PublishedVersion, ServerAddress
from tests.support.ledger.memory_store import MemoryNameStore

TOKEN = "a token"
BOUND_S = 60.0
WORKER = "rollout_worker/0"


class FakeServer:
    """A generation server's HTTP surface: loads versions unless told to refuse, or to hang until released."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.loaded: list[int] = []
        self.path, self.version = "", "-1"
        self.running = 0  # sequences that it reports
        self.refuse = self.dead = self.lies = False
        self.released = asyncio.Event()
        self.released.set()
        self.asked = asyncio.Event()
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.add_routes([web.post("/update_weights_from_disk", self._update), web.get("/model_info", self._info)])
        app.add_routes([web.get("/server_info", self._server_info)])
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def stop(self) -> None:
        self.released.set()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": self.path, "weight_version": self.version})

    async def _server_info(self, request: web.Request) -> web.Response:
        fields = msgspec.structs.fields(ServerInfo)
        idle = {field.name: self.version if field.name == "weight_version" else 0 for field in fields}
        return web.json_response(idle | {"backend": "fake", "paused": False, "running": self.running})

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.set()
        await self.released.wait()
        if self.dead and request.transport is not None:
            request.transport.abort()
        if self.refuse:
            return web.json_response({"success": False, "message": "checksum of model-00001 is wrong"})
        if not self.lies:
            self.path, self.version = body["model_path"], body["weight_version"]
            self.loaded.append(int(self.version))
        return web.json_response({"success": True, "message": "ok", "timings": {"pause_s": 0.002}})


class Trial:
    """One manager with its name store; everything a test does to it."""

    def __init__(self, ledger: Path, config: Config) -> None:
        self.ledger, self.config, self.steps = ledger, config, ledger.with_name("steps.jsonl")
        self.names, self.store = Names("user", "exp", "trial"), MemoryNameStore()
        self.servers: list[FakeServer] = []
        self.url = ""
        self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=BOUND_S))
        self.stop = asyncio.Event()
        self.changed = WakeUp()
        self.manager: Manager
        self.task: asyncio.Task[None]
        self.beats: dict[str, str] = {}  # incarnations of the workers' heartbeats

    async def start(self) -> None:
        loop, registered = asyncio.get_running_loop(), asyncio.Event()

        def register(address: str) -> None:
            self.url = address
            loop.call_soon_threadsafe(registered.set)

        self.stop = asyncio.Event()
        parts = ManagerParts(
            self.config,
            self.names,
            self.store,
            TOKEN,
            self.ledger,
            {"train": 64, "eval": 8},
            register,
            pages=lambda _: Pages(records=LatestRecords(self.steps).read),
        )
        self.manager = Manager(parts)
        self.task = asyncio.create_task(self.manager.run(self.stop))
        up = asyncio.create_task(registered.wait())
        await asyncio.wait({up, self.task}, timeout=BOUND_S, return_when=asyncio.FIRST_COMPLETED)
        if self.task.done():
            self.task.result()
        assert registered.is_set(), "the manager did not register"
        self._follow(self.manager.service)

    def _follow(self, service: ManagerService) -> None:
        """Fire ``changed`` after every decision of the manager."""
        wake = service._wake

        def followed() -> None:
            wake()
            self.changed.fire()

        service._wake = followed  # type: ignore[method-assign]

    def follow_loads(self) -> None:
        """Fire ``changed`` after every report of a load."""
        reservations = self.state.reservations
        report = reservations.report

        def followed(*load: Any) -> None:
            report(*load)
            self.changed.fire()

        reservations.report = followed  # type: ignore[method-assign]

    async def halt(self) -> None:
        self.stop.set()
        async with asyncio.timeout(BOUND_S):
            await self.task

    async def close(self) -> None:
        for server in self.servers:
            server.released.set()
        if not self.task.done():
            await self.halt()
        for server in self.servers:
            await server.stop()
        await self.session.close()
        self.store.close()

    @property
    def state(self) -> ManagerState:
        return self.manager.service.state

    async def until(self, what: str, holds: Callable[[], bool]) -> None:
        """Woken by the manager's decisions; bounded."""
        try:
            async with asyncio.timeout(BOUND_S):
                while True:
                    changed = self.changed.ticket()
                    if holds():
                        return
                    await changed.wait()
        except TimeoutError:
            raise AssertionError(f"not within {BOUND_S} s: {what}; {self.state.servers.all()}") from None

    async def add_server(self, index: int, incarnation: str = "1", server: FakeServer | None = None) -> FakeServer:
        if server is None:
            server = FakeServer(f"generation_server/{index}")
            await server.start()
            self.servers.append(server)
        address = ServerAddress(server.name, server.url, 1, "host", incarnation)
        self.store.add(self.names.generation_server(index), msgspec.json.encode(address).decode(), replace=True)
        return server

    def publish(self, version: int) -> None:
        published = PublishedVersion(version, "m1", f"/weights/v{version}", version)
        self.store.add(self.names.model_version(), msgspec.json.encode(published).decode(), replace=True)

    def heartbeat(self, worker: str, incarnation: str) -> None:
        value = json.dumps({"kind": "rollout_worker", "index": 0, "host": "h", "pid": 1, "incarnation": incarnation})
        self.store.add(self.names.heartbeat(worker), value, replace=True)
        self.beats[worker] = incarnation

    def serves(self, index: int, version: int) -> Callable[[], bool]:
        def holds() -> bool:
            server = self.state.servers.get(f"generation_server/{index}")
            return (
                server is not None
                and server.state == "ready"
                and server.verified is not None
                and (server.verified.version == version)
            )

        return holds

    def failed(self, name: str) -> Callable[[], bool]:
        """Its last update failed, and it has answered the probe that follows."""

        def holds() -> bool:
            server = self.state.servers.get(name)
            return server is not None and server.failures > 0 and server.health.state == "healthy"

        return holds

    def quarantined(self, name: str) -> Callable[[], bool]:
        def holds() -> bool:
            server = self.state.servers.get(name)
            return server is not None and server.state == "quarantined"

        return holds

    async def ready(self, version: int = 0, servers: int = 1) -> None:
        for index in range(servers):
            await self.add_server(index)
        self.publish(version)
        for index in range(servers):
            await self.until(f"server {index} serves {version}", self.serves(index, version))
        for worker in self.beats:
            await self.until(f"{worker} is known", lambda worker=worker: self.knows(worker))

    def knows(self, worker: str) -> bool:
        seen = self.state.workers.get(worker)
        return seen is not None and seen.incarnation == self.beats[worker]

    async def call(self, path: str, body: Any, *, token: str = TOKEN) -> tuple[int, Any]:
        data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        headers = {"Authorization": f"Bearer {token}"}
        async with self.session.post(self.url + path, data=data, headers=headers) as response:
            return response.status, await response.json()

    async def post(self, path: str, **body: Any) -> Any:
        status, reply = await self.call(path, body)
        assert status == 200, (path, status, reply)
        return reply

    async def get(self, path: str) -> Any:
        async with self.session.get(self.url + path) as response:
            assert response.status == 200, (path, response.status)
            return await response.json()

    async def allocate(self, n: int = 1, wait_s: float = 0.0) -> Any:
        return await self.post("/allocate_rollout", worker=WORKER, max_tickets=n, wait_s=wait_s)

    async def schedule(self, ticket: dict[str, Any], **more: Any) -> tuple[int, Any]:
        body = {"ticket_id": ticket["ticket_id"], "attempt": ticket["attempt"], "prompt_len": 8, "max_new_tokens": 32}
        return await self.call("/schedule_request", body | {"n": ticket.get("n", 1)} | more)

    async def finish(self, ticket: dict[str, Any], outcome: str = "accepted", **more: Any) -> Any:
        answer = {
            "reward": 5.0,
            "correct": True,
            "length": 20,
            "finish_reason": "stop",
            "version_min": ticket.get("version", 0),
            "version_max": ticket.get("version", 0),
        }
        body = {"ticket_id": ticket["ticket_id"], "attempt": ticket["attempt"], "worker": WORKER, "outcome": outcome}
        answers = [] if outcome == "failed" else [answer] * ticket.get("n", 1)
        return await self.post("/finish_rollout", **(body | {"reason": "", "answers": answers} | more))


def config(
    *, batch: int = 2, eta: int = 1, update_timeout_s: float = 30.0, lease_s: float = 3600.0, **manager: Any
) -> Config:
    return Config(
        train=TrainConfig(batch_groups=batch, total_steps=100),
        rollout=RolloutConfig(group_size=2, max_attempts=2),
        asynchronous=AsyncConfig(max_staleness=eta),
        manager=ManagerConfig(update_timeout_s=update_timeout_s, rollout_lease_s=lease_s, **manager),
    )


@contextlib.asynccontextmanager
async def trial(tmp_path: Path, made: Config) -> AsyncIterator[Trial]:
    running = Trial(tmp_path / "ledger.jsonl", made)
    try:
        await running.start()
        yield running
    finally:
        await running.close()


def drive(tmp_path: Path, scenario: Callable[[Trial], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(3 * BOUND_S), trial(tmp_path, config(**settings)) as running:
            await scenario(running)

    asyncio.run(main())
