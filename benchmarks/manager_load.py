"""The manager with many servers and RolloutWorkers: ``python -m benchmarks.manager_load``.

The real manager process, up to 512 RolloutWorkers with a connection each, and half as many simulated servers. Every
RolloutWorker plays tickets one after the other: allocate, schedule, finish. 10,240 more tickets stay open. Four
measurements, each with its CPU time of the manager:

    idle    the manager polls the loads of the servers
    paced   100 tickets per second over all workers: what a large job needs, with latencies
    full    every worker asks again without a pause: the most that the manager grants
    held    every worker holds an allocation that cannot be granted, and the manager gets 100 reports per second

The CPU time of a ticket should not grow with the number of workers and servers; its exponent is the slope of log CPU
over log workers, between the first and the last row. Clients and servers run in other processes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from benchmarks._router import ANSWERS, BOUND_S, CALLS, NAMES, TOKEN, running
from benchmarks._table import report
from benchmarks.heartbeats import cpu_s
from benchmarks.join import joined, serve_servers
from benchmarks.router import ANSWER, PREFIX, Client, percentile
from realsys.cluster.names.file_store import FileNameStore
from realsys.config.schema import AsyncConfig, Config
from realsys.config.schema_rollout import RolloutConfig
from realsys.config.schema_train import TrainConfig
from realsys.manager.messages import AllocateReply, AllocateRequest, FinishRequest, ScheduleRequest, TrainedRequest
from realsys.manager.process import Manager, ManagerParts
from realsys.types import PublishedVersion, ServerAddress, Ticket

OPEN = 10_240
PACE = 100.0  # tickets, or reports, per second


def serve_manager(folder: Path, batch: int, ready: Connection) -> None:
    """Run the manager, which grants up to two batches. Sends its process id and address."""
    config = Config(
        train=TrainConfig(batch_groups=batch, total_steps=1000),
        rollout=RolloutConfig(group_size=ANSWERS),
        asynchronous=AsyncConfig(max_staleness=1),
    )
    store = FileNameStore(folder / "name_store")
    parts = ManagerParts(
        config,
        NAMES,
        store,
        TOKEN,
        folder / "ledger.jsonl",
        {"train": 1 << 20},
        lambda address: ready.send((os.getpid(), address)),
    )
    uvloop.run(Manager(parts).run(asyncio.Event()))


class Worker:
    """One RolloutWorker: one connection, one call at a time."""

    def __init__(self, client: Client, index: int, latencies: list[float]) -> None:
        self._client = client
        self._name = f"rollout_worker/{index}"
        self._latencies = latencies

    async def call(self, path: str, request: Any) -> bytes:
        began = time.perf_counter()
        reply = await self._client.call(path, msgspec.json.encode(request))
        self._latencies.append(time.perf_counter() - began)
        return reply

    async def allocate(self, count: int, wait_s: float = 0.0) -> list[Ticket]:
        reply = await self.call(CALLS[0], AllocateRequest(self._name, count, wait_s=wait_s))
        return msgspec.json.decode(reply, type=AllocateReply).tickets

    async def play(self) -> None:
        """Play one ticket."""
        [ticket] = await self.allocate(1)
        request = ScheduleRequest(ticket.ticket_id, ticket.attempt, 512, 1024, ticket.n, prefix=PREFIX)
        await self.call(CALLS[1], request)
        done = FinishRequest(ticket.ticket_id, ticket.attempt, self._name, "rejected", "", [ANSWER] * ANSWERS)
        await self.call(CALLS[2], done)


class Load:
    """All workers, against one manager."""

    def __init__(self, workers: list[Worker], manager: int, latencies: list[float]) -> None:
        self.workers = workers
        self._manager = manager
        self._latencies = latencies

    async def measured(self, seconds: float, play: Any) -> tuple[float, float, int]:
        """Run ``play(worker index, deadline)`` of every worker. Returns (seconds, CPU seconds, tickets)."""
        self._latencies.clear()
        cpu, began = cpu_s(self._manager), time.perf_counter()
        counts = await asyncio.gather(*(play(index, began + seconds) for index in range(len(self.workers))))
        return time.perf_counter() - began, cpu_s(self._manager) - cpu, sum(counts)

    async def idle(self, seconds: float) -> dict[str, Any]:
        async def wait(index: int, deadline: float) -> int:
            await asyncio.sleep(deadline - time.perf_counter())
            return 0

        took, cpu, _ = await self.measured(seconds, wait)
        return {"idle core %": 100 * cpu / took}

    async def paced(self, seconds: float) -> dict[str, Any]:
        period = len(self.workers) / PACE

        async def play(index: int, deadline: float) -> int:
            due, count = deadline - seconds + period * index / len(self.workers), 0
            while due < deadline:
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                await self.workers[index].play()
                due, count = due + period, count + 1
            return count

        took, cpu, count = await self.measured(seconds, play)
        return {
            "paced core %": 100 * cpu / took,
            "paced tickets/s": count / took,
            "paced p50 ms": 1e3 * percentile(self._latencies, 0.5),
            "paced p99 ms": 1e3 * percentile(self._latencies, 0.99),
        }

    async def full(self, seconds: float) -> dict[str, Any]:
        async def play(index: int, deadline: float) -> int:
            count = 0
            while time.perf_counter() < deadline:
                await self.workers[index].play()
                count += 1
            return count

        took, cpu, count = await self.measured(seconds, play)
        return {
            "tickets/s": count / took,
            "CPU ms per ticket": 1e3 * cpu / count,
            "p50 ms": 1e3 * percentile(self._latencies, 0.5),
            "p99 ms": 1e3 * percentile(self._latencies, 0.99),
        }

    async def held(self, seconds: float, reporter: Worker) -> dict[str, Any]:
        while await self.workers[0].allocate(500):  # up to the bound
            pass
        reports = 0

        async def play(index: int, deadline: float) -> int:
            nonlocal reports
            if index:
                return len(await self.workers[index].allocate(1, wait_s=max(0.0, deadline - time.perf_counter())))
            while time.perf_counter() < deadline:
                await reporter.call("/trained", TrainedRequest(0, 0))
                reports += 1
                await asyncio.sleep(1 / PACE)
            return 0

        took, cpu, granted = await self.measured(seconds, play)
        assert granted == 0, granted
        return {"held core %": 100 * cpu / took, "reports/s": reports / took}


@contextlib.asynccontextmanager
async def connected(port: int, count: int, manager: int) -> AsyncIterator[tuple[Load, Worker]]:
    """Yield the workers of a load, and one more."""
    latencies: list[float] = []
    clients = [await Client.connect(port) for _ in range(count + 1)]
    made = [Worker(client, index, latencies) for index, client in enumerate(clients)]
    try:
        yield Load(made[:count], manager, latencies), made[count]
    finally:
        for client in clients:
            client.close()


async def drive(port: int, count: int, manager: int, seconds: float) -> dict[str, Any]:
    async with connected(port, count, manager) as (load, other):
        for _ in range(0, OPEN, 512):
            await other.allocate(512)
        await load.full(seconds / 4)  # warm
        row = await load.idle(seconds)
        row |= await load.paced(seconds)
        row |= await load.full(seconds)
        return row | await load.held(seconds, other)


def measure(count: int, seconds: float) -> dict[str, Any]:
    servers = count // 2
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        store = FileNameStore(folder / "name_store")
        port = stack.enter_context(running(serve_servers, servers))
        for index in range(servers):
            address = ServerAddress(f"generation_server/{index}", f"http://127.0.0.1:{port}/{index}", 1, "h", "1")
            store.add(NAMES.generation_server(index), msgspec.json.encode(address).decode())
        store.add(NAMES.model_version(), msgspec.json.encode(PublishedVersion(0, "m", "/v0", 0)).decode())
        store.close()
        batch = OPEN + 4 * count
        manager, address = stack.enter_context(running(serve_manager, folder, batch))  # type: ignore[misc]
        uvloop.run(joined(address, servers, 0))
        row = uvloop.run(drive(int(address.rpartition(":")[2]), count, manager, seconds))
    return {"workers": count, "servers": servers, **row}


def exponent(rows: Sequence[dict[str, Any]], column: str) -> float:
    """Return the slope between the first and the last row."""
    first, last = rows[0], rows[-1]
    return math.log(last[column] / first[column]) / math.log(last["workers"] / first["workers"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.manager_load", description="The manager at scale.")
    parser.add_argument("--workers", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--seconds", type=float, default=10.0, help="of one measurement")
    parser.add_argument("--name", default="manager_load", help="of the result")
    arguments = parser.parse_args()
    rows = [measure(count, arguments.seconds) for count in arguments.workers]
    meta = {**vars(arguments), "open": OPEN, "pace": PACE, "bound_s": BOUND_S}
    report(arguments.name, rows, {**meta, "exponent": round(exponent(rows, "CPU ms per ticket"), 2)})


if __name__ == "__main__":
    main()
