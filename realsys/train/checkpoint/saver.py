"""Training state of one role on one rank: saved while training continues, and loaded into any layout.

    begin()   copies this rank's share to host memory, which stays pinned  training waits
    a thread  writes the tensors, syncs, then writes the index of them     training continues
    finish()  waits for the thread, and raises its error

Saving communicates with no other rank: every rank writes its own two files, so the thread can never meet
a collective of training. A rank loads the parts that it needs from all files; what all data ranks need
is read by one of them (``ReplicaReader``). A parameter is written as its fp32 master copy if the optimizer has
one; the model's own copy is rounded from it, as the optimizer does after each step.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from realsys.cluster.failpoint import failpoint
from realsys.cluster.files import FileInfo, write_durably
from realsys.errors import CheckpointError
from realsys.train.checkpoint import checkpoint_files as files
from realsys.train.checkpoint.checkpoint_files import CHECKPOINT, CheckpointPiece, CheckpointState, RankIndex
from realsys.train.checkpoint.tensors import (
    PieceReader,
    TensorPart,
    TensorShard,
    TensorSnapshot,
    snapshot,
    split_shard,
    whole_shard,
    write_tensors,
)
from realsys.train.megatron import lora
from realsys.train.megatron.collectives import ReplicaReader, agreed
from realsys.train.megatron.megatron_core import DistributedOptimizer, megatron_random
from realsys.train.megatron.mesh import MeshGroups
from realsys.train.megatron.offload import OffloadCopies
from realsys.train.worker.call_handlers import Role, onloaded

log = logging.getLogger(__name__)

# Kinds of tensors in a file. Every other kind is the name of an optimizer state of the parameter's shape.
PARAMETER = "param"
NUMBER = "number/"  # prefix of an optimizer state that is one number per parameter, such as its step count
GENERATOR = "generator"  # state of a random generator, which belongs to a process and not to the model

_SHARE = 0.8  # share of the master's time limit on a call: the rank gives up first and names the file

Write = Callable[[Path, Sequence[TensorSnapshot]], tuple[FileInfo, list[CheckpointPiece]]]


class CheckpointWriter:
    """Writes one role's share of checkpoints, one at a time. ``write`` puts the tensors on disk.

    ``timeout_s``: bound on the wait of ``finish``; by default shorter than the master's bound on the call,
    so that the error names the file that is late.
    """

    def __init__(self, role: Role, write: Write = write_tensors, timeout_s: float = 0.0) -> None:
        self._role = role
        self._write = write
        self._timeout_s = timeout_s or _SHARE * role.config.cluster.request_timeout_s
        self._copies = OffloadCopies(role.device)
        self._path = Path()  # file that is being written
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def begin(self, directory: Path, step: int, *, trained_only: bool = False) -> None:
        """Copy the current state, and start to write it into the existing ``directory``.

        ``trained_only``: without the frozen parameters. Raises CheckpointError if the last checkpoint has not been
        finished.
        """
        if self._thread is not None:
            raise CheckpointError(f"checkpoint {directory}: the one before it is not finished; call finish() first")
        start = time.perf_counter()
        role = self._role
        layout = role.groups.mesh.layout
        with onloaded(role):
            pieces = dict(enumerate(_snapshots(role, trained_only=trained_only)))
            copies = self._copies.take((str(number), piece.data) for number, piece in pieces.items())
        snapshots = [replace(piece, data=copies[str(number)]) for number, piece in pieces.items()]
        stem = files.rank_stem(role.name, role.groups.rank, layout.world_size)
        phase = role.engine.phase
        index = RankIndex(
            role.name,
            step,
            layout,
            role.groups.rank,
            model_sizes(role),
            phase[0] if phase else None,
            role.state_dict(),
            FileInfo(0, ""),
            [],
        )
        size = sum(entry.data.nbytes for entry in snapshots)
        log.info("checkpoint of step %d: copied %.1f MB in %.3f s", step, size / 1e6, time.perf_counter() - start)
        self._error = None
        # A daemon: a worker that must stop does not wait for a checkpoint that no master will complete.
        self._thread = threading.Thread(
            target=self._run, args=(directory, stem, index, snapshots), name=f"checkpoint-{role.name}", daemon=True
        )
        self._thread.start()

    def finish(self) -> None:
        """Return when both files are on disk and synced. Raises CheckpointError, which names the failed file."""
        if self._thread is None:
            raise CheckpointError(f"{self._role.name}: no checkpoint was begun; call begin() first")
        self._thread.join(self._timeout_s)
        if self._thread.is_alive():
            raise CheckpointError(
                f"checkpoint {self._path}: not on disk after {self._timeout_s:g} s more: the disk hangs, or is too "
                "slow for cluster.request_timeout_s"
            )
        self._thread = None
        if self._error is not None:
            raise self._error

    def _run(self, directory: Path, stem: str, index: RankIndex, snapshots: list[TensorSnapshot]) -> None:
        path = self._path = directory / files.data_file(stem)
        try:
            failpoint("checkpoint.write")
            info, pieces = self._write(path, snapshots)
            # After the tensors are synced: for the master the index says that this rank is done.
            path = self._path = directory / files.index_file(stem)
            write_durably(path, msgspec.json.encode(msgspec.structs.replace(index, file=info, pieces=pieces)))
        except BaseException as error:  # finish() raises it, in the thread that replies to the master
            problem = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            self._error = CheckpointError(f"checkpoint {path}: cannot be written: {problem}")
            log.error("%s", self._error)
            with contextlib.suppress(OSError):  # the disk itself may be the problem
                (directory / files.failure_file(stem)).touch()


@torch.no_grad()
def load_checkpoint(role: Role, directory: Path, *, trained_only: bool = False) -> None:
    """Replace the training state of ``role`` by the one in ``directory``, written by any layout.

    ``trained_only``: frozen parameters and random generators stay as they are. Every rank of the mesh calls it. Raises
    CheckpointError for a checkpoint that is incomplete, belongs to another model, or is damaged in a part that this
    rank or another rank of its data group reads; the role must then not be used.
    """
    indexes = agreed(role.groups.whole, lambda: _read_indexes(role, directory), CheckpointError)
    with onloaded(role), PieceReader(directory, indexes) as reader:
        _start_phase(role, indexes[0].phase)
        slots = [slot for slot in slots_of(role) if slot.trained or not trained_only]
        wanted = agreed(
            role.groups.whole, lambda: [_parts(role, directory, reader, slot) for slot in slots], CheckpointError
        )
        replicas = ReplicaReader(role.groups.data, role.device, CheckpointError)
        for slot, parts, values in zip(slots, wanted, replicas.read(wanted), strict=True):
            _load_slot(slot, {part.kind: value for part, value in zip(parts, values, strict=True)})
        assert role.engine.module is not None
        lora.merge(role.engine.module)
        same = indexes[0].layout == role.groups.mesh.layout
        own = next((index for index in indexes if same and index.rank == role.groups.rank), None)
        if own is not None and not trained_only:
            with PieceReader(directory, [own]) as reader:
                states = {
                    piece.name: reader.read(GENERATOR, whole_shard(piece.name, piece.whole))
                    for piece in own.pieces
                    if piece.kind == GENERATOR
                }
            torch.set_rng_state(states["cpu"])
            if "cuda" in states and torch.cuda.is_available():
                torch.cuda.set_rng_state(states["cuda"])
                tracker = megatron_random.get_cuda_rng_tracker()
                tracked = {
                    name.removeprefix("tracker/"): s for name, s in states.items() if name.startswith("tracker/")
                }
                tracker.set_states(tracked)
    role.load_state_dict(indexes[0].state)  # the same on every rank


def model_sizes(role: Role) -> dict[str, int]:
    """Return the sizes of the built model that must be equal in a checkpoint and the model that loads it."""
    module = role.engine.module
    assert module is not None, "'initialize' comes first"
    megatron, adapters = module.config, role.settings.lora
    return {
        "num_layers": megatron.num_layers,
        "hidden_size": megatron.hidden_size,
        "num_attention_heads": megatron.num_attention_heads,
        "num_query_groups": megatron.num_query_groups,
        "head_dim": megatron.kv_channels,
        "intermediate_size": megatron.ffn_hidden_size,
        "vocab_size": role.engine.model.vocab,
        "tied_embeddings": int(module.share_embeddings_and_output_weights),
        "qkv_bias": int(megatron.add_qkv_bias),
        "qk_norm": int(megatron.qk_layernorm),
        "value_head": int(role.settings.head == "value"),
        "lora_rank": adapters.rank,
        **({f"lora_{target}": 1 for target in sorted(adapters.targets)} if adapters.rank else {}),
    }


# ---- save


def _snapshots(role: Role, *, trained_only: bool) -> Iterator[TensorSnapshot]:
    for slot in slots_of(role):
        if not slot.writes or (trained_only and not slot.trained):
            continue
        yield from snapshot(PARAMETER, slot.shard, slot.master(), slot.start)
        for kind, value in slot.held.tensors().items() if slot.held else ():
            if value.dim():
                yield from snapshot(kind, slot.shard, value.flatten(), slot.start)
            elif slot.is_first:  # the ranks that hold the other parts have the same number
                yield from snapshot(NUMBER + kind, whole_shard(slot.shard.name, (1,)), value.reshape(1))
    states = {"cpu": torch.get_rng_state()}
    if role.device.is_cuda:
        states["cuda"] = torch.cuda.get_rng_state(role.device.device)
        tracked = megatron_random.get_cuda_rng_tracker().get_states()
        states |= {f"tracker/{name}": value for name, value in tracked.items()}
    for name, value in states.items():
        yield from snapshot(GENERATOR, whole_shard(name, tuple(value.shape)), value)


# ---- load


def _read_indexes(role: Role, directory: Path) -> list[RankIndex]:
    """Read and check the indexes of all ranks. Raises CheckpointError."""
    state = files.read_state(directory)
    indexes = [files.read_index(directory, state, stem) for stem in files.role_stems(state, role.name)]
    if not indexes:
        raise CheckpointError(f"checkpoint {directory} has no role {role.name!r}: it has {', '.join(state.roles)}")
    _check_sizes(directory, state, role, indexes[0])
    return indexes


def _parts(role: Role, directory: Path, reader: PieceReader, slot: Slot) -> list[TensorPart]:
    """Return the parts of the checkpoint that make up one parameter: its values, and the optimizer's state."""
    shard, held = slot.shard, slot.held
    kinds = reader.kinds(shard.name)
    if kinds.get(PARAMETER) != shard.whole:
        problem = f"has shape {list(kinds[PARAMETER])}" if kinds else "is not there"
        raise CheckpointError(f"checkpoint {directory}: {shard.name} {problem}, this model's has {list(shard.whole)}")
    parts = [TensorPart(reader, PARAMETER, shard, 0, slot.parameter.numel(), shared=True)]
    if held is None:
        return parts
    # Each data rank of the distributed optimizer owns another range, and reads its own.
    shared = not role.config.train.distributed_optimizer
    for kind in sorted(kinds.keys() - {PARAMETER}):
        if kind.startswith(NUMBER):
            parts.append(TensorPart(reader, kind, whole_shard(shard.name, (1,)), 0, 1, shared))
        else:
            parts.append(TensorPart(reader, kind, shard, held.start, held.start + held.key.numel(), shared))
    return parts


