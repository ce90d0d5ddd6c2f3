"""Keeps one SGLang server running.

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
from realsys.cluster.network import free_ports, join_host_port
from realsys.errors import GenerationError
from realsys.generation.sglang.api import SglangApi, SglangPiece
from realsys.generation.sglang.process import LOOPBACK, Launch, SglangProcess, scratch_folder

log = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 120.0  # a first forward pass may compile
_CHECK_INTERVAL_S = 10.0
_CHECK_TIMEOUT_S = 30.0  # SGLang's own limit is 20 s


@dataclass(frozen=True, slots=True)
class Settings:
    """Bounds on SGLang and its calls.

    drain              an update waits for running answers
    load_timeout_s     bounds that wait, and the load of weights
    silence_timeout_s  SGLang that samples nothing for this time is taken for hung, and killed
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
    """Takes the news of the supervisor. ``held`` returns True while SGLang is paused or loads weights."""

    on_up: Callable[[SglangRun], None]
    on_down: Callable[[str], None]
    held: Callable[[], bool]


@dataclass(frozen=True, slots=True, eq=False)
class SglangRun:
    """One run of the server, once it serves. The folder ``scratch`` is removed when the run ends.

    ``reports`` is True if SGLang reports for every token which weights sampled it (0.5.18 and newer do; it is tried).
    """

    serial: int
    child: SglangProcess
    api: SglangApi
    scratch: Path
    reports: bool


class SglangSupervisor:
    """Starts, watches and restarts SGLang. Lives on one event loop."""

    def __init__(self, launch: Launch, settings: Settings, listener: RunListener) -> None:
        self._launch = launch
        self._settings = settings
        self._listener = listener
        self.proofs = 0  # times that SGLang was seen to sample, or to be paused

    async def keep(self) -> NoReturn:
        """Keep the server running. Raises GenerationError if that is impossible; cancel to stop."""
        backoff = Backoff(self._settings.max_restarts, self._settings.first_backoff_s)
        # SGLang closes a connection that was idle for 5 s by its own clock. On a loaded machine our clock may say less,
        # and a weight update that is lost costs a restart of SGLang. A connection on loopback costs 0.1 ms.
        async with HttpClient(reuse=False) as http:
            for serial in itertools.count():
                begin = time.monotonic()
                reason = await self._run(serial, http)
                delay = backoff.next_delay(time.monotonic() - begin)
                if delay is None:
                    problem = f"after {backoff.restarts} restarts in a row"
                    raise GenerationError(f"SGLang {reason}, {problem}")
                numbers = f"{backoff.restarts}/{backoff.max_restarts}"
                log.warning("SGLang %s; restart %s in %.1f s", reason, numbers, delay)
                await asyncio.sleep(delay)
        raise AssertionError("count() ended")

    async def _run(self, serial: int, http: HttpClient) -> str:
        """Run the server from start to end. Returns how it ended."""
        [port] = free_ports(1)
        url = f"http://{join_host_port(LOOPBACK, port)}"
        scratch = scratch_folder()
        launch = self._launch.sized()  # not in a thread: the loop has one, which may be reading weights for minutes
        child = SglangProcess(launch.command(port), launch.environment(), url, scratch)
        try:
            await child.wait_healthy(http, self._settings.start_timeout_s)
            api = SglangApi(http, url)
            reports = await _reports_versions(api)
            log.info("SGLang serves at %s, %s", url, "with versions per token" if reports else "one version per answer")
            self._listener.on_up(SglangRun(serial, child, api, scratch, reports))
            reason = "is being stopped"
            try:
                reason = await self._watch(child, http)
            finally:
                self._listener.on_down(f"SGLang {reason}")
        except GenerationError as error:
            following = self._launch.after_failure(str(error))
            if serial == 0 and following is None:
                raise
            self._launch = following or self._launch
            reason = f"did not start: {error}"
        finally:
            await child.stop()
        return f"{reason}; its last lines: {child.tail()}"

    async def _watch(self, child: SglangProcess, http: HttpClient) -> str:
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
            if held() or await child.samples(http, timeout_s) or held():
                heard = time.monotonic()
                self.proofs += 1
        if child.ended.done():
            return child.ended.result()
        return f"has sampled nothing for {limit:g} s (generation.sglang.silence_timeout_s) and is killed"


async def _reports_versions(api: SglangApi) -> bool:
    """Generate one token. Returns True if its version is in the reply."""
    piece = SglangPiece("probe", [0], {"max_new_tokens": 1, "temperature": 0.0})
    [reply] = await api.generate([piece], _PROBE_TIMEOUT_S)
    return reply.meta_info.weight_versions is not None
