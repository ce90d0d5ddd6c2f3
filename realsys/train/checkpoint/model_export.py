"""Writes the actor of a checkpoint as a plain HF directory, in this process alone: no rank is started.

    pieces of all ranks ──PieceReader──> whole tensor, in Megatron's names ──> adapter merged ──> HF tensors ──> file

The tensors are those that the trainer published after this step: a parameter is rounded from its fp32 master copy, as
the optimizer does. A tensor and its adapter are in memory at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from realsys.cluster.commit_folder import checksum_of
from realsys.config.allocation import ACTOR
from realsys.config.dataflow import role_settings
from realsys.config.schema import Config
from realsys.errors import CheckpointError
from realsys.model_files.architecture import HfModel
from realsys.model_files.config_json import read_model
from realsys.train.checkpoint import checkpoint_files as files
from realsys.train.checkpoint.checkpoint_files import RankIndex
from realsys.train.checkpoint.saver import PARAMETER
from realsys.train.checkpoint.tensors import PieceReader, whole_shard
from realsys.train.megatron import lora
from realsys.train.megatron.hf_model import DTYPES, ParameterMap, ShardMap, mapping_of
from realsys.weights import low_rank
from realsys.weights.disk.dtypes import as_bytes, dtype_name
from realsys.weights.disk.manifest import TensorInfo
from realsys.weights.disk.plain_folders import Origin, write_plain
from realsys.weights.disk.reader import HeldTensor


def export_checkpoint(directory: Path, target: Path, config: Config, model_dir: Path) -> None:
    """Write the actor of the checkpoint ``directory`` to ``target``, which appears whole or not at all.

    config      of the trial: type of the parameters, and strength of the adapters
    model_dir   HF directory of the model that was trained: its sizes, config and tokenizer

    Raises CheckpointError for a damaged checkpoint or one of another model, ModelError for ``model_dir``, and
    WeightsError if ``target`` cannot be written.
    """
    state = files.read_state(directory)
    files.check_sizes(directory, state)
    indexes = [files.read_index(directory, state, stem) for stem in files.role_stems(state, ACTOR)]
    head = role_settings(config, ACTOR).head
    # A reward model may have begun as a language model without a score.
    model = replace(read_model(model_dir, head), has_score=head == "value")
    with PieceReader(directory, indexes) as reader:
        tensors = _ActorTensors(reader, model, config, _mappings(directory, indexes, model))
        origin = Origin(state.version, files.checkpoint_incarnation(directory), state.step, model_dir)
        write_plain(target, origin, tensors.infos(), tensors.read)


def _mappings(directory: Path, indexes: Iterable[RankIndex], model: HfModel) -> dict[str, ParameterMap]:
    """Return parameter -> its HF tensors. Raises CheckpointError unless they are those of ``model``."""
    shapes = {piece.name: piece.whole for index in indexes for piece in index.pieces if piece.kind == PARAMETER}
    mappings: dict[str, ParameterMap] = {}
    for name in shapes:
        if lora.is_adapter(name):
            continue
        match = re.match(r"decoder\.layers\.(\d+)\.", name)  # a checkpoint counts layers over the whole model
        try:
            mappings[name] = mapping_of(name, int(match[1]) if match else None, model.tied)
        except (LookupError, ValueError):
            raise CheckpointError(f"checkpoint {directory} has an unknown parameter {name}") from None
    wanted = model.tensor_shapes()
    found = {tensor for mapping in mappings.values() for tensor in mapping.hf}
    if different := sorted(found ^ wanted.keys()):
        problem = f"{different[0]} is only in one of the two"
        raise CheckpointError(f"checkpoint {directory} is of another model than config.json: {problem}")
    for name, mapping in mappings.items():
        sizes = [math.prod(wanted[tensor]) for tensor in mapping.hf]
        if math.prod(shapes[name]) != sum(sizes):
            problem = f"{name} has shape {list(shapes[name])}"
            raise CheckpointError(f"checkpoint {directory} is of another model than config.json: {problem}")
    return mappings


class _ActorTensors:
    """HF tensors of the actor. ``read`` returns each of them once."""

    def __init__(
        self, reader: PieceReader, model: HfModel, config: Config, mappings: Mapping[str, ParameterMap]
    ) -> None:
        self._reader = reader
        self._model = model
        self._dtype = DTYPES[config.model.dtype]
        adapters = config.train.lora
        self._scale = adapters.alpha / adapters.rank if adapters.rank else 0.0
        self._mappings = mappings
        self._owners = {tensor: name for name, mapping in mappings.items() for tensor in mapping.hf}
        self._ready: dict[str, torch.Tensor] = {}  # parts of parameters that were read, and are not written yet

    def infos(self) -> dict[str, TensorInfo]:
        """Return type and shape of each tensor, layer by layer."""
        dtype = dtype_name("weights", torch.empty(0, dtype=self._dtype))
        return {name: TensorInfo(dtype, list(shape), "", []) for name, shape in self._model.tensor_shapes().items()}

    def read(self, tensor: str) -> HeldTensor:
        """Return a tensor. Raises CheckpointError if the checkpoint is damaged."""
        if tensor not in self._ready:
            name = self._owners[tensor]
            mapping = self._mappings[name]
            parts = ShardMap(self._model, 0, 1).split(mapping, self._parameter(name))
            self._ready |= zip(mapping.hf, map(torch.Tensor.contiguous, parts), strict=True)
        data = as_bytes(self._ready.pop(tensor))
        return HeldTensor(checksum_of(data.data), data)

    def _parameter(self, name: str) -> torch.Tensor:
        """Return a parameter of the whole model, as the trainer has it: with its adapter, rounded to its type."""
        whole = self._rounded(name)
        owner, _, kind = name.rpartition(".")
        a, b = lora.names_of(owner)
        if kind != "weight" or not self._reader.kinds(a):
            return whole
        return low_rank.merged(whole, self._rounded(a), self._rounded(b), self._scale)

    def _rounded(self, name: str) -> torch.Tensor:
        shape = self._reader.kinds(name)[PARAMETER]
        return self._reader.read(PARAMETER, whole_shard(name, shape)).view(shape).to(self._dtype)
