"""The ModelWorker's request loop.

Consumes requests of the MasterWorker, one at a time and in order, on the main thread; groups from rollout arrive
beside it on the endpoint's I/O thread and go straight into the DataManager. Waits for the next request only. Produces
replies, and the notice ``samples_arrived``.

An error is answered with its traceback and then ends the process: the other ranks of the mesh may be waiting in a
collective, and a rank that gave up half-way cannot rejoin them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from realsys.cluster.topology import Mesh
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.errors import ModelError
from realsys.train.data_manager import DataManager
from realsys.train.demos import DemoSource
from realsys.train.device import Device
from realsys.train.engine import MegatronEngine
from realsys.train.interfaces import Role, find_interface
from realsys.train.packing import Packer
from realsys.train.transfer import execute
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
    ShardInfo,
)

logger = logging.getLogger(__name__)

WriteShard = Callable[[Path, Mapping[str, torch.Tensor]], ShardInfo]

#: How long the loop waits for a request before it looks at ``stop`` again.
_POLL_S = 0.5


class Request(Protocol):
    """What the service uses of ``realsys.stream.request_reply.Request``."""

    @property
    def handler(self) -> str: ...
    def decode(self, type: Any) -> Any: ...


class Endpoint(Protocol):
    """What the service uses of ``realsys.stream.request_reply.WorkerEndpoint``."""

    def next_request(self, timeout_s: float) -> Any: ...
    def reply(self, request: Any, payload: msgspec.Struct) -> None: ...
    def reply_error(self, request: Any, exc: BaseException) -> None: ...


class ModelWorkerService:
    """One training rank: its model shards, its samples, and the handlers of the master's requests.

    Needs torch.distributed and ``form_mesh``. ``rank`` is the worker's index and its rank on the whole mesh.
    """

    def __init__(
        self,
        config: Config,
        paths: TrialPaths,
        mesh: Mesh,
        rank: int,
        endpoint: Endpoint,
        data: DataManager,
        device: Device,
        write_shard: WriteShard,
    ) -> None:
        self._config, self._mesh, self._rank = config, mesh, rank
        self._endpoint, self._data, self._device = endpoint, data, device
        self._write_shard = write_shard
        self._demos = DemoSource(config, paths, data, rank)
        self._roles: dict[str, Role] = {}
        self._handlers: dict[str, tuple[type[msgspec.Struct], Callable[[Any], msgspec.Struct]]] = {
            "initialize": (InitializeRequest, self._initialize),
            "load_demos": (LoadDemosRequest, self._load_demos),
            "mfc": (MfcRequest, self._mfc),
            "save_weights": (SaveWeightsRequest, self._save_weights),
            "clear": (ClearRequest, self._clear),
        }

    def run(self, stop: threading.Event) -> None:
        """Serve until ``stop`` is set. Raises what a handler raised, after answering it."""
        while not stop.is_set():
            request = self._endpoint.next_request(_POLL_S)
            if request is not None:
                self.handle(request)

    def handle(self, request: Request) -> None:
        """Answer one request."""
        try:
            if request.handler not in self._handlers:
                raise ModelError(f"unknown request {request.handler!r}; known: {', '.join(self._handlers)}")
            payload_type, handler = self._handlers[request.handler]
            reply = handler(request.decode(payload_type))
        except BaseException as error:
            self._endpoint.reply_error(request, error)
            raise
        self._endpoint.reply(request, reply)

    def _initialize(self, request: InitializeRequest) -> Empty:
        start = time.perf_counter()
        engine = MegatronEngine(self._config, self._mesh.layout, self._device)
        engine.load(Path(request.model_path))
        packer = Packer(
            self._data,
            self._device.device,
            multiple=engine.token_multiple,
            first=engine.first_stage,
            last=engine.last_stage,
        )
        self._roles["actor"] = Role(self._config, engine, self._data, packer, self._device)
        logger.info(
            "loaded %s: %d parameters on this rank, %.1f s",
            request.model_path,
            engine.parameter_count,
            time.perf_counter() - start,
        )
        return Empty()

    def _load_demos(self, request: LoadDemosRequest) -> SamplesArrived:
        return SamplesArrived(self._demos.load(request.indices))

    def _mfc(self, request: MfcRequest) -> MfcReply:
        start = time.perf_counter()
        role = self._role(request.role)
        per_rank = [part for minibatch in request.minibatches for part in minibatch]
        refs = {ref.sample_id: ref for part in per_rank for ref in part}
        execute(request.transfers, refs, self._data, self._rank, self._device)
        stats = find_interface(request.interface).run(role, request)
        reply = MfcReply(self._rank, seconds=time.perf_counter() - start)
        if self._rank in self._mesh.dp_heads():
            reply.stats = stats
            own = role.engine.data_rank
            reply.tokens = sum(ref.length for minibatch in request.minibatches for ref in minibatch[own])
        return reply

    def _save_weights(self, request: SaveWeightsRequest) -> SaveWeightsReply:
        start = time.perf_counter()
        tensors = dict(self._role(request.role).engine.export())
        shards = []
        if tensors:
            # Numbered over all ranks, so that nobody needs to know who has nothing to write.
            name = f"model-{self._rank + 1:05d}-of-{self._mesh.layout.world_size:05d}.safetensors"
            shards.append(self._write_shard(Path(request.directory) / name, tensors))
        return SaveWeightsReply(shards, time.perf_counter() - start)

    def _clear(self, request: ClearRequest) -> Empty:
        self._data.clear(request.sample_ids)
        return Empty()

    def _role(self, name: str) -> Role:
        if name not in self._roles:
            raise ModelError(f"model_worker/{self._rank} has no role {name!r}; 'initialize' comes first")
        return self._roles[name]
