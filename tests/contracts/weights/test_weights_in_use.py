"""``fenced-weights``: servers that stage slowly, while versions follow each other faster. Virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from realsys.cluster.commit_folder import Removed
from realsys.errors import WeightsError
from realsys.manager.decisions import ManagerState
from realsys.manager.messages import TrainedRequest
from realsys.manager.routing.servers import UpdateOrder
from realsys.train.master.publish import Publisher, VersionKey
from realsys.train.requests import SaveWeightsReply, SaveWeightsRequest
from realsys.weights.contract import Committed, PublisherParts, Share
from realsys.weights.disk import manifest
from realsys.weights.disk.reader import VersionReader
from realsys.weights.disk.transport import DiskPublisher
from realsys.weights.disk.writer import DiskWriter, ShardWriter
from tests.support.ledger.manager_states import SETTINGS, address, answer
from tests.support.ledger.memory_store import MemoryNameStore
from tests.support.streams.weight_ranks import WeightRanks

TICK_S, STAGING_TICKS, PERIOD_TICKS, ETA, SHARDS = 0.1, 35, 9, 8, 4


class MemoryPublisher:
    """Transport without files: the versions that are there, with ``keep`` newest ones."""

    def __init__(self, keep: int) -> None:
        self.keep, self.there = keep, list[str]()

    def prepare(self, version: int, base: str) -> None: ...

    def commit(self, version: int, step: int, plan: Any, reports: Any, *, replace: bool = False) -> Committed:
        self.there.append(f"v{version}")
        return Committed(self.there[-1], 1, 1)

    def check(self, locator: str) -> None: ...

    def prune(self, in_use: Sequence[str]) -> Removed:
        gone = [name for name in self.there[: -self.keep] if name not in in_use]
        self.there = [name for name in self.there if name not in gone]
        return Removed(gone)


class MemoryWeights:
    def __init__(self, _: Path) -> None:
        self.transport: Any = MemoryPublisher(2)

    def shares(self, request: SaveWeightsRequest) -> list[Any]:
        return [None]

    def stage(self, locator: str, version: int) -> Iterator[None]:
        """Read the shards of a version one after the other."""
        for _ in range(SHARDS):
            yield
            if locator not in self.transport.there:
                raise WeightsError(f"{locator} cannot be read")

    def count(self) -> int:
        return len(self.transport.there)


class DiskWeights:
    """The transport ``disk``, with a shard per rank."""

    def __init__(self, folder: Path) -> None:
        self.root, model = folder / "weights", folder / "model"
        model.mkdir()
        self.transport: Any = DiskPublisher(PublisherParts(self.root, model, "m"), 2)
        self._writers = [DiskWriter(ShardWriter()) for _ in range(SHARDS)]

    def shares(self, request: SaveWeightsRequest) -> list[Any]:
        return [
            writer.write(
                Share("actor", request.version, rank, SHARDS, request.plan),
                {f"w{rank}": torch.full((8,), float(request.version))},
            )
            for rank, writer in enumerate(self._writers)
        ]

    def stage(self, locator: str, version: int) -> Iterator[None]:
        directory = Path(locator)
        with VersionReader(directory, manifest.load_manifest(directory, version)) as reader:
            for name in reader.order():
                yield
                reader.read(name)

    def count(self) -> int:
        return len(manifest.complete_versions(self.root))


class Server:
    """A server that stages for STAGING_TICKS, and the tasks of the manager for it."""

    def __init__(self, state: ManagerState, weights: Any) -> None:
        self._state, self._weights = state, weights
        self._order: UpdateOrder | None = None
        self._reads: Iterator[None] = iter(())
        self._ticks, self._serves = 0, 0
        self.failures = 0

    def tick(self, now: float) -> None:
        if self._order is None:
            made = self._state.servers.next_order("generation_server/0", "1", now)
            if not isinstance(made, UpdateOrder) or not self._state.begin_update(made, now):
                return
            self._order, self._ticks = made, 0
            self._reads = self._weights.stage(made.target.locator, made.target.version)
        self._ticks += 1
        if self._ticks % (STAGING_TICKS // SHARDS) and self._ticks < STAGING_TICKS:
            return
        try:
            next(self._reads)
        except WeightsError as error:
            self.failures += 1
            self._state.servers.failed(self._order, str(error), now)
            self._order = None
            answer(self._state, 0, self._serves, now)
        except StopIteration:
            self._serves = self._order.target.version
            self._state.servers.succeeded(self._order, 3.5, {})
            self._order = None


@pytest.mark.parametrize("make", [MemoryWeights, DiskWeights])
def test_slow_staging_keeps_servers_routable(tmp_path: Path, make: type[Any]) -> None:
    """Staging takes 3.5 s and a version follows every 0.9 s, with eta 8 and two versions kept."""
    weights, store = make(tmp_path), MemoryNameStore()
    state = ManagerState(SETTINGS.__class__(2, ETA, 4, 2, 1, {"train": 10}))
    state.observe_servers([address(0)])

    async def save(request: SaveWeightsRequest) -> list[SaveWeightsReply]:
        return [SaveWeightsReply(report) for report in weights.shares(request)]

    publisher = Publisher(weights.transport, WeightRanks(save), VersionKey(store, "version"), incarnation="m")
    server, routable, most = Server(state, weights), 0, 0
    ticks = range(400)
    for tick in ticks:
        version, rest = divmod(tick, PERIOD_TICKS)
        if rest == 0:
            asyncio.run(publisher.publish(version, version))
            assert publisher.newest is not None and state.servers.publish(publisher.newest)
            publisher.keep(state.trained(TrainedRequest(version, version), 0.0).in_use)
            most = max(most, weights.count())
        server.tick(tick * TICK_S)
        routable += tick >= 2 * STAGING_TICKS and state.refusal() != "no_server"
    store.close()
    assert routable / (len(ticks) - 2 * STAGING_TICKS) >= 0.95
    assert server.failures == 0 and most <= ETA + 2, "a version in use is kept, and no more than that"
