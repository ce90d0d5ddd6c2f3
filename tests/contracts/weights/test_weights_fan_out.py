"""A version on its way to many hosts: the manager's decisions, real files and HTTP, a storage that serves one host."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from realsys.manager.ledger.staleness import StalenessBound
from realsys.manager.routing.servers import FanOut, Pace, ServerRegistry, UpdateOrder
from realsys.types import PublishedVersion, ServerAddress
from realsys.weights.disk.reader import VersionReader
from realsys.weights.host_reader import HostReader
from tests.support.streams.weight_hosts import WeightHosts
from tests.support.streams.weight_versions import DiskVersions

HOSTS, WAIT_S = 16, 120.0


class SlowStorage:
    """Storage that serves one reader. A second one gets nothing before ``free`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = threading.Event()
        self._first: VersionReader | None = None
        self._lock = threading.Lock()
        fetch = VersionReader._fetch

        def slow(reader: VersionReader, *piece: Any) -> None:
            with self._lock:
                self._first = self._first or reader
            assert self._first is reader or self.free.wait(WAIT_S)
            fetch(reader, *piece)

        monkeypatch.setattr(VersionReader, "_fetch", slow)


def begun(registry: ServerRegistry) -> Iterator[UpdateOrder]:
    """Yield the updates that begin now."""
    while registry.due:
        name = registry.due.pop()
        server, order = registry.get(name), registry.next_order(name, "1", 0.0)
        if isinstance(order, UpdateOrder) and server is not None and server.target is None:
            registry.started(order, 0.0)
            yield order


def test_storage_is_read_twice_for_many_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every host verifies the version; one read feeds all but the reader for which the storage had no time."""
    storage, versions = SlowStorage(monkeypatch), DiskVersions(tmp_path / "trial")
    path = versions.publish()
    with ExitStack() as stack:
        hosts = WeightHosts(tmp_path, stack, versions)
        readers: dict[str, HostReader] = {}
        addresses = []
        for number in range(HOSTS):
            name = f"{number:02d}"
            readers[name], http = hosts.host(name)
            addresses.append(ServerAddress(name, http.url, 1, name, "1", http.url))
        registry = ServerRegistry(StalenessBound(2, 1), Pace(), fan_out=FanOut(storage_readers=1))
        registry.observe(addresses)
        registry.publish(PublishedVersion(0, "0001", str(path), 0))
        pool, running = stack.enter_context(ThreadPoolExecutor(HOSTS)), dict[Future[tuple[int, int]], UpdateOrder]()
        counts: list[tuple[int, int]] = []
        while len(counts) < HOSTS:
            running |= {
                pool.submit(hosts.stage, readers[order.server], 0, *order.sources): order for order in begun(registry)
            }
            done, _ = wait(running, WAIT_S, FIRST_COMPLETED)
            assert done, "every wait ends"
            for future in done:
                counts.append(future.result())
                registry.succeeded(running.pop(future), 0.0, {})
            if len(counts) == HOSTS - 1:
                storage.free.set()
    assert sum(read for read, _ in counts) <= 2 * versions.size
    assert sum(read + fetched for read, fetched in counts) == HOSTS * versions.size
