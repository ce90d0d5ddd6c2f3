"""Training state of one role on one rank: saved while training continues, and loaded into any layout.

    begin()   copies this rank's share to host memory                      training waits
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
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import torch

from realsys.cluster.failpoint import failpoint
from realsys.cluster.files import FileInfo, write_durably
from realsys.errors import CheckpointError
from realsys.train.calls.role import Role
from realsys.train.checkpoint import checkpoint_files as files
from realsys.train.checkpoint.checkpoint_files import CHECKPOINT, CheckpointState, Piece, RankIndex
from realsys.train.checkpoint.slots import Slot, slots_of
from realsys.train.checkpoint.tensors import Part, PieceReader, Snapshot, snapshot, whole_shard, write_tensors
from realsys.train.hooks import onloaded
from realsys.train.megatron.collectives import ReplicaReader, agreed
from realsys.train.megatron.layers import lora
from realsys.train.megatron.megatron_core import megatron_random

log = logging.getLogger(__name__)

# Kinds of tensors in a file. Every other kind is the name of an optimizer state of the parameter's shape.
PARAMETER = "param"
NUMBER = "number/"  # prefix of an optimizer state that is one number per parameter, such as its step count
GENERATOR = "generator"  # state of a random generator, which belongs to a process and not to the model

_SHARE = 0.8  # share of the master's time limit on a call: the rank gives up first and names the file

Write = Callable[[Path, Sequence[Snapshot]], tuple[FileInfo, list[Piece]]]


class CheckpointWriter:
    """Writes one role's share of checkpoints, one at a time. ``write`` puts the tensors on disk.

    ``timeout_s``: bound on the wait of ``finish``; by default shorter than the master's bound on the call,
    so that the error names the file that is late.
    """

    def __init__(self, role: Role, write: Write = write_tensors, timeout_s: float = 0.0) -> None:
        self._role = role
        self._write = write
        self._timeout_s = timeout_s or _SHARE * role.config.cluster.request_timeout_s
        self._path = Path()  # file that is being written
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def begin(self, directory: Path, step: int) -> None:
        """Copy the current state, and start to write it into the existing ``directory``.

        Raises CheckpointError if the last checkpoint has not been finished.
        """
        if self._thread is not None:
            raise CheckpointError(f"checkpoint {directory}: the one before it is not finished; call finish() first")
        start = time.perf_counter()
        role = self._role
        layout = role.groups.mesh.layout
        with onloaded(role):
            snapshots = list(_snapshots(role))
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

    def _run(self, directory: Path, stem: str, index: RankIndex, snapshots: list[Snapshot]) -> None:
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
def load_checkpoint(role: Role, directory: Path) -> None:
    """Replace the training state of ``role`` by the one in ``directory``, written by any layout.

    Every rank of the mesh calls it. Raises CheckpointError for a checkpoint that is incomplete, belongs to
    another model, or is damaged in a part that this rank or another rank of its data group reads; the role must then
    not be used.
    """
    indexes = agreed(role.groups.whole, lambda: _read_indexes(role, directory), CheckpointError)
    with onloaded(role), PieceReader(directory, indexes) as reader:
        _start_phase(role, indexes[0].phase)
        slots = slots_of(role)
        wanted = agreed(
            role.groups.whole, lambda: [_parts(role, directory, reader, slot) for slot in slots], CheckpointError
        )
        replicas = ReplicaReader(role.groups.data, role.device, CheckpointError)
        for slot, parts, values in zip(slots, wanted, replicas.read(wanted), strict=True):
            _load_slot(slot, {part.kind: value for part, value in zip(parts, values, strict=True)})
        assert role.engine.module is not None
        lora.merge(role.engine.module)
        own = _own_index(role, indexes)
        if own is not None:
            _load_generators(directory, own)
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


def _snapshots(role: Role) -> Iterator[Snapshot]:
    for slot in slots_of(role):
        if not slot.writes:
            continue
        yield from snapshot(PARAMETER, slot.shard, slot.master(), slot.start)
        for kind, value in slot.held.tensors().items() if slot.held else ():
            if value.dim():
                yield from snapshot(kind, slot.shard, value.flatten(), slot.start)
            elif slot.is_first:  # the ranks that hold the other parts have the same number
                yield from snapshot(NUMBER + kind, whole_shard(slot.shard.name, (1,)), value.reshape(1))
    for name, value in _generators(role).items():
        yield from snapshot(GENERATOR, whole_shard(name, tuple(value.shape)), value)


def _generators(role: Role) -> dict[str, torch.Tensor]:
    """Return the states of the random generators of this process, uint8 [n] each."""
    states = {"cpu": torch.get_rng_state()}
    if role.device.is_cuda:
        states["cuda"] = torch.cuda.get_rng_state(role.device.device)
        tracked = megatron_random.get_cuda_rng_tracker().get_states()
        states |= {f"tracker/{name}": value for name, value in tracked.items()}
    return states


# ---- load


def _read_indexes(role: Role, directory: Path) -> list[RankIndex]:
    """Read and check the indexes of all ranks. Raises CheckpointError."""
    state = files.read_state(directory)
    indexes = [files.read_index(directory, state, stem) for stem in files.role_stems(state, role.name)]
    if not indexes:
        raise CheckpointError(f"checkpoint {directory} has no role {role.name!r}: it has {', '.join(state.roles)}")
    _check_sizes(directory, state, role, indexes[0])
    return indexes


def _parts(role: Role, directory: Path, reader: PieceReader, slot: Slot) -> list[Part]:
    """Return the parts of the checkpoint that make up one parameter: its values, and the optimizer's state."""
    shard, held = slot.shard, slot.held
    kinds = reader.kinds(shard.name)
    if kinds.get(PARAMETER) != shard.whole:
        problem = f"has shape {list(kinds[PARAMETER])}" if kinds else "is not there"
        raise CheckpointError(f"checkpoint {directory}: {shard.name} {problem}, this model's has {list(shard.whole)}")
    parts = [Part(reader, PARAMETER, shard, 0, slot.parameter.numel(), shared=True)]
    if held is None:
        return parts
    # Each data rank of the distributed optimizer owns another range, and reads its own.
    shared = not role.config.train.distributed_optimizer
    for kind in sorted(kinds.keys() - {PARAMETER}):
        if kind.startswith(NUMBER):
            parts.append(Part(reader, kind, whole_shard(shard.name, (1,)), 0, 1, shared))
        else:
            parts.append(Part(reader, kind, shard, held.start, held.start + held.key.numel(), shared))
    return parts


