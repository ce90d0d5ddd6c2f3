"""Keeps one engine running.

    start ──> serving ──ended, or samples nothing──> back-off ──> start ...    at most ``max_restarts`` times in a row
      └── if the very first start fails, the supervisor gives up: the next start would fail too, unless a GPU that it
      shares had too little memory (Launch.after_failure)

consumes    the exit of the process, and its replies to the probe that it samples
produces    on_up(run) when a run serves, on_down(reason) when it no longer does; GenerationError when it gives up
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from realsys.cluster.children.child_process import Backoff
from realsys.cluster.http_client import HttpClient
from realsys.errors import GenerationError
from realsys.generation.child.contract import EngineApi, EngineLaunch
from realsys.generation.child.process import EngineProcess

log = logging.getLogger(__name__)

_CHECK_INTERVAL_S = 10.0
_CHECK_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Bounds on the engine and its calls.

    drain              an update waits for running answers
    load_timeout_s     bounds that wait, and the load of weights
    silence_timeout_s  an engine that samples nothing for this time is taken for hung, and killed
    keep_keys          cached keys outlive a load of weights (asynchronous.kv_on_update)
    reuse_versions     bound on the age of keys of earlier requests (asynchronous.kv_reuse_versions)
    """

    start_timeout_s: float
    max_restarts: int
    load_timeout_s: float
    silence_timeout_s: float
    drain: bool = False
    keep_keys: bool = False
    reuse_versions: int = 0
    first_backoff_s: float = 1.0


@dataclass(frozen=True, slots=True)
class RunListener:
    """Takes the news of the supervisor. ``held`` returns True while the engine is paused or loads weights."""

    on_up: Callable[[EngineRun], None]
    on_down: Callable[[str], None]
    held: Callable[[], bool]


@dataclass(frozen=True, slots=True, eq=False)
class EngineRun:
    """One run of the server, once it serves. The folder ``scratch`` is removed when the run ends.

    ``reports`` is True if the engine reports for every token which weights sampled it.
    """

    serial: int
    child: EngineProcess
    api: EngineApi
    scratch: Path
    reports: bool


class EngineSupervisor:
    """Starts, watches and restarts the engine. Lives on one event loop."""

    def __init__(self, launch: EngineLaunch, settings: Settings, listener: RunListener) -> None:
        self._launch = launch
        self._name = launch.api.name
        self._settings = settings
        self._listener = listener
        self.proofs = 0  # times that the engine was seen to sample, or to be paused

    async def keep(self) -> NoReturn:
        """Keep the server running. Raises GenerationError if that is impossible; cancel to stop."""
        backoff = Backoff(self._settings.max_restarts, self._settings.first_backoff_s)
        # An engine closes a connection that was idle for 5 s by its own clock. On a loaded machine our clock may say
        # less, and a weight update that is lost costs a restart. A connection on loopback costs 0.1 ms.
        async with HttpClient(reuse=False) as http:
            for serial in itertools.count():
                begin = time.monotonic()
                reason = await self._run(serial, http)
                delay = backoff.next_delay(time.monotonic() - begin)
                if delay is None:
                    problem = f"after {backoff.restarts} restarts in a row"
                    raise GenerationError(f"{self._name} {reason}, {problem}")
                numbers = f"{backoff.restarts}/{backoff.max_restarts}"
                log.warning("%s %s; restart %s in %.1f s", self._name, reason, numbers, delay)
                await asyncio.sleep(delay)
        raise AssertionError("count() ended")

    async def _run(self, serial: int, http: HttpClient) -> str:
        """Run the server from start to end. Returns how it ended."""
        # ``sized`` is not called in a thread: the loop has one, which may be reading weights for minutes.
        child = EngineProcess(self._launch.sized())
        try:
            await child.wait_healthy(http, self._settings.start_timeout_s)
            api = self._launch.api(http, child.url)
            reports = await api.prepare()
            how = "with versions per token" if reports else "one version per piece"
            log.info("%s serves at %s, %s", self._name, child.url, how)
            self._listener.on_up(EngineRun(serial, child, api, child.scratch, reports))
            reason = "is being stopped"
            try:
                reason = await self._watch(child, api)
            finally:
                self._listener.on_down(f"{self._name} {reason}")
        except GenerationError as error:
            following = self._launch.after_failure(str(error))
            if serial == 0 and following is None:
                raise
            self._launch = following or self._launch
            reason = f"did not start: {error}"
        finally:
            await child.stop()
        return f"{reason}; its last lines: {child.tail()}"

    async def _watch(self, child: EngineProcess, api: EngineApi) -> str:
        """Wait until the process exits, or is alive and samples nothing. Returns which of the two, in words."""
        limit = self._settings.silence_timeout_s
        interval = min(_CHECK_INTERVAL_S, limit / 4)
        timeout_s = min(_CHECK_TIMEOUT_S, limit)
        held = self._listener.held
        heard = time.monotonic()
        while time.monotonic() - heard < limit:
            if (await asyncio.wait({child.ended}, timeout=interval))[0]:
                return child.ended.result()
            # ``held`` before and after: a pause that begins or ends during the probe explains its silence.
            if held() or await api.samples(timeout_s) or held():
                heard = time.monotonic()
                self.proofs += 1
        if child.ended.done():
            return child.ended.result()
        return f"has sampled nothing for {limit:g} s ({self._launch.api.field}.silence_timeout_s) and is killed"
