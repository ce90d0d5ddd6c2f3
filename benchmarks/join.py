"""Join of many workers: ``python -m benchmarks.join``.

16 to 512 workers join a running manager, all at the same moment: half are GenerationServers, half RolloutWorkers. Each
has its own connection to the name store. A worker joins as a real one does after its imports:

    name store ──> lease and heartbeat ──> server: register the address, be updated to the published version
                                       └─> RolloutWorker: wait for the manager's key, first call over HTTP

The end is the manager's status with all workers, and with all servers ready. The manager is the real process; the HTTP
of the servers is simulated in one process, the workers are threads of two. Measured: seconds, and CPU seconds of the
manager, of etcd and of the workers. An exponent is the slope of log CPU over log workers between the last two rows.
Imports and the start of processes are not in it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from benchmarks._processes import helper_processes
from benchmarks._router import BOUND_S, NAMES, TOKEN, SimulatedServers, running
from benchmarks._table import report
from benchmarks.heartbeats import cpu_s, open_store, own_etcd
from realsys.cluster.lease import Heartbeat, LeaseTerms
from realsys.config.schema import AsyncConfig, Config
from realsys.config.schema_train import TrainConfig
from realsys.manager.client import ManagerClient
from realsys.manager.messages import AllocateRequest
from realsys.manager.process import Manager, ManagerParts
from realsys.types import PublishedVersion, ServerAddress

PROCESSES, THREADS = 2, 32  # processes of all workers; threads of each process
STAGE_S = (0.1, 0.2)
JOIN_S = 120.0


def serve_manager(place: str, folder: Path, ready: Connection) -> None:
    """Run the manager. Sends its process id and address."""
    config = Config(train=TrainConfig(batch_groups=4096), asynchronous=AsyncConfig(max_staleness=1))
    store = open_store(place)

    def register(address: str) -> None:
        import os

        store.add(NAMES.gserver_manager, address, replace=True)
        ready.send((os.getpid(), address))

    parts = ManagerParts(config, NAMES, store, TOKEN, folder / "ledger.jsonl", {"train": 1_000_000}, register)
    uvloop.run(Manager(parts).run(asyncio.Event()))


def serve_servers(count: int, ready: Connection) -> None:
    """Serve the HTTP of all GenerationServers. Sends the port."""

    async def main() -> None:
        ready.send(await SimulatedServers(count, STAGE_S).start())
        await asyncio.Event().wait()

    uvloop.run(main())


def join(place: str, port: int, indices: Sequence[int], pipe: Connection) -> None:
    """Join as the workers ``indices`` after a message. Sends (CPU seconds, seconds of the slowest worker)."""
    stores, hearts = [], []

    def connect(kind: str, index: int) -> Any:
        store = open_store(place)
        terms = LeaseTerms(BOUND_S, BOUND_S)
        hearts.append(Heartbeat(store, NAMES.heartbeat(f"{kind}/{index}"), kind, index, terms, print))
        stores.append(store)
        return store

    def join_server(number: int) -> None:
        store = connect("generation_server", number)
        address = ServerAddress(f"generation_server/{number}", f"http://127.0.0.1:{port}/{number}", 1, "h", "1")
        store.add(NAMES.generation_server(number), msgspec.json.encode(address).decode(), lease=hearts[-1].lease)

    def find_manager(number: int) -> str:
        return connect("rollout_worker", number).wait(NAMES.gserver_manager, BOUND_S, "the manager")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(THREADS))
        times = []

        async def one(index: int) -> None:
            began = time.perf_counter()
            number, is_server = index // 2, index % 2 == 0
            if is_server:
                await loop.run_in_executor(None, join_server, number)
            else:
                address = await loop.run_in_executor(None, find_manager, number)
                client = ManagerClient(lambda: address, TOKEN)
                await client.allocate(AllocateRequest(f"rollout_worker/{number}", 1))
                await client.close()
            times.append(time.perf_counter() - began)

        before = time.process_time()
        await asyncio.gather(*(one(index) for index in indices))
        pipe.send((time.process_time() - before, max(times)))

    import realsys.cluster.names.etcd_store  # a worker imports it before it joins  # noqa: F401

    pipe.send("imported")
    pipe.recv()
    asyncio.run(main())
    pipe.recv()
    for store in stores:
        store.close()


def workers(place: str, port: int, count: int) -> contextlib.AbstractContextManager[list[Connection]]:
    """Processes of the workers, ready to join."""
    # Pairs, so that each process has as many servers as RolloutWorkers.
    shares = [[index for index in range(count) if index // 2 % PROCESSES == first] for first in range(PROCESSES)]
    return helper_processes(join, [(place, port, share) for share in shares], JOIN_S)


def _receive(pipe: Connection) -> Any:
    assert pipe.poll(JOIN_S), "the workers did not join"
    return pipe.recv()


async def joined(address: str, servers: int, heartbeats: int) -> None:
    """Return when the manager shows all heartbeats, and all servers with the published version."""
    client = ManagerClient(lambda: address, TOKEN)
    async with asyncio.timeout(JOIN_S):
        while True:
            status = await client.status()
            ready = sum(server["state"] == "ready" for server in status["servers"])
            if ready == servers and len(status["workers"]) == heartbeats:
                break
            await asyncio.sleep(0.1)
    await client.close()


def measure(place: str, count: int, etcd: int | None = None) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        store = open_store(place)
        store.clear_subtree(NAMES.root)
        published = PublishedVersion(0, "m", "/v0", 0)
        store.add(NAMES.model_version(), msgspec.json.encode(published).decode(), replace=True)
        store.close()
        port = stack.enter_context(running(serve_servers, count // 2))
        manager, address = stack.enter_context(running(serve_manager, place, folder))  # type: ignore[misc]
        pipes = stack.enter_context(workers(place, port, count))
        before = [cpu_s(pid) for pid in (manager, etcd) if pid]
        began = time.perf_counter()
        for pipe in pipes:
            pipe.send("join")
        asyncio.run(joined(address, count // 2, count))
        took = time.perf_counter() - began
        reports = [_receive(pipe) for pipe in pipes]
        used = [cpu_s(pid) - start for pid, start in zip([pid for pid in (manager, etcd) if pid], before, strict=True)]
    row = {"workers": count, "seconds": took, "slowest worker s": max(slowest for _, slowest in reports)}
    row["manager CPU s"] = used[0]
    if etcd:
        row["etcd CPU s"] = used[1]
    return {**row, "workers CPU s": sum(cpu for cpu, _ in reports)}


def exponent(rows: Sequence[dict[str, Any]], column: str) -> float:
    """Return the slope between the last two rows: with fewer workers, constant costs hide it."""
    first, last = rows[-2], rows[-1]
    return math.log(max(0.01, last[column]) / max(0.01, first[column])) / math.log(last["workers"] / first["workers"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.join", description="Join of many workers.")
    parser.add_argument("--workers", type=int, nargs="+", default=[16, 64, 256, 512])
    parser.add_argument("--file-workers", type=int, nargs="*", default=[16, 64], help="the file store is for up to 64")
    parser.add_argument("--name", default="join", help="of the result")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        with own_etcd(Path(folder)) as (address, pid):
            etcd = [measure(address, count, pid) for count in arguments.workers]
        files = [measure(f"{folder}/files", count) for count in arguments.file_workers]
    rows = [{"name store": "etcd", **row} for row in etcd] + [{"name store": "file", **row} for row in files]
    columns = {"manager_exponent": "manager CPU s", "etcd_exponent": "etcd CPU s", "workers_exponent": "workers CPU s"}
    exponents = {name: round(exponent(etcd, column), 2) for name, column in columns.items()}
    report(arguments.name, rows, {**vars(arguments), **exponents})


if __name__ == "__main__":
    main()
