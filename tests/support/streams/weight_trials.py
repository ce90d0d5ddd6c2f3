"""A trial's two ranks and its master, as a weight transport sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from realsys.config.schema import EmbeddedConfig, GenerationConfig
from realsys.generation.embedded.decoder import read_tensors
from realsys.generation.embedded.engine import EmbeddedEngine, build_engine
from realsys.train.master.publish import Publisher, VersionKey
from realsys.train.requests import SaveWeightsReply, SaveWeightsRequest
from realsys.types import PublishedVersion
from realsys.weights.contract import PublisherParts, ReaderParts, Share, Transport, WriterParts
from tests.support.ledger.memory_store import MemoryNameStore
from tests.support.serving.generation_models import make_model
from tests.support.streams.weight_ranks import WeightRanks

BOUND_S = 60.0


class Trial:
    """Two ranks and a master with their shared parts: each version changes one tensor of the model."""

    def __init__(self, tmp_path: Path, transport: Transport, token: str | None = None) -> None:
        self.root, self.model, self.transport = tmp_path / "weights", tmp_path / "model", transport
        make_model("qwen2", self.model)
        self.base = read_tensors(self.model)
        self.parts = ReaderParts(0, self.model, tmp_path, token)
        self.store = MemoryNameStore()
        self.writers = [transport.writer(WriterParts(worker, trial=tmp_path, token=token)) for worker in (0, 1)]
        self.weights = transport.publisher(PublisherParts(self.root, self.model, "0001", token=token))
        name = transport.config.weights.transport
        key = VersionKey(self.store, "newest")
        self.publisher = Publisher(self.weights, WeightRanks(self._save), key, incarnation="0001", transport=name)

    def tensors(self, version: int) -> dict[str, torch.Tensor]:
        return {**self.base, "model.norm.weight": torch.full((48,), 1.0 + version)}

    async def _save(self, request: SaveWeightsRequest) -> list[SaveWeightsReply]:
        request = _sent(request)
        replies = []
        for rank, writer in enumerate(self.writers):
            mine = dict(list(self.tensors(request.version).items())[rank::2])
            share = Share(request.role, request.version, rank, 2, request.plan)
            replies.append(_sent(SaveWeightsReply(writer.write(share, mine))))
        return replies

    def publish(self, version: int) -> PublishedVersion:
        asyncio.run(self.publisher.publish(version, version))
        self.publisher.keep([version])  # every server has it
        return msgspec.json.decode(self.store.get("newest"), type=PublishedVersion)

    @contextmanager
    def engine(self, token: str | None = None) -> Iterator[EmbeddedEngine]:
        config = GenerationConfig(embedded=EmbeddedConfig(max_running=2, max_queued=2, context_length=32))
        reader = self.transport.reader(replace(self.parts, token=token or self.parts.token))
        engine = build_engine(self.model, config, reader.stage)
        engine.start()
        try:
            yield engine
        finally:
            engine.close()
            reader.close()


def _sent(message: Any) -> Any:
    """A message as it arrives: plans and reports are plain values then."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message))
