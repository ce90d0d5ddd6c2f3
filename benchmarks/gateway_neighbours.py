"""100 agents of one gateway, one of which misbehaves: ``python -m benchmarks.gateway_neighbours``.

The others make short calls with pauses between them. In turn the hundredth makes none (the base), ordinary calls
without a pause, or garbage of one kind, as fast as it can, from a process of its own. "p99 of base" is the median of
the paired ratios of the others' 99th percentiles. Engine and server process are those of ``benchmarks.gateway``. The
server has a core of its own; of the other one, the agent that misbehaves gets what the others leave.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import uvloop

from benchmarks._table import report
from benchmarks.gateway import Connection, make_model
from tests.support.gateway.garbage import CALL, KINDS, misbehave

AGENTS = 100
PAUSE_S = 0.5  # mean pause of an agent between two calls


async def others(urls: list[str], calls: int) -> list[float]:
    """Return the seconds of each call of the other agents, ``calls`` of each. Raises RuntimeError if one fails."""
    seconds: list[float] = []
    pauses = random.Random(0)

    async def one(url: str) -> None:
        connection = await Connection.open(url)
        for _ in range(calls):
            await asyncio.sleep(pauses.uniform(0, 2 * PAUSE_S))
            begin = time.perf_counter()
            await connection.post(f"{urlsplit(url).path}/chat/completions", CALL)
            seconds.append(time.perf_counter() - begin)
        connection.close()

    await asyncio.gather(*(one(url) for url in urls))
    return seconds


@contextmanager
def served(model: Path, cores: list[int]) -> Iterator[list[str]]:
    """Serve the episodes of the agents, new ones: those of a worker end, too, and make room. Yields their addresses."""
    command = [sys.executable, "-m", "benchmarks.gateway", "--serve", str(model), "--episodes", str(AGENTS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None and server.stdout is not None
        os.sched_setaffinity(server.pid, cores[:1])
        yield json.loads(server.stdout.readline())
        server.stdin.close()


def measure(urls: list[str], kind: str, calls: int) -> dict[str, float]:
    """Return the percentiles of the others' calls, milliseconds, while the last agent does ``kind``."""
    command = [sys.executable, "-m", "benchmarks.gateway_neighbours", "--misbehave", kind, urls[-1]]
    hostile = subprocess.Popen(command) if kind != "none" else None
    try:
        time.sleep(1.0)  # its imports
        seconds = uvloop.run(others(urls[:-1], calls))
    finally:
        if hostile is not None:
            hostile.kill()
            hostile.wait()
    cuts = statistics.quantiles(seconds, n=100)
    return {"p50": 1e3 * cuts[49], "p99": 1e3 * cuts[98]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--misbehave", nargs=2, metavar=("KIND", "URL"), help="run as the agent that misbehaves")
    parser.add_argument("--calls", type=int, default=10, help="of each agent and kind")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.misbehave:
        kind, url = arguments.misbehave
        os.nice(19)
        uvloop.run(misbehave(KINDS[kind], url))
        return
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in ("none", *KINDS)}
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), 4096)
        os.sched_setaffinity(0, cores[1:] or cores)
        for _ in range(arguments.repeats):
            for kind, made in found.items():
                with served(model, cores) as urls:
                    made.append(measure(urls, kind, arguments.calls))
    base = [each["p99"] for each in found["none"]]
    rows = [
        {
            "kind": kind,
            "p50_ms": round(statistics.median(each["p50"] for each in made), 2),
            "p99_ms": round(statistics.median(each["p99"] for each in made), 2),
            "p99 of base": round(statistics.median(e["p99"] / b for e, b in zip(made, base, strict=True)), 2),
        }
        for kind, made in found.items()
    ]
    report("gateway_neighbours", rows, {"agents": AGENTS, "calls": arguments.calls, "repeats": arguments.repeats})


if __name__ == "__main__":
    main()
