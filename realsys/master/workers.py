"""The MasterWorker's view of its ModelWorkers: typed calls over the request-reply stream."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from realsys.cluster.topology import Mesh
from realsys.stream.request_reply import MasterStream
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

Reply = TypeVar("Reply", bound=msgspec.Struct)


class ModelWorkers:
    """Sends each call to all ranks it concerns, in one order."""

    def __init__(self, stream: MasterStream, mesh: Mesh, timeout_s: float) -> None:
        self._stream, self._mesh, self._timeout_s = stream, mesh, timeout_s

    async def initialize(self, model_path: str) -> None:
        await self._all(self._mesh.workers, "initialize", InitializeRequest(model_path), Empty)

    async def run_mfc(self, workers: Sequence[int], payload: MfcRequest) -> list[MfcReply]:
        return await self._all(workers, "mfc", payload, MfcReply)

    async def save_weights(self, payload: SaveWeightsRequest) -> list[SaveWeightsReply]:
        return await self._all(self._mesh.workers, "save_weights", payload, SaveWeightsReply)

    async def load_demos(self, worker: int, indices: list[int]) -> SamplesArrived:
        [reply] = await self._all([worker], "load_demos", LoadDemosRequest(indices), SamplesArrived)
        return reply

    async def clear(self, workers: Sequence[int], sample_ids: list[str]) -> None:
        await self._all(workers, "clear", ClearRequest(sample_ids), Empty)

    async def _all(
        self, workers: Sequence[int], handler: str, payload: msgspec.Struct, reply_type: type[Reply]
    ) -> list[Reply]:
        calls = [self._stream.request(w, handler, payload, reply_type, timeout_s=self._timeout_s) for w in workers]
        return list(await asyncio.gather(*calls))
