"""Keeps one SGLang server running.

    start ──> serving ──ended, or samples nothing──> back-off ──> start ...    at most ``max_restarts`` times in a row
      └── the very first start fails: that is the end, for the next would fail too

consumes    the exit of the child, and its answers to the question whether it samples
produces    on_up(run) when a run serves, on_down(reason) when it no longer does; GenerationError when it gives up
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import aiohttp

from realsys.cluster.http.http_client import open_session
from realsys.cluster.network import free_ports, join_host_port
from realsys.errors import GenerationError
from realsys.generation.sglang.api import Piece, SglangApi
from realsys.generation.sglang.arguments import LOOPBACK, Launch
from realsys.generation.sglang.child import Child

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
_LONGEST_BACKOFF_S = 30.0
_HEALTHY_AFTER_S = 300.0  # a run that lasted this long makes up for the failures before it
_REUSE_WITHIN_S = 2.0  # SGLang closes a connection that was idle for 5 s: a request on it then would be lost
_PROBE_TIMEOUT_S = 120.0  # a first forward pass may compile
_CHECK_INTERVAL_S = 10.0
_CHECK_TIMEOUT_S = 30.0  # SGLang's own limit is 20 s


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One run of the server, from when it serves. ``scratch``: a folder that is gone with it.

    ``reports``: it tells for every token which weights sampled it (SGLang from 0.5.18 or so; tried, not assumed).
    """

    serial: int
    child: Child
    api: SglangApi
    scratch: Path
    reports: bool


class Keeper:
    """Starts, watches and restarts. Lives on one event loop."""

    def __init__(
        self,
        launch: Launch,
        *,
        start_timeout_s: float,
        max_restarts: int,
        silence_timeout_s: float,
        on_up: Callable[[Run], None],
        on_down: Callable[[str], None],
        held: Callable[[], bool],
        first_backoff_s: float = 1.0,
    ) -> None:
        """``held``: whether SGLang is meant to sample nothing now, in a pause or a load of weights."""
        self._launch, self._start_timeout_s, self._max_restarts = launch, start_timeout_s, max_restarts
        self._silence_timeout_s, self._held = silence_timeout_s, held
        self._on_up, self._on_down, self._first_backoff_s = on_up, on_down, first_backoff_s

    async def keep(self) -> NoReturn:
        """Run the server for ever. Raises GenerationError when that cannot be done; cancel to stop."""
        failures = 0
        async with open_session({}, keepalive_timeout=_REUSE_WITHIN_S) as session:
            for serial in itertools.count():
                begin = time.monotonic()
                reason = await self._run(serial, session)
                failures = 1 if time.monotonic() - begin > _HEALTHY_AFTER_S else failures + 1
                if failures > self._max_restarts:
                    problem = f"after {self._max_restarts} restarts in a row (generation.sglang.max_restarts)"
                    raise GenerationError(f"SGLang {reason}, {problem}")
                delay = min(_LONGEST_BACKOFF_S, self._first_backoff_s * 2 ** (failures - 1))
                log.warning("SGLang %s; restart %d/%d in %.1f s", reason, failures, self._max_restarts, delay)
                await asyncio.sleep(delay)
        raise AssertionError("count() ended")

    async def _run(self, serial: int, session: aiohttp.ClientSession) -> str:
        """One run from start to end; how it ended."""
        [port] = free_ports(1)
        url = f"http://{join_host_port(LOOPBACK, port)}"
        scratch = _scratch()
        child = await Child.start(self._launch.command(port), self._launch.environment(), url, scratch)
        try:
            await child.healthy(session, self._start_timeout_s)
            api = SglangApi(session, url)
            reports = await _reports_versions(api)
            log.info("SGLang serves at %s, %s", url, "with versions per token" if reports else "one version per answer")
            self._on_up(Run(serial, child, api, scratch, reports))
            reason = "is being stopped"
            try:
                reason = await self._watch(child, session)
            finally:
                self._on_down(f"SGLang {reason}")
        except GenerationError as error:
            if serial == 0:
                raise
            reason = f"did not start: {error}"
        finally:
            await child.stop()
        return f"{reason}; its last lines: {child.tail()}"

    async def _watch(self, child: Child, session: aiohttp.ClientSession) -> str:
        """Return when it has ended, or is alive and does nothing; which of them."""
        limit = self._silence_timeout_s
        interval, timeout_s = min(_CHECK_INTERVAL_S, limit / 4), min(_CHECK_TIMEOUT_S, limit)
        heard = time.monotonic()
        while time.monotonic() - heard < limit:
            if (await asyncio.wait({child.ended}, timeout=interval))[0]:
                return child.ended.result()
            if self._held() or await child.samples(session, timeout_s) or self._held():
                heard = time.monotonic()
        if child.ended.done():
            return child.ended.result()
        return f"has sampled nothing for {limit:g} s (generation.sglang.silence_timeout_s) and is killed"


def _scratch() -> Path:
    """A new folder in memory-backed storage where there is one."""
    base = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    return Path(tempfile.mkdtemp(prefix="realsys-sglang-", dir=base))


async def _reports_versions(api: SglangApi) -> bool:
    """Generate one token, and see what comes with it."""
    piece = Piece("probe", [0], {"max_new_tokens": 1, "temperature": 0.0})
    [reply] = await api.generate([piece], _PROBE_TIMEOUT_S)
    return reply.meta_info.weight_versions is not None
