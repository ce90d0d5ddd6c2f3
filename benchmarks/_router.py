"""The contenders of ``benchmarks.router``, each a process on another core, and servers for the manager."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import random
import socket
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
import uvloop
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from realsys.cluster.names.contract import Names
from realsys.cluster.names.file_store import FileNameStore
from realsys.config.schema import AsyncConfig, Config, ManagerConfig
from realsys.config.schema_rollout import RolloutConfig
from realsys.config.schema_train import TrainConfig
from realsys.manager.messages import (
    AllocateReply,
    AllocateRequest,
    FinishReply,
    FinishRequest,
    ScheduleReply,
    ScheduleRequest,
)
from realsys.manager.process import Manager, ManagerParts
from realsys.types import Ticket

TOKEN, ANSWERS, CALLS = "benchmark", 16, ("/allocate_rollout", "/schedule_request", "/finish_rollout")
NAMES = Names("benchmark", "router", "trial")
BOUND_S = 60.0  # no single wait takes longer
TICKET = Ticket("0000000000", 0, 0, n=ANSWERS)
REPLIES = (AllocateReply([TICKET]), ScheduleReply("generation_server/0", "http://127.0.0.1:1", 0), FinishReply(True))


class AllocateModel(BaseModel):
    worker: str
    max_tickets: int
    wait_s: float
    request_id: str


class ScheduleModel(BaseModel):
    ticket_id: str
    attempt: int
    prompt_len: int
    max_new_tokens: int
    n: int
    failed_server: str | None
    failure: str | None
    prefix: list[int]


class AnswerModel(BaseModel):
    reward: float
    correct: bool
    length: int
    finish_reason: str
    version_min: int
    version_max: int


class FinishModel(BaseModel):
    ticket_id: str
    attempt: int
    worker: str
    outcome: str
    reason: str
    answers: list[AnswerModel]


def bare_pydantic() -> FastAPI:
    app = FastAPI()
    replies: list[dict[str, Any]] = [msgspec.to_builtins(reply) for reply in REPLIES]

    @app.post(CALLS[0])
    async def allocate(body: AllocateModel) -> dict[str, Any]:
        return replies[0]

    @app.post(CALLS[1])
    async def schedule(body: ScheduleModel) -> dict[str, Any]:
        return replies[1]

    @app.post(CALLS[2])
    async def finish(body: FinishModel) -> dict[str, Any]:
        return replies[2]

    return app


def bare_msgspec() -> FastAPI:
    app = FastAPI()

    def add(path: str, kind: Any, reply: msgspec.Struct) -> None:
        decoder = msgspec.json.Decoder(kind)

        async def handle(request: Request) -> Response:
            decoder.decode(await request.body())
            return Response(msgspec.json.encode(reply), media_type="application/json")

        app.add_route(path, handle, methods=["POST"])

    for path, kind, reply in zip(CALLS, (AllocateRequest, ScheduleRequest, FinishRequest), REPLIES, strict=True):
        add(path, kind, reply)
    return app


def serve_bare(make: Callable[[], FastAPI], core: int | None, ready: Connection) -> None:
    pin(core)
    listening = socket.create_server(("127.0.0.1", 0), backlog=2048)
    ready.send(listening.getsockname()[1])
    config = uvicorn.Config(make(), log_level="warning", access_log=False, lifespan="off", timeout_keep_alive=75)
    uvicorn.Server(config).run(sockets=[listening])


def serve_manager(folder: Path, strategy: str, core: int | None, ready: Connection) -> None:
    pin(core)
    config = Config(
        train=TrainConfig(batch_groups=1 << 20, total_steps=1000),
        rollout=RolloutConfig(group_size=ANSWERS),
        asynchronous=AsyncConfig(max_staleness=1000),
        manager=ManagerConfig.model_validate({"routing": strategy}),
    )
    store = FileNameStore(folder / "name_store")

    def register(address: str) -> None:
        ready.send(int(address.rpartition(":")[2]))

    parts = ManagerParts(config, NAMES, store, TOKEN, folder / "ledger.jsonl", {"train": 1 << 17}, register)
    uvloop.run(Manager(parts).run(asyncio.Event()))


def pin(core: int | None) -> None:
    if core is not None:
        os.sched_setaffinity(0, {core})


@contextlib.contextmanager
def running(target: Callable[..., None], *args: Any) -> Iterator[int]:
    """Start a contender in a new process; return its port."""
    mine, other = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=target, args=(*args, other), daemon=True)
    process.start()
    try:
        if not mine.poll(BOUND_S):
            raise TimeoutError(f"{target.__name__} did not listen within {BOUND_S} s")
        yield mine.recv()
    finally:
        process.terminate()
        process.join(BOUND_S)


class SimulatedServers:
    """Generation servers as the manager sees them, all on one port, told apart by the first part of the path."""

    def __init__(self, count: int, stage_s: tuple[float, float]) -> None:
        self.count, self._stage_s = count, stage_s
        self.versions, self._paths = [-1] * count, [""] * count
        self.updated = asyncio.Event()  # set with every update that a server has completed
        self._random = random.Random(1)

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1024)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = int(head.partition("content-length:")[2].split("\r\n", 1)[0] or 0)
                body = await reader.readexactly(length)
                _, index, call = head.split(" ", 2)[1].split("/")
                payload = msgspec.json.encode(await self._answer(int(index), call, body))
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(payload), payload))
        writer.close()

    async def _answer(self, index: int, call: str, body: bytes) -> dict[str, Any]:
        if call == "update_weights_from_disk":
            stage_s = self._random.uniform(*self._stage_s)
            await asyncio.sleep(stage_s)
            order = msgspec.json.decode(body)
            self.versions[index], self._paths[index] = int(order["weight_version"]), order["model_path"]
            self.updated.set()
            return {"success": True, "message": "", "timings": {"stage_s": stage_s, "pause_s": 0.001}}
        if call == "model_info":
            return {"model_path": self._paths[index], "weight_version": str(self.versions[index])}
        counts = {"running": 1, "queued": 0, "kv_tokens": 0, "kv_capacity": 1, "generated_tokens": 0, "busy_s": 0.0}
        limits = {"backend": "", "weight_version": "", "context_length": 1, "max_running": 1, "max_queued": 1}
        return {**counts, **limits, "steps": 0, "updates": 0, "paused": False, "prefilled_tokens": 0}

    async def until(self, version: int) -> None:
        """Every server has been updated to ``version``."""
        async with asyncio.timeout(BOUND_S):
            while min(self.versions) < version:
                self.updated.clear()
                await self.updated.wait()
