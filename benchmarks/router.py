"""The manager under load against a bare FastAPI handler: ``python -m benchmarks.router``.

10,000 rollouts stay open over 64 simulated servers, with the real manager process: its HTTP, state, journal and weight
roll-out. A cycle is what a rollout costs it: allocate, schedule, finish. The contenders take turns in one run, each
pinned to the same core, asked over the same connections with the same bodies by one closed loop of clients:

    manager           the three calls, decided, reserved and on file before they are answered
    fastapi           a bare handler: the body becomes a pydantic model, the reply is a dict of its shape
    fastapi, msgspec  the same on the raw request, as the manager does it

Second table: the latency of the manager's calls while weights are rolled out to all servers, against the time between,
in alternation. The process of the clients also simulates the servers; staging takes them 1 to 2 s, at random.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
import uvloop

from benchmarks._router import (
    ANSWERS,
    CALLS,
    NAMES,
    TICKET,
    TOKEN,
    SimulatedServers,
    bare_msgspec,
    bare_pydantic,
    running,
    serve_bare,
    serve_manager,
)
from benchmarks._table import report
from realsys.cluster.names.file_store import FileNameStore
from realsys.manager.messages import (
    AllocateReply,
    AllocateRequest,
    Answer,
    FinishRequest,
    ScheduleRequest,
)
from realsys.types import PublishedVersion, ServerAddress, Ticket


class Client(asyncio.Protocol):
    """One kept-alive HTTP/1.1 connection, one request at a time, as light as it can be: the clients share a core."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._buffer = b""
        self._reply: asyncio.Future[bytes]

    @classmethod
    async def connect(cls, port: int) -> Client:
        _, client = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return client

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name

    def connection_lost(self, exc: Exception | None) -> None:
        if hasattr(self, "_reply") and not self._reply.done():
            self._reply.set_exception(ConnectionError("the contender closed the connection"))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])
        if len(body) >= length:
            self._buffer = b""
            if head.startswith(b"HTTP/1.1 200"):
                self._reply.set_result(body)
            else:
                self._reply.set_exception(RuntimeError(f"{head!r} {body!r}"))

    def call(self, path: str, body: bytes | None) -> asyncio.Future[bytes]:
        self._reply = asyncio.get_running_loop().create_future()
        method = "GET" if body is None else "POST"
        head = f"{method} {path} HTTP/1.1\r\nhost: b\r\nauthorization: Bearer {TOKEN}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body or b'')}\r\n\r\n"
        self._transport.write(head.encode() + (body or b""))
        return self._reply

    def close(self) -> None:
        self._transport.close()


@dataclass
class Load:
    """A closed loop: every client makes one cycle after the other. ``latencies`` in seconds, of all calls."""

    clients: list[Client]
    opened: deque[Ticket] = field(default_factory=deque)
    latencies: list[float] = field(default_factory=list)
    cycles: int = 0

    async def fill(self, rollouts: int) -> None:
        """Open rollouts, placed on their servers."""
        while len(self.opened) < rollouts:
            body = msgspec.json.encode(AllocateRequest("rollout_worker/0", min(500, rollouts - len(self.opened))))
            granted = msgspec.json.decode(await self.clients[0].call(CALLS[0], body), type=AllocateReply).tickets
            for start in range(0, len(granted), len(self.clients)):
                part = granted[start : start + len(self.clients)]
                await asyncio.gather(*(self._schedule(c, t) for c, t in zip(self.clients, part, strict=False)))
            self.opened.extend(granted)

    async def _schedule(self, client: Client, ticket: Ticket) -> None:
        request = ScheduleRequest(ticket.ticket_id, ticket.attempt, 512, 1024, ticket.n, prefix=PREFIX)
        await client.call(CALLS[1], msgspec.json.encode(request))

    async def run(self, until: Callable[[], bool]) -> float:
        """Cycle until the condition holds; returns the seconds it took."""
        began = time.perf_counter()
        await asyncio.gather(*(self._cycles(client, index, until) for index, client in enumerate(self.clients)))
        return time.perf_counter() - began

    async def _cycles(self, client: Client, index: int, until: Callable[[], bool]) -> None:
        while not until():
            body = msgspec.json.encode(AllocateRequest(f"rollout_worker/{index}", 1))
            reply = await self._timed(client.call(CALLS[0], body))
            [ticket] = msgspec.json.decode(reply, type=AllocateReply).tickets
            await self._timed(self._schedule(client, ticket))
            self.opened.append(ticket)
            old = self.opened.popleft()
            done = FinishRequest(old.ticket_id, old.attempt, "rollout_worker/0", "rejected", "", [ANSWER] * ANSWERS)
            await self._timed(client.call(CALLS[2], msgspec.json.encode(done)))
            self.cycles += 1

    async def _timed(self, call: Awaitable[Any]) -> Any:
        began = time.perf_counter()
        reply = await call
        self.latencies.append(time.perf_counter() - began)
        return reply


ANSWER = Answer(5.0, True, 512, "stop", 0, 0)
PREFIX = [(1 << 31) + number for number in range(8)]  # a prompt of 512 tokens


@contextlib.asynccontextmanager
async def connected(port: int, count: int) -> AsyncIterator[Load]:
    clients = [await Client.connect(port) for _ in range(count)]
    try:
        yield Load(clients)
    finally:
        for client in clients:
            client.close()


def after(seconds: float) -> Callable[[], bool]:
    deadline = time.perf_counter() + seconds
    return lambda: time.perf_counter() > deadline


def percentile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))] if values else 0.0


