"""Places of a role's training state on this rank: one slot per parameter.

Megatron has four ways to keep it: fp32 parameters stepped in place, bf16 parameters with fp32 master
copies, and each of the two with the optimizer's part cut into one range per data rank (distributed
optimizer).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from realsys.train.calls.role import Role
from realsys.train.checkpoint.tensors import Shard, split_shard, whole_shard
from realsys.train.megatron.layers import lora
from realsys.train.megatron.megatron_core import DistributedOptimizer
from realsys.train.megatron.mesh import MeshGroups

_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
_STEP = "step"  # name of the optimizers for their count of steps
_GATE_UP = ".linear_fc1."  # part of the name of matrices in which every tensor rank has gate above up


@dataclass(frozen=True, slots=True)
class Held:
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
        """Replace the optimizer states of the parameter by ``tensors``, which any kind of Adam may have written."""
        self.optimizer.state.pop(self.key, None)
        state = dict(tensors)
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

    ``held``: None if the parameter is not trained. ``writes``: True on one of the ranks with equal copies.
    """

    shard: Shard
    parameter: torch.Tensor  # the model's copy of the shard
    held: Held | None
    writes: bool

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


def _shard_of(module: Any, local: str, parameter: Any, groups: MeshGroups, vocab: int) -> Shard:
    name = _EMBEDDING if _is_tied_head(module, local) else _global_name(module, local)
    shape = tuple(parameter.shape)
    if not _is_split(parameter):
        return whole_shard(name, shape)
    dim: int = parameter.partition_dim
    stacked = 2 if _GATE_UP in local and dim == 0 else 1
    total = vocab if name in (_EMBEDDING, _HEAD) else None
    return split_shard(name, shape, dim, groups.tensor_rank, groups.mesh.layout.tensor, stacked, total)


def _held_parameters(optimizer: Any, parameters: Iterable[torch.Tensor]) -> dict[torch.Tensor, Held]:
    """Return model parameter -> the optimizer's part of it; empty without an optimizer."""
    held: dict[torch.Tensor, Held] = {}
    for part in optimizer.chained_optimizers if optimizer is not None else ():
        if part.optimizer is None:  # this stage has no trained parameter
            continue
        groups = part.optimizer.param_groups
        if isinstance(part, DistributedOptimizer):
            for parameter, (group, order) in part.model_param_group_index_map.items():
                start = part._get_model_param_range_map(parameter)["param"].start
                held[parameter] = Held(part.optimizer, groups[group], groups[group]["params"][order], start)
            continue
        group_of = {id(key): group for group in groups for key in group["params"]}
        for parameter in parameters:
            key = parameter if id(parameter) in group_of else getattr(parameter, "main_param", None)
            if key is not None and id(key) in group_of:
                held[parameter] = Held(part.optimizer, group_of[id(key)], key, 0)
    return held


def _global_name(module: Any, local: str) -> str:
    """Return the name with layers counted over the whole model, not over this stage."""
    match = re.match(r"decoder\.layers\.(\d+)\.", local)
    if match is None:
        return local
    layer = module.decoder.layers[int(match[1])].layer_number - 1
    return f"decoder.layers.{layer}.{local[match.end() :]}"
