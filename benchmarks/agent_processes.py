"""Start of an episode of a user's agent, by the place where it runs: ``python -m benchmarks.agent_processes``.

The agent imports the openai package and returns. Episodes run one after the other, or 8 at a time.

    inside       the event loop of the RolloutWorker
    fork         a process per episode, forked from one that has the imports (as built)
    interpreter  a new interpreter per episode, which imports the agent itself
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import resource
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from openai import AsyncOpenAI

from benchmarks._table import report
from realsys.config.schema_rollout import RolloutConfig
from realsys.rollout.agents.captured import AgentProcesses, Inside
from realsys.rollout.agents.contract import EpisodeTime

ROLLOUT = RolloutConfig(agent="benchmarks.agent_processes:run", agent_process="always")
Play = Callable[[], Awaitable[Any]]


async def run(data: dict[str, Any], base_url: str, api_key: str, http_client: Any) -> float:
    """Build a client, as an agent does before its first call."""
    AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
    return 1.0


@contextlib.asynccontextmanager
async def _runs(kind: str) -> AsyncIterator[Play]:
    runs = Inside(run, ROLLOUT) if kind == "inside" else AgentProcesses(ROLLOUT)

    async def play() -> None:
        if kind == "interpreter":
            own = AgentProcesses(ROLLOUT)
            try:
                await own({}, "http://127.0.0.1:1/v1", "key", EpisodeTime(60.0))
            finally:
                await own.close()
        else:
            await runs({}, "http://127.0.0.1:1/v1", "key", EpisodeTime(60.0))

    try:
        yield play
    finally:
        await runs.close()


async def _measure(kind: str, episodes: int, at_a_time: int) -> dict[str, Any]:
    async with _runs(kind) as play:
        await play()  # the imports of the first one
        seconds: list[float] = []
        places = asyncio.Semaphore(at_a_time)

        async def one() -> None:
            async with places:
                begin = time.perf_counter()
                await play()
                seconds.append(time.perf_counter() - begin)

        begin, cpu = time.perf_counter(), _cpu_s()
        await asyncio.gather(*(one() for _ in range(episodes)))
        wall, cpu = time.perf_counter() - begin, _cpu_s() - cpu
    return {
        "where": kind,
        "at a time": at_a_time,
        "episodes/s": episodes / wall,
        "median ms": 1000 * statistics.median(seconds),
        "CPU ms of the worker": 1000 * cpu / episodes,
    }


def _cpu_s() -> float:
    use = resource.getrusage(resource.RUSAGE_SELF)
    return use.ru_utime + use.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=64)
    given = parser.parse_args()
    rows = [
        asyncio.run(_measure(kind, given.episodes, at_a_time))
        for kind in ("inside", "fork", "interpreter")
        for at_a_time in (1, 8)
    ]
    report("agent_processes", rows, {"episodes": given.episodes, "imports": "openai"})


if __name__ == "__main__":
    main()
