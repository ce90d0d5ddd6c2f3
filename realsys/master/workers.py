"""The MasterWorker's view of its ModelWorkers: typed calls over the request-reply stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from realsys.cluster.topology import Mesh
from realsys.stream.routing import RoutedStream
from realsys.types import (
    ClearRequest,
    Empty,
    InitializeRequest,
    LoadDemosRequest,
    MfcReply,
    MfcRequest,
    SamplesArrived,
    SaveWeightsReply,
    SaveWeightsRequest,
)


class ModelWorkers:
    """Sends each call to all ranks it concerns, in one order."""

    def __init__(self, stream: RoutedStream, mesh: Mesh, timeout_s: float) -> None:
        self._stream, self._mesh, self._timeout_s = stream, mesh, timeout_s

    async def initialize(self, model_path: str) -> None:
        request = InitializeRequest(model_path)
        await self._stream.broadcast(self._mesh.workers, "initialize", request, Empty, timeout_s=self._timeout_s)

    async def run_mfc(self, workers: Sequence[int], payload: MfcRequest) -> list[MfcReply]:
        return await self._stream.broadcast(workers, "mfc", payload, MfcReply, timeout_s=self._timeout_s)

    async def save_weights(self, payload: SaveWeightsRequest) -> list[SaveWeightsReply]:
        workers = self._mesh.workers
        return await self._stream.broadcast(
            workers, "save_weights", payload, SaveWeightsReply, timeout_s=self._timeout_s
        )

    async def load_demos(self, head: int, indices: list[int]) -> SamplesArrived:
        request = LoadDemosRequest(indices)
        return await self._stream.request(head, "load_demos", request, SamplesArrived, timeout_s=self._timeout_s)

    async def clear(self, workers: Iterable[int], sample_ids: list[str]) -> None:
        await self._stream.broadcast(workers, "clear", ClearRequest(sample_ids), Empty, timeout_s=self._timeout_s)