def _load_slot(slot: Slot, values: dict[str, torch.Tensor]) -> None:
    """Load one parameter: the model's copy, the master copy, the optimizer's state. ``values``: flat, by kind."""
    held = slot.held
    parameter = values.pop(PARAMETER)
    slot.parameter.copy_(parameter.view(slot.parameter.shape))
    if held is None:
        return
    slot.master().copy_(parameter[held.start : held.start + held.key.numel()])
    state = {}
    for kind, value in values.items():
        if kind.startswith(NUMBER):
            state[kind.removeprefix(NUMBER)] = value.cpu().reshape(())
        else:
            state[kind] = value.to(held.key.device).view(held.key.shape)
    held.restore(state)


def _load_generators(directory: Path, index: RankIndex) -> None:
    with PieceReader(directory, [index]) as reader:
        states = {
            piece.name: reader.read(GENERATOR, whole_shard(piece.name, piece.whole))
            for piece in index.pieces
            if piece.kind == GENERATOR
        }
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
        tracker = megatron_random.get_cuda_rng_tracker()
        tracked = {name.removeprefix("tracker/"): s for name, s in states.items() if name.startswith("tracker/")}
        tracker.set_states(tracked)


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


def _own_index(role: Role, indexes: Sequence[RankIndex]) -> RankIndex | None:
    """Return the index that this rank wrote; None if the layout has changed."""
    same = indexes[0].layout == role.groups.mesh.layout
    return next((index for index in indexes if same and index.rank == role.groups.rank), None)