def _load_slot(slot: Slot, values: dict[str, torch.Tensor]) -> None:
    """Load one parameter: the model's copy, the master copy, the optimizer's state. ``values``: flat, by kind."""
    held = slot.held
    parameter = values.pop(PARAMETER)
    slot.parameter.copy_(parameter.view(slot.parameter.shape))
    if held is None:
        return
    slot.master().copy_(parameter[held.start : held.start + held.key.numel()])
    held.restore({k.removeprefix(NUMBER): x.reshape(()) if k.startswith(NUMBER) else x for k, x in values.items()})


def _start_phase(role: Role, phase: str | None) -> None:
    """Make the optimizer to load into, with the settings of this trial: its learning rate may have changed."""
    if phase is None:
        return
    settings = role.config.warmup.optimizer if phase == "warmup" else role.settings.optimizer
    role.engine.use_optimizer(phase, settings)


def _check_sizes(directory: Path, state: CheckpointState, role: Role, index: RankIndex) -> None:
    own = model_sizes(role)
    for name in [*own, *(name for name in index.sizes if name not in own)]:
        theirs, ours = index.sizes.get(name, 0), own.get(name, 0)
        if theirs != ours:
            problem = f"is of another model: {name} {theirs}, this role's has {ours}"
            raise CheckpointError(f"checkpoint {directory}: {role.name} {problem}")
    stems = files.role_stems(state, role.name)
    if len(stems) != index.layout.world_size:
        problem = f"has files of {len(stems)} ranks, not of all ranks of {index.layout}"
        raise CheckpointError(f"checkpoint {directory}: {role.name} {problem}; {CHECKPOINT.advice}")
    for stem in stems:
        CHECKPOINT.check_size(directory / files.data_file(stem), state.files[files.data_file(stem)])