# -- the two measurements ----------------------------------------------------------------------------------------------


async def throughput(loads: dict[str, Load], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Contenders in turn; ratios are the medians of the rounds' ratios."""
    rates: dict[str, list[float]] = {name: [] for name in loads}
    for load in loads.values():
        await load.run(after(seconds / 4))  # warm
        load.latencies.clear()
    for _ in range(rounds):
        for name, load in loads.items():
            before = load.cycles
            took = await load.run(after(seconds))
            rates[name].append((load.cycles - before) / took)
    return [
        {
            "contender": name,
            "cycles/s": statistics.median(rates[name]),
            "requests/s": 3 * statistics.median(rates[name]),
            "p50 ms": 1e3 * percentile(load.latencies, 0.5),
            "p99 ms": 1e3 * percentile(load.latencies, 0.99),
            **{
                f"of {other}": statistics.median(a / b for a, b in zip(rates[name], rates[other], strict=True))
                for other in loads
                if other != "manager"
            },
        }
        for name, load in loads.items()
    ]


async def updates(load: Load, publish: Callable[[int], None], servers: SimulatedServers, rounds: int) -> Any:
    """Latency of the calls during roll-outs, and between them for as long."""
    found: dict[str, list[float]] = {"between updates": [], "during an update": []}
    ratios = []
    for number in range(1, rounds + 1):
        load.latencies = []
        publish(number)
        arrived = asyncio.create_task(servers.until(number))
        took = await load.run(arrived.done)
        await arrived
        during, load.latencies = load.latencies, []
        await load.run(after(took))
        ratios.append(percentile(during, 0.99) / percentile(load.latencies, 0.99))
        found["during an update"] += during
        found["between updates"] += load.latencies
    return [
        {
            "time": name,
            "calls": len(values),
            "p50 ms": 1e3 * percentile(values, 0.5),
            "p99 ms": 1e3 * percentile(values, 0.99),
            "max ms": 1e3 * max(values),
            "p99 of between": statistics.median(ratios) if name.startswith("during") else 1.0,
        }
        for name, values in found.items()
    ]


async def measure(
    arguments: argparse.Namespace, folder: Path, ports: dict[str, int], sim: SimulatedServers, core: int | None
) -> None:
    store = FileNameStore(folder / "name_store")

    def publish(version: int) -> None:
        value = PublishedVersion(version, "m", f"/weights/v{version}", version)
        store.add(NAMES.model_version(), msgspec.json.encode(value).decode(), replace=True)

    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        loads = {name: await enter(connected(port, arguments.clients)) for name, port in ports.items()}
        watcher = await enter(connected(ports["manager"], 1))
        publish(0)
        await sim.until(0)
        for name, load in loads.items():
            if name == "manager":
                await load.fill(arguments.rollouts)
            load.opened.extend([TICKET] * (arguments.rollouts - len(load.opened)))
        page = asyncio.create_task(look(watcher.clients[0]))
        try:
            rows = await throughput(loads, arguments.rounds, arguments.seconds)
            latency = await updates(loads["manager"], publish, sim, arguments.updates)
        finally:
            page.cancel()
            await asyncio.gather(page, return_exceptions=True)
        status = json.loads(await watcher.clients[0].call("/status", None))
        assert status["ledger"]["running"] == arguments.rollouts, status["ledger"]
        assert sum(row["running"] for row in status["servers"]) == arguments.rollouts * ANSWERS, "a place was lost"
    meta = {**vars(arguments), "answers": ANSWERS, "pinned": core is not None}
    report("router", rows, meta)
    report("router_updates", latency, meta)
    store.close()


async def look(client: Client) -> None:
    """Somebody has the status page open, and Prometheus scrapes: once a second and once in five."""
    for number in range(1 << 30):
        await client.call("/metrics" if number % 5 == 4 else "/status", None)
        await asyncio.sleep(1.0)


async def main_async(arguments: argparse.Namespace, folder: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    core = cores[-1] if len(cores) > 1 else None
    if core is not None:
        os.sched_setaffinity(0, set(cores[:-1]))  # the clients'
    sim = SimulatedServers(arguments.servers, (1.0, 2.0))
    port = await sim.start()
    store = FileNameStore(folder / "name_store")
    for index in range(arguments.servers):
        name = f"generation_server/{index}"
        address = ServerAddress(name, f"http://127.0.0.1:{port}/{index}", 1, "127.0.0.1", "1")
        store.add(NAMES.generation_server(index), msgspec.json.encode(address).decode())
    store.close()
    with contextlib.ExitStack() as stack:
        ports = {
            "manager": stack.enter_context(running(serve_manager, folder, arguments.strategy, core)),
            "fastapi": stack.enter_context(running(serve_bare, bare_pydantic, core)),
            "fastapi, msgspec": stack.enter_context(running(serve_bare, bare_msgspec, core)),
        }
        await measure(arguments, folder, ports, sim, core)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router", description="The manager under load.")
    parser.add_argument("--rollouts", type=int, default=10_000, help="open all the time")
    parser.add_argument("--servers", type=int, default=64)
    parser.add_argument("--clients", type=int, default=16, help="connections, each with one call at a time")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    parser.add_argument("--seconds", type=float, default=3.0, help="of one turn")
    parser.add_argument("--updates", type=int, default=8, help="roll-outs of new weights to all servers")
    parser.add_argument("--strategy", default="sticky", help="manager.routing")
    with tempfile.TemporaryDirectory() as folder:
        uvloop.run(main_async(parser.parse_args(), Path(folder)))


if __name__ == "__main__":
    main()
