"""Weight updates and probes: two tasks per server incarnation, so that a slow or dead server delays no other.

published / registered ──> next_order ──> probe or POST /update_weights_from_disk
    ├── success ──> verified (routable)
    └── failure, timeout ──> probed; back-off ──> next_order, with the version that is newest then

suspected / quarantined ──> next_probe ──> GET /model_info
    ├── reply ──> healthy
    └── failure, timeout ──> quarantined ──> back-off ──> next_probe
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Iterable

from realsys.errors import GenerationError
from realsys.generation.client import GenerationClient
from realsys.manager.commit_loop import ManagerService, wait_for
from realsys.manager.routing.servers import Idle, Probe, Server, UpdateOrder
from realsys.observe.spans import span
from realsys.types import ServerAddress

log = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 10.0
LOAD_TIMEOUT_S = 2.0
LOAD_KEYS = (
    "running",
    "queued",
    "kv_tokens",
    "kv_capacity",
    "generated_tokens",
    "busy_s",
    "retained_tokens",
    "prefilled_tokens",
    "reused_tokens",
    "evicted_tokens",
    "memory_bytes",
    "gpu_peak_bytes",
)


class WeightUpdates:
    """Owns the tasks of all servers in the group ``tasks``: an unexpected error in one ends the process."""

    def __init__(
        self, service: ManagerService, client: GenerationClient, tasks: asyncio.TaskGroup, timeout_s: float
    ) -> None:
        self._service = service
        self._client = client
        self._group = tasks
        self._timeout_s = timeout_s
        self._tasks: dict[tuple[str, str], list[asyncio.Task[None]]] = {}

    def observe(self, addresses: Iterable[ServerAddress]) -> None:
        """Take over the current list of servers: start the tasks of new incarnations, cancel those of lost servers."""
        self._service.state.observe_servers(addresses)
        present = {(s.name, s.address.incarnation) for s in self._service.state.servers.all()}
        for key in list(self._tasks.keys() - present):
            for task in self._tasks.pop(key):
                task.cancel()
        for name, incarnation in sorted(present - self._tasks.keys()):
            update = self._group.create_task(self._drive(name, incarnation), name=f"update {name}")
            watch = self._group.create_task(self._watch(name, incarnation), name=f"probe {name}")
            self._tasks[name, incarnation] = [update, watch]
        self._service.settle(None)

    async def poll_load(self, period_s: float) -> None:
        """Fetch every server's load for ever, for routing and /status; a server that does not reply shows none.

        The requests are spread over ``period_s``: all together would delay the schedule requests of the workers.
        """

        state = self._service.state

        async def ask(server: Server, delay: float) -> None:
            await asyncio.sleep(delay)
            asked = self._service.clock()
            try:
                info = await self._client.server_info(server.address.url, LOAD_TIMEOUT_S)
            except GenerationError as error:
                server.load = {}
                log.debug("%s: no load: %s", server.name, error)
            else:
                server.load = {key: getattr(info, key) for key in LOAD_KEYS}
                if state.servers.get(server.name) is server:  # not lost since
                    state.reservations.report(server.name, info.running + info.queued, info.kv_tokens, asked)

        while True:
            servers = state.servers.all()
            asks = [ask(server, period_s * number / len(servers)) for number, server in enumerate(servers)]
            await asyncio.gather(asyncio.sleep(period_s), *asks)

    def close(self) -> None:
        for task in [task for tasks in self._tasks.values() for task in tasks]:
            task.cancel()
        self._tasks.clear()

    async def _drive(self, name: str, incarnation: str) -> None:
        state, clock = self._service.state, self._service.clock
        while True:
            changed = self._service.server(name).ticket()
            order = state.next_order(name, incarnation, clock())
            if order is None:
                return
            if state.outbox or (isinstance(order, Idle) and state.servers.due):
                self._service.settle(None)  # an evaluation keeps servers now, or has lost its version
            if isinstance(order, Idle):
                await wait_for(changed, None if order.until is None else max(0.0, order.until - clock()))
            elif not state.begin_update(order, clock()):
                await wait_for(changed, None)  # draining: the end of every call fires the signal
            else:
                self._service.settle(None)  # another server may have to decide now
                with span("update", f"version/{order.target.version}", server=order.server):
                    await self._update(order)
                self._service.settle(None)

    async def _watch(self, name: str, incarnation: str) -> None:
        """Probe the server whenever it is suspected or quarantined."""
        servers, clock = self._service.state.servers, self._service.clock
        while True:
            changed = self._service.server(name).ticket()
            probe = servers.next_probe(name, incarnation, clock())
            if probe is None:
                return
            if isinstance(probe, Idle):
                await wait_for(changed, None if probe.until is None else max(0.0, probe.until - clock()))
            else:
                await self._probe(probe)
                self._service.settle(None)

    async def _probe(self, probe: Probe) -> None:
        servers, clock = self._service.state.servers, self._service.clock
        try:
            info = await self._client.model_info(probe.url, min(PROBE_TIMEOUT_S, self._timeout_s))
        except GenerationError as error:
            if servers.silent(probe, str(error), clock()):
                log.warning("%s: quarantined, it does not answer: %s", probe.server, error)
            return
        suspects = servers.answered(probe, info.weight_version, info.model_path, clock())
        log.info("%s: answers, and serves version %s", probe.server, info.weight_version)
        for worker in suspects:
            log.warning("%s reported several servers that answer: its reports are ignored for a while", worker)

    async def _update(self, order: UpdateOrder) -> None:
        servers = self._service.state.servers
        begin = time.perf_counter()
        timings: dict[str, float] | None = None
        try:
            # After a restart of the manager the servers may have the newest weights, or those that they kept.
            served = await self._served(order) if order.probe else None
            if served is None:
                timings = await self._load(order)
                served = await self._served(dataclasses.replace(order, kept=()))
                if served is None:
                    raise GenerationError(f"{order.url}: took version {order.target.version}, but does not report it")
        except GenerationError as error:
            servers.failed(order, str(error), self._service.clock())
            log.warning("%s: version %d failed: %s", order.server, order.target.version, error)
        else:
            seconds = time.perf_counter() - begin
            servers.succeeded(served, seconds, timings)
            log.info("%s: serves version %d after %.3f s", order.server, served.target.version, seconds)

    async def _served(self, order: UpdateOrder) -> UpdateOrder | None:
        """Return the order of the version that the server reports; None if it is none that it should have.

        The reply to an update is not enough to route to the server. Version and locator must agree, because another
        trainer may have published another version of that number.
        """
        info = await self._client.model_info(order.url, min(PROBE_TIMEOUT_S, self._timeout_s))
        return order.served(info.weight_version, info.model_path)

    async def _load(self, order: UpdateOrder) -> dict[str, float]:
        target = order.target
        result = await self._client.update_weights(
            order.url, target.locator, target.version, self._timeout_s, order.sources
        )
        if not result.success:
            raise GenerationError(f"{order.url}: did not load version {target.version}: {result.message}")
        return {**result.timings, **result.counts}