# ---- places of a role's training state on this rank: one slot per parameter
#
# Megatron has four ways to keep it: fp32 parameters stepped in place, bf16 parameters with fp32 master copies, and
# each of the two with the optimizer's part cut into one range per data rank (distributed optimizer).


_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
_STEP = "step"  # name of the optimizers for their count of steps
_GATE_UP = ".linear_fc1."  # part of the name of matrices in which every tensor rank has gate above up


@dataclass(frozen=True, slots=True)
class HeldParameter:
    """The optimizer's part of a parameter on this rank: under ``key``, from ``start`` of the flattened shard on.

    ``group``: the optimizer's parameter group with ``key``.
    """

    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    key: torch.Tensor
    start: int

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the optimizer states of the parameter by name; empty before the first step."""
        state = self.optimizer.state.get(self.key, {})
        tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        # The fused Adam of Transformer Engine and of Apex counts steps per group, not per parameter.
        if tensors and _STEP in self.group:
            tensors[_STEP] = torch.tensor(float(self.group[_STEP]))
        return tensors

    def restore(self, tensors: dict[str, torch.Tensor]) -> None:
        """Replace the optimizer states of the parameter by copies of ``tensors``, which any kind of Adam has written.

        They may be flat, and on any device. Without any, the next step is the first.
        """
        self.optimizer.state.pop(self.key, None)
        self.group.pop(_STEP, None)
        state = {
            name: value.to(self.key.device, copy=True).view(self.key.shape) if value.dim() else value.clone().cpu()
            for name, value in tensors.items()
        }
        if _STEP in state and not isinstance(self.optimizer, torch.optim.Adam | torch.optim.AdamW):
            # Without it, bias correction would begin again on mature moments: twice the step, or more.
            self.group[_STEP] = int(state.pop(_STEP))
        elif _STEP in state and self.group.get("fused"):
            # The fused kernel reads the count on the device. The unfused one reads it on the CPU.
            state[_STEP] = state[_STEP].to(self.key.device)
        if state:
            self.optimizer.state[self.key] = state


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter on this rank.

    ``held``: None if the parameter is not trained, or the distributed optimizer has all of it on other ranks.
    ``writes``: True on one of the ranks with equal copies.
    """

    shard: TensorShard
    parameter: torch.Tensor  # the model's copy of the shard
    held: HeldParameter | None
    writes: bool

    @property
    def trained(self) -> bool:
        return self.parameter.requires_grad

    @property
    def start(self) -> int:
        return self.held.start if self.held else 0

    @property
    def is_first(self) -> bool:
        """True if this part has the first element of the whole tensor."""
        return self.start == 0 and not any(self.shard.boxes[0].offset)

    def master(self) -> torch.Tensor:
        """Return the most exact copy [n] of the flattened shard from ``start`` on."""
        return (self.held.key if self.held else self.parameter).detach().view(-1)


