"""The MasterWorker's view of its ModelWorkers: typed calls over the request-reply stream."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from realsys.cluster.stream.codec import encode_message
from realsys.cluster.stream.master_stream import RoutedStream
from realsys.cluster.topology import Mesh
from realsys.model_calls import (
    ClearRequest,
    Empty,
    InitializeRequest,
    KeepDroppedRequest,
    LoadRowsRequest,
    MaskRequest,
    MfcReply,
    MfcRequest,
    ReadReply,
    ReadRequest,
    SamplesArrived,
    TransferReply,
)
from realsys.train.requests import (
    AddRowsRequest,
    ClientRows,
    CopyWeightsRequest,
    DigestWeightsRequest,
    FinishCheckpointRequest,
    HoldRequest,
    LeaveDeviceRequest,
    LoadCheckpointRequest,
    LoadRecordRequest,
    LoadTenantRequest,
    RecordReply,
    RecordRequest,
    SaveCheckpointRequest,
    SaveWeightsReply,
    SaveWeightsRequest,
    StepTenantReply,
    StepTenantRequest,
    SwitchTenantRequest,
)
from realsys.train.step_gate import GateState, PauseStepRequest, SettleRequest

Reply = TypeVar("Reply", bound=msgspec.Struct)


class ModelWorkers:
    """The requests to the ModelWorkers, one method each.

    Each method sends its request to all recipients before it returns; the future is their replies.
    So all workers see all requests in one order, that of the method calls.
    """

    def __init__(self, stream: RoutedStream, meshes: Mapping[str, Mesh], timeout_s: float) -> None:
        self._stream = stream
        self._meshes = meshes
        self._timeout_s = timeout_s
        self._all = sorted({worker for mesh in meshes.values() for worker in mesh.workers})

    def initialize(self, payload: InitializeRequest) -> asyncio.Future[list[Empty]]:
        return self._to_role(payload.role, "initialize", payload, Empty)

    def transfer(self, requests: Mapping[int, bytes]) -> asyncio.Future[list[TransferReply]]:
        """Send each worker its own part of a plan of transfers: an encoded TransferRequest."""
        return self._stream.scatter(requests, "transfer", TransferReply, timeout_s=self._timeout_s)

    def run_mfc(self, mesh: Mesh, payload: MfcRequest) -> asyncio.Future[list[MfcReply]]:
        """Send a call to every rank of ``mesh``, with the sequences of its data rank."""
        payloads: dict[int, bytes] = {}
        for dp in range(mesh.layout.data):
            payloads |= dict.fromkeys(mesh.dp_members(dp), encode_message(payload.share(dp)))
        return self._stream.scatter(payloads, "mfc", MfcReply, timeout_s=self._timeout_s)

    def leave_device(self) -> asyncio.Future[list[Empty]]:
        return self._to_all("leave_device", LeaveDeviceRequest(), Empty)

    def copy_weights(self, payload: CopyWeightsRequest) -> asyncio.Future[list[Empty]]:
        return self._to_role(payload.role, "copy_weights", payload, Empty)

    def digest_weights(self, payload: DigestWeightsRequest) -> asyncio.Future[list[SaveWeightsReply]]:
        return self._to_role(payload.role, "digest_weights", payload, SaveWeightsReply)

    def save_weights(self, payload: SaveWeightsRequest) -> asyncio.Future[list[SaveWeightsReply]]:
        return self._to_role(payload.role, "save_weights", payload, SaveWeightsReply)

    def save_checkpoint(self, payload: SaveCheckpointRequest) -> asyncio.Future[list[Empty]]:
        return self._to_role(payload.role, "save_checkpoint", payload, Empty)

    def finish_checkpoint(self, payload: FinishCheckpointRequest) -> asyncio.Future[list[Empty]]:
        return self._to_role(payload.role, "finish_checkpoint", payload, Empty)

    def load_checkpoint(self, payload: LoadCheckpointRequest) -> asyncio.Future[list[Empty]]:
        return self._to_role(payload.role, "load_checkpoint", payload, Empty)

    def hold(self, step: int, arrays: Mapping[int, dict[str, list[str]]]) -> asyncio.Future[list[Empty]]:
        """Have every worker keep its arrays of a step. ``arrays``: worker -> key -> sample ids."""
        payloads = {worker: encode_message(HoldRequest(step, arrays.get(worker, {}))) for worker in self._all}
        return self._stream.scatter(payloads, "hold", Empty, timeout_s=self._timeout_s)

    def record(self, payload: RecordRequest) -> asyncio.Future[list[RecordReply]]:
        return self._to_all("record", payload, RecordReply)

    def load_record(self, payload: LoadRecordRequest) -> asyncio.Future[list[Empty]]:
        return self._to_all("load_record", payload, Empty)

    def load_rows(self, head: int, lines: dict[str, int], split: str) -> asyncio.Future[SamplesArrived]:
        request = LoadRowsRequest(lines, split)
        return self._stream.request(head, "load_rows", request, SamplesArrived, timeout_s=self._timeout_s)

    def add_rows(self, head: int, rows: ClientRows) -> asyncio.Future[SamplesArrived]:
        """Store rows of a client on a DP head of the actor."""
        return self._stream.request(head, "add_rows", AddRowsRequest(rows), SamplesArrived, timeout_s=self._timeout_s)

    def switch_tenant(self, payload: SwitchTenantRequest) -> asyncio.Future[list[Empty]]:
        return self._to_role(payload.role, "switch_tenant", payload, Empty)

    def step_tenant(self, payload: StepTenantRequest) -> asyncio.Future[list[StepTenantReply]]:
        return self._to_role(payload.role, "step_tenant", payload, StepTenantReply)

    def load_tenant(self, payload: LoadTenantRequest) -> asyncio.Future[list[Empty]]:
        return self._to_role(payload.role, "load_tenant", payload, Empty)

    def pause_step(self) -> asyncio.Future[list[GateState]]:
        """Ask how far the running step is. The workers answer while they compute."""
        return self._to_all("pause_step", PauseStepRequest(), GateState)

    def settle_step(self, payload: SettleRequest) -> asyncio.Future[list[GateState]]:
        return self._to_all("settle_step", payload, GateState)

    def clear(self, samples: Mapping[int, list[str]], keys: Sequence[str] = ()) -> asyncio.Future[list[Empty]]:
        """Discard samples (worker -> sample ids); with ``keys`` only these arrays of them.

        A sample that a worker does not hold is not an error.
        """
        payloads = {worker: encode_message(ClearRequest(ids, list(keys))) for worker, ids in samples.items()}
        return self._stream.scatter(payloads, "clear", Empty, timeout_s=self._timeout_s)

    def read(self, worker: int, payload: ReadRequest) -> asyncio.Future[ReadReply]:
        return self._stream.request(worker, "read", payload, ReadReply, timeout_s=self._timeout_s)

    def mask(self, samples: Mapping[int, list[str]], oldest: int) -> asyncio.Future[list[Empty]]:
        """Take the tokens of versions below ``oldest`` out of the loss of samples (worker -> sample ids)."""
        payloads = {worker: encode_message(MaskRequest(ids, oldest)) for worker, ids in samples.items()}
        return self._stream.scatter(payloads, "mask", Empty, timeout_s=self._timeout_s)

    def keep_dropped(self, groups: Mapping[int, KeepDroppedRequest]) -> asyncio.Future[list[Empty]]:
        """Have workers write a group each to disk, for people. Send this before the samples are cleared."""
        payloads = {worker: encode_message(group) for worker, group in groups.items()}
        return self._stream.scatter(payloads, "keep_dropped", Empty, timeout_s=self._timeout_s)

    def _to_all(self, handler: str, payload: msgspec.Struct, reply_type: type[Reply]) -> asyncio.Future[list[Reply]]:
        """Send a request to every worker."""
        return self._stream.broadcast(self._all, handler, payload, reply_type, timeout_s=self._timeout_s)

    def _to_role(
        self, role: str, handler: str, payload: msgspec.Struct, reply_type: type[Reply]
    ) -> asyncio.Future[list[Reply]]:
        """Send a request to the whole mesh of ``role``."""
        workers = self._meshes[role].workers
        return self._stream.broadcast(workers, handler, payload, reply_type, timeout_s=self._timeout_s)
