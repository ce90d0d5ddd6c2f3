"""Weight updates: one task per server incarnation, so that a slow or dead server delays no other (``fenced-weights``).

published / registered / quarantined ──> next_order ──> probe or POST /update_weights_from_disk
    ├── success ──> verified (routable)
    └── failure, timeout ──> quarantined ──> back-off ──> next_order, with the version that is newest then
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

from realsys.errors import GenerationError
from realsys.generation.client import GenerationClient
from realsys.manager.routing.servers import Idle, Server, UpdateOrder
from realsys.manager.service import ManagerService, wait_for
from realsys.types import ServerAddress

log = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 10.0
LOAD_TIMEOUT_S = 2.0
LOAD_KEYS = ("running", "queued", "kv_tokens", "kv_capacity", "generated_tokens", "busy_s")


class WeightUpdates:
    """Owns the update tasks in the group ``tasks``: an unexpected error in one ends the process."""

    def __init__(
        self, service: ManagerService, client: GenerationClient, tasks: asyncio.TaskGroup, timeout_s: float
    ) -> None:
        self._service = service
        self._client = client
        self._group = tasks
        self._timeout_s = timeout_s
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}

    def observe(self, addresses: Iterable[ServerAddress]) -> None:
        """Take over the current list of servers: start a task per new incarnation, cancel those of lost servers."""
        self._service.state.observe_servers(addresses)
        present = {(s.name, s.address.incarnation) for s in self._service.state.servers.all()}
        for key in list(self._tasks.keys() - present):
            self._tasks.pop(key).cancel()
        for name, incarnation in sorted(present - self._tasks.keys()):
            task = self._group.create_task(self._drive(name, incarnation), name=f"update {name}")
            self._tasks[name, incarnation] = task
        self._service.changed.fire()

    async def poll_load(self, period_s: float) -> None:
        """Fetch every server's load for ever, for /status only; a server that does not reply shows none.

        The requests are spread over ``period_s``: all together would delay the schedule requests of the workers.
        """

        async def ask(server: Server, delay: float) -> None:
            await asyncio.sleep(delay)
            try:
                info = await self._client.server_info(server.address.url, LOAD_TIMEOUT_S)
            except GenerationError as error:
                server.load = {}
                log.debug("%s: no load: %s", server.name, error)
            else:
                server.load = {key: getattr(info, key) for key in LOAD_KEYS}

        while True:
            servers = self._service.state.servers.all()
            asks = [ask(server, period_s * number / len(servers)) for number, server in enumerate(servers)]
            await asyncio.gather(asyncio.sleep(period_s), *asks)

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()

    async def _drive(self, name: str, incarnation: str) -> None:
        state, clock = self._service.state, self._service.clock
        while True:
            changed = self._service.changed.ticket()
            order = state.servers.next_order(name, incarnation, clock())
            if order is None:
                return
            if isinstance(order, Idle):
                await wait_for(changed, None if order.until is None else max(0.0, order.until - clock()))
            elif not state.begin_update(order, clock()):
                await wait_for(changed, None)  # draining: every finished rollout fires the signal
            else:
                await self._update(order)
                self._service.changed.fire()

    async def _update(self, order: UpdateOrder) -> None:
        servers = self._service.state.servers
        begin = time.perf_counter()
        timings: dict[str, float] | None = None
        try:
            # After a restart of the manager the servers may have the newest weights.
            if not (order.probe and await self._serves(order)):
                timings = await self._load(order)
                if not await self._serves(order):
                    raise GenerationError(f"{order.url}: took version {order.target.version}, but does not report it")
        except GenerationError as error:
            servers.failed(order, str(error), self._service.clock())
            log.warning("%s: version %d failed, quarantined: %s", order.server, order.target.version, error)
        else:
            seconds = time.perf_counter() - begin
            servers.succeeded(order, seconds, timings)
            log.info("%s: serves version %d after %.3f s", order.server, order.target.version, seconds)

    async def _serves(self, order: UpdateOrder) -> bool:
        """Return True if the server reports the target: the reply to its update is not enough to route to it.

        Version and locator must agree, because another trainer may have published another version of that number.
        """
        info = await self._client.model_info(order.url, min(PROBE_TIMEOUT_S, self._timeout_s))
        return info.weight_version == str(order.target.version) and info.model_path == order.target.locator

    async def _load(self, order: UpdateOrder) -> dict[str, float]:
        target = order.target
        result = await self._client.update_weights(order.url, target.locator, target.version, self._timeout_s)
        if not result.success:
            raise GenerationError(f"{order.url}: did not load version {target.version}: {result.message}")
        return {**result.timings, **result.counts}