def slots_of(role: Role) -> list[Slot]:
    """Return the parameters of this rank, in the same order on all tensor and data ranks of a stage."""
    module = role.engine.module
    groups = role.groups
    optimizer = role.engine.optimizer
    assert module is not None, "'initialize' comes first"
    parameters = dict(module.named_parameters())
    held = _held_parameters(optimizer, parameters.values())
    # With the distributed optimizer each data rank holds another part, so all of them write.
    divided = optimizer is not None and role.config.train.distributed_optimizer
    slots = []
    for number, (name, parameter) in enumerate(parameters.items()):
        if divided and parameter.requires_grad:
            writes = parameter in held
        else:
            writes = number % groups.mesh.layout.data == groups.data_rank
        if not _is_split(parameter):
            writes = writes and groups.tensor_rank == 0
        if _is_tied_head(module, name):
            writes = False  # the first stage writes the embedding
        shard = _shard_of(module, name, parameter, groups, role.engine.model.vocab)
        # Of a weight with an adapter the frozen part: the weight itself is computed from both.
        slots.append(Slot(shard, lora.base_of(module, name, parameter), held.get(parameter), writes))
    return slots


def _is_split(parameter: torch.Tensor) -> bool:
    """Return True if Megatron has split the parameter over the tensor ranks."""
    return getattr(parameter, "tensor_model_parallel", False)


