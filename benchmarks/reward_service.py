"""Verdicts through reward services and in the process: ``python -m benchmarks.reward_service``.

One client gives groups of 16 completions to its own VerifierPool, or to services in other processes. Each of these has
one verifier process. The client keeps 32 groups waiting (``verdicts/s``), or one at a time (``alone``: the time from
the call to the last verdict of the group).

    in-process   a VerifierPool of the client
    N services   N processes with a pool each, over HTTP on loopback
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import uvloop

from benchmarks._table import report
from realsys.cluster.http_server import HttpServer
from realsys.reward.dispatch import DispatchBounds
from realsys.reward.open_verifiers import ServiceVerifiers
from realsys.reward.pool import ItemLimits, VerifierPool, Verifiers
from realsys.reward.reward_server import RewardServer
from realsys.reward.verifiers.contract import Item
from realsys.types import ServerAddress

GROUP, WAITING = 16, 32  # completions of a group, groups that wait
LIMITS = ItemLimits(10.0, 60.0)
#: name -> verifier, completion, reference
LOADS = {
    "exact, 200 B": ("exact", "x" * 198 + "#7", "7"),
    "exact, 128 KiB": ("exact", "x" * ((128 << 10) - 2) + "#7", "7"),
    "math, 200 B": ("math", "word " * 36 + r"\boxed{\frac{3}{4}}", "0.75"),
}


async def serve() -> None:
    """Run one service until stdin ends; its URL is the first line of stdout."""
    pool = VerifierPool(1, LIMITS, judgements=1)
    http = HttpServer(RewardServer(pool, 4096).app)
    task = asyncio.create_task(http.serve(lambda: print(http.url, flush=True)))
    await asyncio.to_thread(sys.stdin.read)
    http.stop()
    await task
    await pool.close()


@contextlib.asynccontextmanager
async def verifiers(services: int) -> AsyncIterator[Verifiers]:
    """Open a pool of the client (0), or a client of this number of services."""
    if not services:
        pool = VerifierPool(1, LIMITS)
        yield pool
        await pool.close()
        return
    argv = [sys.executable, "-m", "benchmarks.reward_service", "--serve"]
    pipe = asyncio.subprocess.PIPE
    children = [await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe) for _ in range(services)]
    registered = {}
    for index, child in enumerate(children):
        assert child.stdout is not None
        url = (await child.stdout.readline()).decode().strip()
        registered[str(index)] = msgspec.json.encode(ServerAddress(f"reward_service/{index}", url, 0, "", "")).decode()
    client = ServiceVerifiers(DispatchBounds(60.0, 600.0), None)
    client.registered(registered)
    try:
        yield client
    finally:
        await client.close()
        for child in children:
            assert child.stdin is not None
            child.stdin.close()
            await child.wait()


async def measure(made: Verifiers, load: str, seconds: float) -> dict[str, Any]:
    name, completion, answer = LOADS[load]

    async def group() -> float:
        began = time.perf_counter()
        await asyncio.gather(*(made.verify(name, Item("", completion, answer)) for _ in range(GROUP)))
        return time.perf_counter() - began

    async def work(until: float) -> int:
        groups = 0
        while time.perf_counter() < until:
            await group()
            groups += 1
        return groups

    await asyncio.gather(*(group() for _ in range(WAITING)))  # every process has loaded the verifier
    began, cpu = time.perf_counter(), time.process_time()
    groups = sum(await asyncio.gather(*(work(began + seconds) for _ in range(WAITING))))
    took, used = time.perf_counter() - began, time.process_time() - cpu
    verdicts = GROUP * groups
    alone = sorted([await group() for _ in range(100)])
    return {
        "load": load,
        "verdicts/s": verdicts / took,
        "client us per verdict": 1e6 * used / verdicts,
        "alone p50 ms": 1e3 * statistics.median(alone),
        "alone p99 ms": 1e3 * alone[98],
    }


async def run(services: int, seconds: float) -> list[dict[str, Any]]:
    async with verifiers(services) as made:
        where = f"{services} service{'s' * (services > 1)}" if services else "in-process"
        return [{"verifiers": where, **await measure(made, load, seconds)} for load in LOADS]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reward_service", description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="time of each row under load")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        uvloop.run(serve())
        return
    rows = [row for services in (0, 1, 2) for row in uvloop.run(run(services, arguments.seconds))]
    report("reward_service", rows, {"group": GROUP, "waiting groups": WAITING, "seconds": arguments.seconds})


if __name__ == "__main__":
    main()
