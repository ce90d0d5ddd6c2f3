"""The ModelWorker's request loop.

Consumes requests of the MasterWorker on the main thread, one at a time and in order; those that only
read a copy of the weights on a background thread, so they do not wait for the step. Groups from
rollout arrive on the endpoint's I/O thread and go into the DataManager without passing the loop.
Waits for the next request only. Produces replies, and the notice ``samples_arrived``.

    request             to                              action
    initialize          ranks of the role's mesh        loads the role's shard
    load_rows          an actor's DP head              tokenises lines of data.demos
    transfer            sources and destinations        moves arrays between workers
    mfc                 ranks of the role's mesh        pre_hooks, handler, post_hooks
    leave_device        all ranks                       moves its roles to host memory, until their next calls
    copy_weights        ranks of the role's mesh        copies its share in HF names to host memory
    save_weights        ranks of the role's mesh        writes that copy (in the background)
    digest_weights      ranks of the role's mesh        computes checksums of that copy (in the background)
    save_checkpoint     ranks of the role's mesh        takes a snapshot, which a thread writes
    finish_checkpoint   ranks of the role's mesh        waits until the snapshot is on disk
    load_checkpoint     ranks of the role's mesh        replaces the training state
    hold, record        all workers                     keeps the arrays of a step; writes its share of the record
    load_record         all workers                     stores the samples of a recorded step (replay)
    read                holders of the samples          returns arrays (for a training script)
    mask                holder of the samples           takes tokens out of the loss
    keep_dropped        holder of the samples           writes a group that was too old (in the background)
    switch_tenant       ranks of the role's mesh        exchanges the adapter and its optimizer state
    step_tenant         ranks of the role's mesh        takes an optimizer step of the current tenant
    load_tenant         ranks of the role's mesh        replaces its state by a checkpoint
    add_rows            an actor's DP head              stores rows of a client
    clear               holders of the samples          frees arrays

An error is sent as a reply with its traceback and then ends the process. Other ranks of the mesh
may be waiting in a collective, and a rank that left it half-way cannot rejoin.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from realsys.algorithm.losses import load_loss
from realsys.cluster.failpoint import failpoint
from realsys.cluster.gpu_devices import GpuMeter
from realsys.cluster.process import resident_bytes, trim_heap
from realsys.cluster.stream.worker_endpoint import WorkerEndpoint, WorkerRequest
from realsys.config.allocation import ACTOR
from realsys.config.dataflow import (
    KV_VERSIONS,
    TEACHER_TOKENS,
    TEMPERATURES,
    TOKEN_REWARDS,
    Dataflow,
    check_calls,
    dataflow_of,
    role_settings,
)
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.data.learning import LearningData, learning_data
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import ModelError, NotFiniteError
from realsys.model_calls import (
    ClearRequest,
    Empty,
    InitializeRequest,
    KeepDroppedRequest,
    LoadRowsRequest,
    MaskRequest,
    MfcReply,
    MfcRequest,
    MfcShare,
    ReadReply,
    ReadRequest,
    SamplesArrived,
    Transfer,
    TransferReply,
    TransferRequest,
)
from realsys.observe.dropped_groups import DroppedWriter
from realsys.observe.spans import span
from realsys.train.checkpoint.saver import CheckpointWriter, load_checkpoint
from realsys.train.megatron.collectives import gather_bytes
from realsys.train.megatron.device import Device
from realsys.train.megatron.mesh import MeshGroups
from realsys.train.megatron.train_engine import MegatronEngine
from realsys.train.recording import SampleRecorder, TooOldGroups
from realsys.train.requests import (
    AddRowsRequest,
    CopyWeightsRequest,
    DigestWeightsRequest,
    FinishCheckpointRequest,
    HoldRequest,
    LeaveDeviceRequest,
    LoadCheckpointRequest,
    LoadRecordRequest,
    LoadTenantRequest,
    RecordRequest,
    SaveCheckpointRequest,
    SaveWeightsRequest,
    StepTenantRequest,
    SwitchTenantRequest,
)
from realsys.train.step_gate import StepAbandoned, StepGate
from realsys.train.worker.call_handlers import Role, find_handler, find_hook
from realsys.train.worker.data_manager import Array, DataManager, array_size
from realsys.train.worker.packing import MicroBatchPacker
from realsys.train.worker.tenants import Tenants
from realsys.train.worker.weight_saver import WeightSaver
from realsys.types import ARRAY_KEYS, SampleMeta, SequenceRef
from realsys.weights.contract import WeightWriter

log = logging.getLogger(__name__)

#: Wait for a request between two checks of ``stop``.
_POLL_S = 0.5
#: requests that read a copy of the weights, and no state of the training
_IN_BACKGROUND = ("save_weights", "digest_weights")
#: request -> its span, if that has another name
_SPANS = {"mfc": "call", "copy_weights": "copy", "save_weights": "write", "save_checkpoint": "save"}
#: share of the master's time limit on a call: the rank gives up first and names the cause
_SHARE = 0.8


def load_calls(flow: Dataflow) -> None:
    """Import the handlers and hooks of all calls when the worker starts, not hours later.

    Raises ConfigError.
    """
    check_calls(flow)
    for call in flow.calls:
        find_handler(call.handler)
        for name in (*call.pre_hooks, *call.post_hooks):
            find_hook(name)


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """The collaborators of a ModelWorkerService.

    worker  index of the worker, which is its rank in torch.distributed
    groups  role -> the worker's groups on that role's mesh (``form_meshes``)
    gate    lets the master abandon a step (``realsys.train.step_gate``)
    meter   reads the worker's GPU; None on a CPU
    """

    worker: int
    groups: Mapping[str, MeshGroups]
    endpoint: WorkerEndpoint
    data: DataManager
    device: Device
    writer: WeightWriter
    gate: StepGate = field(default_factory=StepGate)
    meter: GpuMeter | None = None


class ModelWorkerService:
    """One ModelWorker: its shards of one or more roles, its samples, and the handlers of the
    master's requests.
    """

    def __init__(
        self,
        config: Config,
        paths: TrialPaths,
        parts: WorkerParts,
    ) -> None:
        self._config = config
        self._groups = parts.groups
        self._worker = parts.worker
        self._endpoint = parts.endpoint
        self._data = parts.data
        self._device = parts.device
        self._saver = WeightSaver(parts.worker, parts.writer, _SHARE * config.cluster.request_timeout_s)
        self._failure: BaseException | None = None  # error of the background thread
        self._gate = parts.gate
        self._meter = parts.meter
        self._learning = LearningSource(config, paths, parts.data)
        self._roles: dict[str, Role] = {}
        recorder = SampleRecorder(
            parts.worker, parts.data, self._roles, lambda written: parts.endpoint.notify("recorded", written)
        )
        writer = DroppedWriter(paths.dropped, f"model_worker/{parts.worker}", config.record.dropped_groups)
        too_old = TooOldGroups(parts.data, writer)
        self._checkpoints: dict[str, CheckpointWriter] = {}
        self._tenants: dict[str, Tenants] = {}
        self._handlers: dict[str, tuple[type[msgspec.Struct], Callable[[Any], msgspec.Struct]]] = {
            "initialize": (InitializeRequest, self._initialize),
            "load_rows": (LoadRowsRequest, self._load_rows),
            "transfer": (TransferRequest, self._transfer),
            "mfc": (MfcShare, self._mfc),
            "leave_device": (LeaveDeviceRequest, self._leave_device),
            "copy_weights": (CopyWeightsRequest, self._copy_weights),
            "save_weights": (SaveWeightsRequest, self._saver.save),
            "digest_weights": (DigestWeightsRequest, self._saver.digest),
            "save_checkpoint": (SaveCheckpointRequest, self._save_checkpoint),
            "finish_checkpoint": (FinishCheckpointRequest, self._finish_checkpoint),
            "load_checkpoint": (LoadCheckpointRequest, self._load_checkpoint),
            "hold": (HoldRequest, recorder.hold),
            "record": (RecordRequest, recorder.record),
            "load_record": (LoadRecordRequest, recorder.load),
            "read": (ReadRequest, self._read),
            "mask": (MaskRequest, self._mask),
            "keep_dropped": (KeepDroppedRequest, too_old.keep),
            "clear": (ClearRequest, self._clear),
            "switch_tenant": (SwitchTenantRequest, lambda request: self._tenants[request.role].switch(request)),
            "step_tenant": (StepTenantRequest, lambda request: self._tenants[request.role].step(request)),
            "load_tenant": (LoadTenantRequest, lambda request: self._tenants[request.role].load(request)),
            "add_rows": (AddRowsRequest, lambda request: SamplesArrived(self._data.add_rows(request.rows))),
        }

    def run(self, stop: threading.Event) -> None:
        """Serve requests until ``stop`` is set.

        Raises the error of a handler, after replying with it.
        """
        self._endpoint.serve_in_background(*_IN_BACKGROUND)
        # A daemon: a worker that must stop does not wait for a version that no master will publish.
        threading.Thread(target=self._run_background, args=(stop,), name="weights", daemon=True).start()
        while not stop.is_set():
            request = self._endpoint.next_request(_POLL_S)
            if self._failure is not None:
                raise self._failure
            if request is not None:
                self.handle(request)

    def _run_background(self, stop: threading.Event) -> None:
        try:
            while not stop.is_set():
                request = self._endpoint.next_background(_POLL_S)
                if request is not None:
                    self.handle(request)
        except BaseException as error:  # the main thread raises it and ends the process
            self._failure = error

    def handle(self, request: WorkerRequest) -> None:
        """Serve one request and reply to it."""
        try:
            if request.handler not in self._handlers:
                raise ModelError(f"unknown request {request.handler!r}: must be one of {', '.join(self._handlers)}")
            payload_type, handler = self._handlers[request.handler]
            with span(_SPANS.get(request.handler, request.handler)) as served:
                payload = request.decode(payload_type)
                served.unit = _unit_of(payload)
                if isinstance(payload, MfcShare):
                    served.facts["call"] = payload.request.mfc
                reply = handler(payload)
        except BaseException as error:
            # The master must learn the cause before the process ends; else it sees only a lost
            # worker.
            self._endpoint.reply_error(request, error)
            raise
        self._endpoint.reply(request, reply)

    def _initialize(self, request: InitializeRequest) -> Empty:
        name = request.role
        if name not in self._groups:
            here = ", ".join(self._groups) or "none"
            raise ModelError(f"model_worker/{self._worker} is on no mesh of role {name!r}: its roles are {here}")
        # Set before the reply: the master grants no ticket before all workers have replied.
        self._data.trainer_incarnation = request.trainer_incarnation
        model, groups = Path(request.model_path), self._groups[name]
        role = make_role(self._config, name, model, groups, self._data, self._device, trainable=request.trainable)
        role.engine.gate = self._gate
        self._roles[name] = role
        self._saver.forget_frozen(name)
        self._checkpoints[name] = CheckpointWriter(role)
        self._tenants[name] = Tenants(role)
        if name == ACTOR and role.engine.module is not None:
            # From here on the I/O thread refuses groups that would end the trainer.
            self._data.vocabulary = role.engine.module.vocab_size
            self._data.row_limit = self._config.train.microbatch_tokens
            whole_episodes = load_loss(self._config.train.ppo).episode_level
            self._data.episode_limit = self._config.train.microbatch_tokens if whole_episodes else 0
            source_keys = dataflow_of(self._config).source_keys
            self._data.token_rewards = TOKEN_REWARDS in source_keys
            self._data.teacher = TEACHER_TOKENS in source_keys
            self._data.kv_versions = KV_VERSIONS in source_keys
            if TEMPERATURES in source_keys:
                self._data.temperature = self._config.generation.sampling.temperature
        return Empty()

    def _load_rows(self, request: LoadRowsRequest) -> SamplesArrived:
        return SamplesArrived(self._learning.load(request.split, request.lines))

    def _transfer(self, request: TransferRequest) -> TransferReply:
        start = time.perf_counter()
        received = execute(request, self._data, self._worker, self._device)
        return TransferReply(received, time.perf_counter() - start)

    def _mfc(self, share: MfcShare) -> MfcReply:
        start = time.perf_counter()
        role, handler = self._role(share.request.role), find_handler(share.request.handler)
        request = whole_request(share, role.groups.data)
        counted, computed = role.flops, role.computed_flops
        before = [find_hook(name) for name in request.pre_hooks]
        after = [find_hook(name) for name in request.post_hooks]
        for hook in before:
            hook(role, request)
        self._gate.begin(request.version, request.mfc)
        try:
            with role.configured(request):
                outcome = handler.run(role, request)
        except StepAbandoned as stopped:
            log.info("%s", stopped)
            return MfcReply(self._worker, abandoned=True)
        except NotFiniteError as error:
            # Not raised here: the step is recorded before the master ends the run.
            log.error("%s", error)
            return MfcReply(self._worker, not_finite=(error.role, error.skipped, error.sample_ids))
        for hook in after:
            hook(role, request)
        if self._device.is_cuda:
            torch.cuda.synchronize(self._device.device)  # else the optimizer's kernels would count in the next call
        else:
            trim_heap()
        reply = MfcReply(self._worker)
        # The other ranks hold partial statistics, which must not reach the step log.
        if self._worker in role.groups.mesh.dp_heads():
            reply.stats, reply.scores = outcome.stats, outcome.scores
            reply.tokens = sum(ref.length for ref in role.own_sequences(request))
        if self._meter is not None:
            reply.gpu = self._meter.read(role.flops - counted, role.computed_flops - computed)
        reply.host_bytes = resident_bytes()
        reply.seconds = time.perf_counter() - start
        return reply

    def _leave_device(self, request: LeaveDeviceRequest) -> Empty:
        """Move all roles to host memory; the next call of each brings it back. For allocations with lent servers."""
        for role in self._roles.values():
            role.engine.offload()
            failpoint("devices.leave")
        trim_heap(0)
        return Empty()

    def _copy_weights(self, request: CopyWeightsRequest) -> Empty:
        return self._saver.copy(self._role(request.role), request)

    def _save_checkpoint(self, request: SaveCheckpointRequest) -> Empty:
        role = self._role(request.role)
        # All tenants have the same frozen base, which no checkpoint of theirs needs.
        trained_only = self._tenants[role.name].current is not None
        self._checkpoints[role.name].begin(Path(request.directory), request.step, trained_only=trained_only)
        return Empty()

    def _finish_checkpoint(self, request: FinishCheckpointRequest) -> Empty:
        role = self._role(request.role)
        self._checkpoints[role.name].finish()
        return Empty()

    def _load_checkpoint(self, request: LoadCheckpointRequest) -> Empty:
        load_checkpoint(self._role(request.role), Path(request.directory))
        self._saver.forget_frozen(request.role)
        return Empty()

    def _read(self, request: ReadRequest) -> ReadReply:
        return ReadReply([[self._data.get(name, key).tolist() for key in request.keys] for name in request.sample_ids])

    def _mask(self, request: MaskRequest) -> Empty:
        self._data.mask_older(request.sample_ids, request.oldest)
        return Empty()

    def _clear(self, request: ClearRequest) -> Empty:
        self._data.clear(request.sample_ids, request.keys)
        return Empty()

    def _role(self, name: str) -> Role:
        if name not in self._roles:
            here = ", ".join(self._roles) or "none"
            raise ModelError(
                f"model_worker/{self._worker} has no role {name!r} (it has {here}): send 'initialize' first"
            )
        return self._roles[name]


def _unit_of(payload: Any) -> str:
    """Return what a request is for, as spans name it."""
    if isinstance(payload, MfcShare):
        return f"step/{payload.request.step}"
    version = getattr(payload, "version", None)
    return "" if version is None else f"version/{version}"


# ---- build of a role


logger = logging.getLogger(__name__)


def make_role(
    config: Config, name: str, model: Path, groups: MeshGroups, data: DataManager, device: Device, *, trainable: bool
) -> Role:
    """Load this rank's shard of ``name`` from the HF directory ``model``. Every rank of its mesh
    must call it.

    ``trainable``: with gradients and an optimizer. Raises ConfigError for a role that is not
    configured, ModelError for a model that is unusable or does not fit the layout.
    """
    start = time.perf_counter()
    settings = role_settings(config, name)
    engine = MegatronEngine(config, settings, groups, device, trainable=trainable)
    engine.load(model)
    packer = MicroBatchPacker(
        data, device.device, multiple=engine.token_multiple, first=groups.first_stage, last=groups.last_stage
    )
    logger.info(
        "loaded %s from %s: %d parameters on this rank, %.1f s",
        name,
        model,
        engine.parameter_count,
        time.perf_counter() - start,
    )
    return Role(name, config, settings, engine, data, packer, device)


# ---- rows of data.demos, tokenised on request and stored as samples


class LearningSource:
    """Source of the rows of ``data.demos``.

    It opens the file at the first request, because only DP heads receive one.
    """

    def __init__(self, config: Config, paths: TrialPaths, data: DataManager) -> None:
        self._config = config
        self._paths = paths
        self._data = data
        self._opened: LearningData | None = None

    def load(self, split: str, lines: Mapping[str, int]) -> list[SampleMeta]:
        """Store the rows of these lines (name -> index) and return their metadata, those of a pair one after the other.

        Raises ConfigError without ``data.demos``.
        """
        if self._opened is None:
            tokenizer = TextTokenizer(self._paths.base_model(self._config))
            self._opened = learning_data(self._config, self._paths, tokenizer)
        rows = self._opened.rows
        return [meta for name, index in lines.items() for meta in self._data.add_learned(name, rows(split, index))]


# ---- moves sample arrays between ModelWorkers before a model function call, worker to worker
#
# Sources and destinations get the same plan with the length of every sequence, so no message
# announces sizes. There is one message per pair of workers, and all pairs run at the same time. A
# pair need not share a mesh: messages use the process group of the whole world.


Item = tuple[str, str]  # sample id, key


def execute(request: TransferRequest, data: DataManager, worker: int, device: Device) -> int:
    """Do this worker's part of the plan; return the bytes it received.

    Raises KeyError for an array that a source does not hold, ModelError for an array whose length
    differs from the plan.
    """
    refs = {ref.sample_id: ref for ref in request.sequences}
    operations: list[dist.P2POp] = []
    arriving: list[tuple[list[Item], torch.Tensor]] = []
    # All pairs are collected before one is started: if two workers each sent first and received
    # later, both could block.
    for (source, target), items in _by_pair(request.transfers, worker).items():
        if worker == source:
            # One message per pair. A message per array would cost a latency each, for arrays of a
            # few kilobytes.
            message = np.concatenate([_read(data, refs[sample_id], key) for sample_id, key in items])
            # empty completions: the destination computes the same size and expects no message
            if message.size:
                operations.append(dist.P2POp(dist.isend, torch.from_numpy(message).to(device.device), target))
        elif worker == target:
            # The plan gives the size, so the source announces nothing.
            size = sum(_nbytes(refs[sample_id], key, data.top_k) for sample_id, key in items)
            buffer = torch.empty(size, dtype=torch.uint8, device=device.device)
            arriving.append((items, buffer))
            if size:
                operations.append(dist.P2POp(dist.irecv, buffer, source))
    if operations:
        # Launched as one group: NCCL runs single sends and receives in the order of the calls,
        # which may be a deadlock.
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    # Stored after all messages have arrived: a partial failure leaves no sample half updated.
    for items, buffer in arriving:
        _store(items, buffer.cpu().numpy(), refs, data)
    return sum(buffer.numel() for _, buffer in arriving)


def _by_pair(transfers: Iterable[Transfer], worker: int) -> dict[tuple[int, int], list[Item]]:
    """Return (source, destination) -> the items to send, each once, in the order of the plan.

    Only the pairs of ``worker``.
    """
    pairs: dict[tuple[int, int], dict[Item, None]] = {}
    for transfer in transfers:
        for target in transfer.dsts if transfer.src == worker else {worker}.intersection(transfer.dsts):
            # A worker that sends to itself would wait for its own receive.
            if transfer.src == target:
                continue
            items = pairs.setdefault((transfer.src, target), {})
            # A dict as an ordered set: two transfers of a plan may name the same array, and both sides
            # must count it once.
            items.update(((sample_id, key), None) for sample_id in transfer.sample_ids for key in transfer.keys)
    return {pair: list(items) for pair, items in pairs.items() if items}


def _nbytes(ref: SequenceRef, key: str, top_k: int) -> int:
    return array_size(ref, key, top_k) * np.dtype(ARRAY_KEYS[key][0]).itemsize


def _read(data: DataManager, ref: SequenceRef, key: str) -> Array:
    """Return the array as bytes, uint8."""
    array = data.get(ref.sample_id, key)
    if len(array) != (size := array_size(ref, key, data.top_k)):
        # It would shift all arrays behind it in the message, and the destination would store wrong
        # numbers without an error.
        raise ModelError(
            f"{key} of sample {ref.sample_id} has {len(array)} elements, the plan expects "
            f"{size} for its {ref.length} tokens, {ref.loss_tokens} of them in the loss: "
            "this is a bug in the plan or in a call handler"
        )
    return array.view(np.uint8)


def _store(items: Sequence[Item], buffer: Array, refs: Mapping[str, SequenceRef], data: DataManager) -> None:
    offset = 0
    for sample_id, key in items:
        size = _nbytes(refs[sample_id], key, data.top_k)
        # A copy: a view would keep the whole message in memory until its last sample is cleared.
        data.put(sample_id, {key: buffer[offset : offset + size].copy().view(ARRAY_KEYS[key][0])})
        offset += size


# ---- exchange of the sequences of a call among the data ranks of its mesh
#
#     master ──MfcShare──> every rank: the sequences of its own data rank
#     ranks  ──all-gather over data ranks──> MfcRequest with the sequences of all of them
#
# Group means of rewards, denominators and numbers of micro-batches depend on the whole batch. The master would send
# its metadata once to every rank; the data ranks have it all, and a faster network.


_DECODER = msgspec.msgpack.Decoder(list[list[SequenceRef]])


def whole_request(share: MfcShare, data: dist.ProcessGroup) -> MfcRequest:
    """Return the request with the sequences of all data ranks. Every rank of the mesh must call it.

    ``data``: the group of this rank along the data axis.
    """
    parts = [_DECODER.decode(part) for part in gather_bytes(msgspec.msgpack.encode(share.own), data)]
    minibatches = [list(minibatch) for minibatch in zip(*parts, strict=True)]
    return msgspec.structs.replace(share.request, minibatches=minibatches)