def _is_tied_head(module: Any, name: str) -> bool:
    """Return True for the copy of the embedding that a later stage uses as its output layer."""
    return bool(module.share_embeddings_and_output_weights) and name == _HEAD


def _shard_of(module: Any, local: str, parameter: Any, groups: MeshGroups, vocab: int) -> TensorShard:
    name = _EMBEDDING if _is_tied_head(module, local) else _global_name(module, local)
    shape = tuple(parameter.shape)
    if not _is_split(parameter):
        return whole_shard(name, shape)
    dim: int = parameter.partition_dim
    stacked = 2 if _GATE_UP in local and dim == 0 else 1
    total = vocab if name in (_EMBEDDING, _HEAD) else None
    return split_shard(name, shape, dim, groups.tensor_rank, groups.mesh.layout.tensor, stacked, total)


def _held_parameters(optimizer: Any, parameters: Iterable[torch.Tensor]) -> dict[torch.Tensor, HeldParameter]:
    """Return model parameter -> the optimizer's part of it; empty without an optimizer."""
    held: dict[torch.Tensor, HeldParameter] = {}
    for part in optimizer.chained_optimizers if optimizer is not None else ():
        if part.optimizer is None:  # this stage has no trained parameter
            continue
        groups = part.optimizer.param_groups
        if isinstance(part, DistributedOptimizer):
            for parameter, (group, order) in part.model_param_group_index_map.items():
                start = part._get_model_param_range_map(parameter)["param"].start
                held[parameter] = HeldParameter(part.optimizer, groups[group], groups[group]["params"][order], start)
            continue
        group_of = {id(key): group for group in groups for key in group["params"]}
        for parameter in parameters:
            key = parameter if id(parameter) in group_of else getattr(parameter, "main_param", None)
            if key is not None and id(key) in group_of:
                held[parameter] = HeldParameter(part.optimizer, group_of[id(key)], key, 0)
    return held


def _global_name(module: Any, local: str) -> str:
    """Return the name with layers counted over the whole model, not over this stage."""
    match = re.match(r"decoder\.layers\.(\d+)\.", local)
    if match is None:
        return local
    layer = module.decoder.layers[int(match[1])].layer_number - 1
    return f"decoder.layers.{layer}.{local[match.end() :]}"
