"""Cost of the workers' heartbeats for the manager: ``python -m benchmarks.heartbeats``.

The real manager process watches the name store while other processes beat for 16 to 1,152 workers, as often as the
workers of a trial do (``cluster.heartbeat_s``). 10,240 tickets run. Measured: CPU time of the manager and of etcd, in
percent of a core, the CPU time of a beat in its worker, and the slowest beat. On a machine that cannot carry all beats
the columns of etcd are scaled to the full rate; ``beats/s`` is the rate that was reached. An exponent is the slope of
log CPU over log workers; that of etcd is taken beyond its CPU time without workers.

The name store is a real etcd, and for comparison the file store with the numbers of workers that it can carry.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import uvloop

from benchmarks._processes import helper_processes
from benchmarks._router import BOUND_S, NAMES, TOKEN, running
from benchmarks._table import report
from realsys.cluster.lease import Heartbeat, LeaseTerms
from realsys.cluster.names.contract import NameStore
from realsys.cluster.names.file_store import FileNameStore
from realsys.cluster.network import free_ports
from realsys.config.schema import AsyncConfig, Config, ManagerConfig
from realsys.config.schema_train import TrainConfig
from realsys.manager.messages import AllocateRequest
from realsys.manager.operations import ALLOCATE
from realsys.manager.process import Manager, ManagerParts
from realsys.types import PublishedVersion, ServerAddress
from realsys.workers.name_store import command

BEATERS, THREADS = 2, 16  # processes that beat for all workers, and threads of each
SETTLE_S = 3.0
TICKETS = 10_240


def open_store(place: str) -> NameStore:
    """Open the file store in the folder ``place``, or the etcd at that address."""
    if place.startswith("/"):
        return FileNameStore(Path(place))
    from realsys.cluster.names.etcd_store import EtcdNameStore

    return EtcdNameStore(place, call_timeout_s=10.0, retry_timeout_s=20.0)


def serve_manager(place: str, folder: Path, workers: int, port: Connection) -> None:
    """Run the manager with TICKETS running tickets, spread over ``workers``. Sends its process id."""
    config = Config(
        train=TrainConfig(batch_groups=TICKETS),
        asynchronous=AsyncConfig(max_staleness=1),
        manager=ManagerConfig(rollout_lease_s=1e6),
    )

    async def main() -> None:
        import asyncio

        loop = asyncio.get_running_loop()
        parts = ManagerParts(
            config, NAMES, open_store(place), TOKEN, folder / "ledger.jsonl", {"train": 1_000_000}, lambda _: started()
        )
        manager = Manager(parts)

        def started() -> None:
            loop.call_soon_threadsafe(lambda: loop.create_task(grant()))

        async def grant() -> None:
            service = manager.service
            # No server: its HTTP would be measured, too.
            service.state.observe_servers([ServerAddress("generation_server/0", "http://127.0.0.1:1", 1, "h", "1")])
            service.state.servers.publish(PublishedVersion(0, "m", "/v0", 0))
            [server] = service.state.servers.all()
            server.verified = service.state.servers.published
            for number in range(TICKETS):
                name = f"rollout_worker/{number % max(1, workers)}"
                incarnation = getattr(service.state.workers.get(name), "incarnation", "")
                await service.call(ALLOCATE, AllocateRequest(name, 1, incarnation=incarnation))
            running_tickets = len(list(service.state.ledger.running()))
            assert running_tickets == TICKETS, running_tickets
            port.send(os.getpid())

        await manager.run(asyncio.Event())

    uvloop.run(main())


def beat_for(place: str, indices: Sequence[int], period_s: float, pipe: Connection) -> None:
    """Beat for the workers ``indices``. To each message, reply with (beats, CPU seconds, slowest beat) so far."""
    store = open_store(place)
    terms = LeaseTerms(60.0, period_s)

    def start(index: int) -> Heartbeat:
        key = NAMES.heartbeat(f"rollout_worker/{index}")
        return Heartbeat(store, key, "rollout_worker", index, terms, lambda error: print(error, flush=True))

    with ThreadPoolExecutor(THREADS) as pool:
        hearts = list(pool.map(start, indices))
        pipe.send(len(hearts))
        measured: list[float] = []
        free = threading.Semaphore(THREADS)

        def beat(heart: Heartbeat) -> None:
            began = time.perf_counter()
            heart._beat()
            measured.append(time.perf_counter() - began)
            free.release()

        due = time.perf_counter()
        while True:
            for heart in hearts:
                due = max(due + period_s / len(hearts), time.perf_counter() - period_s)  # never catch up more than that
                free.acquire()
                if pipe.poll(max(0.0, due - time.perf_counter())):
                    pipe.recv()
                    pipe.send((len(measured), time.process_time(), max(measured, default=0.0)))
                    measured.clear()
                pool.submit(beat, heart)


def beating(place: str, workers: int, period_s: float) -> contextlib.AbstractContextManager[list[Connection]]:
    """Processes that beat for ``workers`` workers."""
    shares = [(place, range(first, workers, BEATERS), period_s) for first in range(BEATERS)]
    return helper_processes(beat_for, shares, BOUND_S)


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """Totals so far."""

    time: float
    manager: float
    etcd: float
    beats: int
    beaters: float
    slowest: float

    @classmethod
    def now(cls, manager: int, etcd: int | None, pipes: Sequence[Connection]) -> Self:
        for pipe in pipes:
            pipe.send("report")
        counts = []
        for pipe in pipes:
            assert pipe.poll(BOUND_S)
            counts.append(pipe.recv())
        beats, beaters = sum(count[0] for count in counts), sum(count[1] for count in counts)
        slowest = max((count[2] for count in counts), default=0.0)
        own = cpu_s(etcd) if etcd else 0.0
        return cls(time.perf_counter(), cpu_s(manager), own, beats, beaters, slowest)


def measure(place: str, workers: int, seconds: float, period_s: float, etcd: int | None = None) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        store = open_store(place)
        store.clear_subtree(NAMES.root)
        store.close()
        pipes = stack.enter_context(beating(place, workers, period_s)) if workers else []
        pid = stack.enter_context(running(serve_manager, place, folder, workers))
        threading.Event().wait(SETTLE_S)
        began = Usage.now(pid, etcd, pipes)
        threading.Event().wait(seconds)
        ended = Usage.now(pid, etcd, pipes)
    took_s = ended.time - began.time
    rate = ended.beats / took_s
    missed = workers / period_s / rate if workers else 1.0  # 1.0: every beat came in time
    row = {"workers": workers, "beats/s": rate, "manager core %": 100 * (ended.manager - began.manager) / took_s}
    if etcd:
        row["etcd core %"] = 100 * (ended.etcd - began.etcd) / took_s * missed
    beat_ms = 1e3 * (ended.beaters - began.beaters) / ended.beats if workers else 0.0
    return {**row, "beat CPU ms": beat_ms, "slowest beat ms": 1e3 * ended.slowest}


def exponent(rows: Sequence[dict[str, Any]], column: str, idle: float = 0.0) -> float | None:
    """Slope of log(CPU beyond ``idle``) over log(workers), by least squares; None if one slope does not follow."""
    points = [(math.log(row["workers"]), math.log(max(1e-3, row[column] - idle))) for row in rows if row["workers"]]
    if len({x for x, _ in points}) < 2:
        return None
    x, y = (sum(values) / len(points) for values in zip(*points, strict=True))
    return round(sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points), 2)


@contextlib.contextmanager
def own_etcd(folder: Path) -> Iterator[tuple[str, int]]:
    """Start an etcd; yield its address and process id."""
    client, peer = free_ports(2)
    with (folder / "etcd.log").open("wb") as log:
        argv = command(f"127.0.0.1:{client}", f"127.0.0.1:{peer}", folder / "data", "heartbeats")
        process = subprocess.Popen(argv, stdout=log, stderr=log)
        try:
            yield f"127.0.0.1:{client}", process.pid
        finally:
            process.terminate()
            process.wait(BOUND_S)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.heartbeats", description="Heartbeats of many workers.")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 16, 64, 256, 512, 1152])
    parser.add_argument("--file-workers", type=int, nargs="*", default=[32, 64, 128, 256])
    parser.add_argument("--seconds", type=float, default=20.0, help="of one measurement")
    parser.add_argument("--period-s", type=float, default=2.0, help="cluster.heartbeat_s")
    parser.add_argument("--name", default="heartbeats", help="of the result")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        with own_etcd(Path(folder)) as (address, pid):
            etcd = [measure(address, n, arguments.seconds, arguments.period_s, pid) for n in arguments.workers]
        rows += [{"name store": "etcd", **row} for row in etcd]
        for workers in arguments.file_workers:
            row = measure(f"{folder}/files", workers, arguments.seconds, arguments.period_s)
            rows.append({"name store": "file", **row})
    idle = min(row["etcd core %"] for row in etcd)
    exponents = {
        "exponent": exponent(etcd, "manager core %"),
        "etcd_exponent": exponent(etcd, "etcd core %", idle),
    }
    report(arguments.name, rows, {**vars(arguments), "tickets": TICKETS, **exponents})


if __name__ == "__main__":
    main()
