"""The manager as a long-lived process: admission, routing, ledger and weight updates over HTTP.

    name store (versions, servers, heartbeats, status) ──watch──> Manager ──> WeightUpdates ──> GenerationServers
    RolloutWorkers, MasterWorker, browser ──HTTP──> ManagerApp ──> ManagerService ──> ManagerState, Journal

The launcher may restart it at any time: it replays the ledger and reads the rest from the name store.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from realsys.cluster.aio import first_completed
from realsys.cluster.http_server import HttpServer
from realsys.cluster.lease import CheckAlive, unleased
from realsys.cluster.names.contract import Names, NameStore, Watch
from realsys.config.schema import Config
from realsys.errors import MALFORMED, GenerationError, KeyMissing
from realsys.generation.client import GenerationClient
from realsys.manager.commit_loop import ManagerService, wait_for
from realsys.manager.decisions import ManagerSettings, ManagerState
from realsys.manager.ledger.journal import Journal
from realsys.manager.operations import status
from realsys.manager.routes import NO_PAGES, ManagerApp, Pages
from realsys.manager.routing.lending import Shift
from realsys.manager.routing.placement import LOAD_PERIOD_S
from realsys.manager.routing.servers import Idle, Probe, Server, UpdateOrder
from realsys.observe.spans import span
from realsys.types import PublishedVersion, ServerAddress

log = logging.getLogger(__name__)

Tree = dict[str, str]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ManagerParts:
    """Collaborators of the manager. It calls ``register`` with its address once it accepts requests, and ``count`` with
    a function that returns the number of refused messages by cause. ``pages`` makes the routes of its status page from
    a function that returns the body of GET /status.
    """

    config: Config
    names: Names
    store: NameStore
    token: str
    ledger: Path
    split_sizes: dict[str, int]
    register: Callable[[str], None]
    check_alive: CheckAlive = unleased
    count: Callable[[Callable[[], Mapping[str, int]]], None] = lambda _: None
    pages: Callable[[Callable[[], Awaitable[dict[str, Any]]]], Pages] = lambda _: NO_PAGES


class Manager:
    """Startup, main loop, shutdown."""

    def __init__(self, parts: ManagerParts) -> None:
        self._parts = parts
        self._watches: list[Watch] = []
        self._unreadable: Counter[str] = Counter()

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop``. Raises the error that ends the process: an unwritable journal, a bug in a task."""
        config = self._parts.config
        settings = ManagerSettings.of(config, self._parts.split_sizes)
        with Journal(self._parts.ledger) as journal:
            state = ManagerState(settings)
            state.restore_from(journal.replay())
            if journal.records:
                log.info("ledger: %d records replayed, N=%d", journal.records, state.ledger.counted)
            above = int(config.manager.ledger_compact_mb * 2**20)
            self.service = ManagerService(state, journal, check_alive=self._parts.check_alive, compact_above=above)
            state.open(self.service.clock())
            self.service.commit()
            client = GenerationClient(
                config.manager.update_timeout_s, token=self._parts.token, check_alive=self._parts.check_alive
            )
            try:
                async with asyncio.TaskGroup() as updates:
                    self._updates = WeightUpdates(self.service, client, updates, config.manager.update_timeout_s)
                    await self._serve(stop)
                    self._updates.close()
            except BaseExceptionGroup as group:
                raise first_of(group) from None  # the report of the failure names one cause
            finally:
                await asyncio.to_thread(lambda: [watch.close() for watch in self._watches])
                await client.close()

    async def _serve(self, stop: asyncio.Event) -> None:
        """Serve HTTP, watch the name store and count the leases, until ``stop`` or a fatal error."""
        config, service = self._parts.config, self.service
        pages = self._parts.pages(self._status)
        app = ManagerApp(service, self._parts.token, self._refresh_version, self._parts.check_alive, pages).build()
        self._parts.count(lambda: app.refused + self._unreadable)
        server = HttpServer(app, config.cluster.host, config.manager.port)
        listening = asyncio.Event()
        http = asyncio.create_task(server.serve(listening.set), name="http")
        helpers: list[asyncio.Task[Any]] = [
            asyncio.create_task(stop.wait(), name="stop"),
            asyncio.create_task(self._start(listening, server.url), name="start"),
            asyncio.create_task(self._lease_clock(), name="leases"),
            asyncio.create_task(self._updates.poll_load(LOAD_PERIOD_S), name="loads"),
            asyncio.create_task(service.keep_compact(), name="compaction"),
        ]
        waiting: set[asyncio.Future[Any]] = {http, service.fatal, *helpers}
        try:
            while not stop.is_set():
                done = await first_completed(waiting)
                waiting -= done
                for task in done:
                    task.result()  # raises the error that ended it
        finally:
            service.close()
            server.stop()
            for task in helpers:
                task.cancel()
            await asyncio.gather(http, *helpers, return_exceptions=True)

    async def _status(self) -> dict[str, Any]:
        """Return the body of GET /status."""
        state = self.service.state
        return status(state, self.service.clock(), state.started)

    async def _start(self, listening: asyncio.Event, address: str) -> None:
        """Watch the name store; register once the manager accepts requests and knows servers and version."""
        await asyncio.to_thread(self._open_watches, asyncio.get_running_loop())
        await listening.wait()
        await asyncio.to_thread(self._parts.register, address)
        log.info("gserver_manager at %s", address)

    async def _lease_clock(self) -> None:
        """Reissue the tickets whose lease has lapsed. It polls, because silence is no event."""
        lease = self._parts.config.manager.rollout_lease_s
        while True:
            await asyncio.sleep(min(1.0, lease / 4))
            if lost := self.service.settle(self.service.state.expire(self.service.clock())):
                log.warning("lease of %g s lapsed, reissued: %s", lease, ", ".join(lost[:20]))

    # -- name store ---------------------------------------------------------------------------------------------------

    def _open_watches(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch the name store. Each callback runs in one of its threads and passes the tree to the loop."""
        names, store = self._parts.names, self._parts.store

        def forward(handle: Callable[[Tree], None]) -> Callable[[Tree], None]:
            def callback(tree: Tree) -> None:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(self._guarded, handle, tree)

            return callback

        self._watches.append(store.watch(names.model_version(), forward(self._on_version)))
        self._watches.append(store.watch(names.generation_servers, forward(self._on_servers)))
        self._watches.append(store.watch(names.heartbeats, forward(self._on_heartbeats)))
        self._watches.append(store.watch(names.status, forward(self._on_status)))

    def _guarded(self, handle: Callable[[Tree], None], tree: Tree) -> None:
        """An error in a handler must end the process, not vanish in the loop's exception handler."""
        if self.service.closing:
            return
        try:
            handle(tree)
        except Exception as error:
            log.exception("gserver_manager: a change in the name store could not be handled")
            if not self.service.fatal.done():
                self.service.fatal.set_exception(error)

    def _on_version(self, tree: Tree) -> None:
        for key, value in tree.items():
            published = self._decoded(key, value, PublishedVersion)
            if published is None:
                continue
            current = self.service.state.servers.published
            if self.service.settle(self.service.state.servers.publish(published)):
                log.info("version %d published: %s", published.version, published.locator)
            elif published != current:
                log.error("%s: version %d does not follow %s; ignored", key, published.version, current)

    def _on_servers(self, tree: Tree) -> None:
        addresses = (self._decoded(key, value, ServerAddress) for key, value in tree.items())
        self._updates.observe([address for address in addresses if address is not None])

    def _on_heartbeats(self, tree: Tree) -> None:
        start = len(self._parts.names.heartbeats) + 1
        heartbeats = {key[start:]: value for key, value in tree.items()}
        if lost := self.service.settle(self.service.state.observe_workers(heartbeats, self.service.clock())):
            log.warning("worker lost, reissued: %s", ", ".join(lost[:20]))

    def _on_status(self, tree: Tree) -> None:
        for key, value in tree.items():
            self.service.state.master = self._decoded(key, value, dict[str, object]) or {}
            self.service.settle(None)

    async def _refresh_version(self) -> None:
        """Read the published version, for a caller that published just before it called."""
        try:
            value = await asyncio.to_thread(self._parts.store.get, self._parts.names.model_version())
        except KeyMissing:
            return
        published = self._decoded(self._parts.names.model_version(), value, PublishedVersion)
        if published is not None:
            self.service.settle(self.service.state.servers.publish(published))

    def _decoded(self, key: str, value: str, kind: type[T]) -> T | None:
        """Return the decoded value of a key, None if it is malformed: its writer must not end the manager."""
        try:
            return decode_value(key, value, kind)
        except ValueError as error:
            self._unreadable["unreadable_value"] += 1
            log.error("name store: %s; ignored", error)
            return None


def decode_value(key: str, value: str, kind: type[T]) -> T:
    """Decode the ``value`` of ``key``. Raises ValueError."""
    try:
        return msgspec.json.decode(value, type=kind)
    except MALFORMED as error:
        raise ValueError(f"{key} must hold a {kind.__name__}, and holds {value[:80]!r}: {error}") from None


def first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error of a group, at any depth."""
    error = group.exceptions[0]
    return first_of(error) if isinstance(error, BaseExceptionGroup) else error


# ---- weight updates and probes: two tasks per server incarnation, so that a slow or dead server delays no other
#
# published / registered ──> next_order ──> probe or POST /update_weights_from_disk
#     ├── success ──> verified (routable)
#     └── failure, timeout ──> probed; back-off ──> next_order, with the version that is newest then
#
# suspected / quarantined ──> next_probe ──> GET /model_info
#     ├── reply ──> healthy
#     └── failure, timeout ──> quarantined ──> back-off ──> next_probe


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
            elif isinstance(order, Shift):
                await self._shift(order)
                self._service.settle(None)
            elif not state.begin_update(order, clock()):
                await wait_for(changed, None)  # draining: the end of every call fires the signal
            else:
                self._service.settle(None)  # another server may have to decide now
                with span("update", f"version/{order.target.version}", server=order.server):
                    await self._update(order)
                self._service.settle(None)

    async def _shift(self, order: Shift) -> None:
        """Make a lent server fall asleep or wake."""
        servers, server = self._service.state.servers, order.server
        try:
            if order.sleeps:
                with span("sleep", server=server):
                    await self._client.sleep(order.url)
            else:
                with span("wake", server=server):
                    await self._client.wake(order.url)
        except GenerationError as error:
            servers.unshifted(order, str(error), self._service.clock())
            log.warning("%s: did not %s: %s", server, "fall asleep" if order.sleeps else "wake", error)
        else:
            servers.shifted(order, self._service.clock())

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
                target = order.target
                result = await self._client.update_weights(
                    order.url, target.locator, target.version, self._timeout_s, order.sources, older=order.older
                )
                if not result.success:
                    raise GenerationError(f"{order.url}: did not load version {target.version}: {result.message}")
                timings = {**result.timings, **result.counts}
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
