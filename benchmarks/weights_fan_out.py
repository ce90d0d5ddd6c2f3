"""The way of a version to many hosts: from shared storage alone, and from hosts that have it.

clock   the manager's decisions on a virtual clock. Storage and each host's outgoing link are throttled; readers of
        the storage share it. A host that has staged swaps for ``--swap`` seconds; only then the manager knows
bytes   the same decisions over real files and HTTP: each host has its memory, reader and service of copies, in
        threads of this process. Size and rates are scaled down together, so a copy takes as long as on the clock.
        Every host has the version before, whose memory it uses again, as in training; nothing is swapped.
        ``cpu_s``: CPU time of all hosts together. If it comes near to cores x seconds, the machine is the limit, not
        the storage and the links: take fewer bytes

python -m benchmarks.weights_fan_out [--hosts 64] [--gigabytes 1.0] [--rate 1.0] [--real-megabytes 16]
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import os
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from benchmarks._table import report
from realsys.cluster.http_server import HttpServer
from realsys.manager.ledger.staleness import StalenessBound
from realsys.manager.routing.servers import FanOut, Pace, ServerRegistry, UpdateOrder
from realsys.types import PublishedVersion, ServerAddress
from realsys.weights.disk import manifest
from realsys.weights.disk.manifest import StoredPiece
from realsys.weights.disk.reader import VersionReader
from realsys.weights.disk.writer import ShardWriter
from realsys.weights.host_copies import SharedCopies
from realsys.weights.host_places import SHARED_MEMORY
from realsys.weights.host_reader import HostReader, copy_app

TOKEN = "benchmark"


class Decisions:
    """The manager's registry of servers, one per host."""

    def __init__(self, urls: list[str], published: PublishedVersion, storage_readers: int) -> None:
        self._registry = ServerRegistry(StalenessBound(2, 1), Pace(), fan_out=FanOut(storage_readers))
        addresses = [ServerAddress(f"s/{i:04d}", url, 1, f"h{i}", "1", url) for i, url in enumerate(urls)]
        self._registry.observe(addresses)
        self._registry.publish(published)

    def begin(self, now: float) -> list[UpdateOrder]:
        """Return the updates that begin now."""
        orders = []
        while self._registry.due:
            name = min(self._registry.due)
            self._registry.due.remove(name)
            server = self._registry.get(name)
            order = self._registry.next_order(name, "1", now)
            if isinstance(order, UpdateOrder) and server is not None and server.target is None:
                self._registry.started(order, now)
                orders.append(order)
        return orders

    def end(self, order: UpdateOrder) -> None:
        self._registry.succeeded(order, 0.0, {})


# ---- virtual clock


def on_clock(hosts: int, size: float, rate: float, swap: float, readers: int) -> dict[str, Any]:
    """Return when each host had the version, in seconds. Links and storage have ``rate``."""
    urls = [f"http://h{i}" for i in range(hosts)]
    decisions = Decisions(urls, PublishedVersion(1, "t", "/v1", 1), readers)
    left: dict[str, float] = {}  # server that reads storage -> bytes left
    orders: dict[str, UpdateOrder] = {}
    ends: list[tuple[float, int, str, bool]] = []  # time, number, server, swapped
    numbers, now, from_storage, staged = itertools.count(), 0.0, 0, list[float]()

    def begin() -> None:
        nonlocal from_storage
        for order in decisions.begin(now):
            orders[order.server] = order
            if order.sources:
                heapq.heappush(ends, (now + size / rate, next(numbers), order.server, False))
            else:
                left[order.server] = size
                from_storage += 1

    begin()
    while left or ends:
        share = rate / len(left) if left else 0.0
        first = min(left, key=lambda name: left[name]) if left else ""
        storage_at = now + left[first] / share if left else float("inf")
        at = min(storage_at, ends[0][0] if ends else float("inf"))
        for name in left:
            left[name] -= share * (at - now)
        now = at
        if storage_at <= at:
            del left[first]
            heapq.heappush(ends, (now, next(numbers), first, False))
            continue
        _, _, name, swapped = heapq.heappop(ends)
        if swapped:
            decisions.end(orders[name])
            begin()
        else:
            staged.append(now)
            heapq.heappush(ends, (now + swap, next(numbers), name, True))
    assert len(staged) == hosts
    return {"seconds": max(staged), "from storage": from_storage}


# ---- real bytes


class Bucket:
    """Bytes per second that all callers share."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free_at = 0.0

    def delay(self, size: int) -> float:
        """Return how many seconds the caller must wait before it has moved ``size`` bytes."""
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + size / self._rate
            return self._free_at - now


def throttled(app: ASGIApp, link: Bucket) -> ASGIApp:
    """Bound the outgoing bytes of a service."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        async def slow(message: Message) -> None:
            if body := message.get("body"):
                await asyncio.sleep(link.delay(len(body)))
            await send(message)

        await app(scope, receive, slow)

    return call


def write_version(root: Path, megabytes: float, version: int = 1) -> Path:
    model = root / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    count = round(megabytes * 1e6 / 2 / 16)
    tensors = {f"layer.{i}": torch.randn(count).bfloat16() for i in range(16)}
    tmp = manifest.prepare(root / "weights", version, "t")
    shard = ShardWriter().write(tmp / "model-00001-of-00001.safetensors", tensors)
    return manifest.commit(tmp, version=version, incarnation="t", step=1, shards=[shard], model_dir=model)


async def spread(readers: list[HostReader], urls: list[str], path: Path, storage_readers: int) -> dict[str, Any]:
    """Stage the version on all hosts, as the manager orders it."""
    loop, start, used = asyncio.get_running_loop(), time.monotonic(), time.process_time()
    decisions = Decisions(urls, PublishedVersion(1, "t", str(path), 1), storage_readers)
    read = fetched = 0
    running: set[asyncio.Future[Any]] = set()

    def stage(order: UpdateOrder) -> tuple[UpdateOrder, dict[str, int]]:
        reader = readers[int(order.server[2:])]
        reader.offer(str(path), order.sources)
        staged = reader.stage(str(path), 1)
        staged.release()
        return order, staged.counts

    with ThreadPoolExecutor(len(readers)) as pool:
        while True:
            running |= {loop.run_in_executor(pool, stage, order) for order in decisions.begin(time.monotonic() - start)}
            if not running:
                break
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for order, counts in (future.result() for future in done):
                decisions.end(order)
                read += counts["bytes_read"]
                fetched += counts["bytes_fetched"]
    return {
        "seconds": time.monotonic() - start,
        "cpu_s": time.process_time() - used,
        "storage GB": read / 1e9,
        "hosts GB": fetched / 1e9,
    }


def with_bytes(hosts: int, megabytes: float, rate: float, storage_readers: int, memory: Path) -> dict[str, Any]:
    storage = Bucket(rate)
    fetch: Callable[..., None] = VersionReader._fetch

    def slow(self: VersionReader, piece: StoredPiece, name: str, into: Any) -> None:
        time.sleep(storage.delay(piece.size))
        fetch(self, piece, name, into)

    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        shm = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=memory)))
        before, path = (write_version(root, megabytes, version) for version in (0, 1))
        readers, urls = [], []
        for number in range(hosts):
            place = shm / str(number)
            place.mkdir()
            reader = stack.enter_context(closing(HostReader(SharedCopies(root, root / "model", [place], token=TOKEN))))
            reader.stage(str(before), 0).release()
            http = HttpServer(throttled(copy_app(reader.copies, token=TOKEN), Bucket(rate)))
            http.start()
            stack.callback(http.close)
            readers.append(reader)
            urls.append(http.url)
        stack.enter_context(mock.patch.object(VersionReader, "_fetch", slow))
        return asyncio.run(spread(readers, urls, path, storage_readers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=64)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the version")
    parser.add_argument("--rate", type=float, default=1.0, help="GB/s of the storage, and of each link")
    parser.add_argument("--swap", type=float, default=0.2, help="seconds from staged to served, on the clock")
    parser.add_argument(
        "--real-megabytes", type=float, nargs="+", default=[16.0], help="sizes of the version in real bytes"
    )
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for readers in (0, 1, 2, 4):
        found = on_clock(options.hosts, options.gigabytes, options.rate, options.swap, readers)
        rows.append({"what": "clock", "storage_readers": readers, **found})
    for megabytes, readers in itertools.product(options.real_megabytes, (1, 2)):
        rate = options.rate * 1e9 * megabytes / 1e3 / options.gigabytes
        found = with_bytes(options.hosts, megabytes, rate, readers, SHARED_MEMORY)
        rows.append({"what": "bytes", "storage_readers": readers, "MB": megabytes, **found})
    report("weights_fan_out", rows, {**vars(options), "load": round(os.getloadavg()[0], 1)})


if __name__ == "__main__":
    main()
