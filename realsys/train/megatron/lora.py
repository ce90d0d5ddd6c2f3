"""Low-rank adapters (Hu et al., 2021) on the linear layers of Megatron's transformer layers.

    y = W' x,  W' = round(W + (alpha / rank) B A)        W frozen, A [rank, in], B [out, rank] trained; B = 0 at first

W' is the weight that is served, rounded to the model's dtype. The forward pass uses it too, so the
policy that is trained is, bit by bit, the one that is served: in bf16 the rounding moves a log-prob by
more than several steps at a low learning rate do. The servers get A and B, and merge them with the same bits
(``realsys.weights.low_rank``). Gradients of A and B are those of W x + (alpha / rank) B A x.
Each adapter keeps W, so a layer with an adapter takes the memory of two.

An adapter belongs to one of Megatron's *fused* matrices: q, k and v of a layer share one A, and so
do gate and up. Over tensor ranks it is split like the matrix. The ranks exchange tensors with
``rank`` columns, never ``in`` or ``out``:

    linear_qkv, linear_fc1     A whole on every rank, B split by rows     the gradient of A x is summed over the ranks
    linear_proj, linear_fc2    A split by columns, B whole                A x is summed over the ranks

So every gradient is complete on its rank, with one exception. Under sequence parallelism each rank
sees a part of the tokens only, and the gradient of the whole matrix is a partial sum. It is marked,
and Megatron sums it over the ranks as it does for the weights of norms.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import linear

from realsys.config.schema_train import LoraConfig
from realsys.train.megatron.megatron_core import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from realsys.train.megatron.mesh import MeshGroups
from realsys.weights import low_rank

#: name in ``LoraConfig.targets`` -> the module of a layer, and True if the tensor ranks split its
#: input
_TARGETS = {
    "qkv": ("self_attention.linear_qkv", False),
    "proj": ("self_attention.linear_proj", True),
    "gate_up": ("mlp.linear_fc1", False),
    "down": ("mlp.linear_fc2", True),
}
_CHILD = "adapter"


class Adapter(torch.nn.Module):
    """The adapter of one linear layer on one tensor rank: ``a`` [rank, in], ``b`` [out, rank], or
    this rank's slices.

    ``weight``: the layer's weight on this rank; ``base`` is a copy of it, which stays as it is. ``key``: numbers that
    tell the adapter apart from all others of the model. Call ``draw`` before its first use.
    """

    base: torch.Tensor

    def __init__(
        self,
        weight: torch.Tensor,
        lora: LoraConfig,
        key: tuple[int, ...],
        group: dist.ProcessGroup,
        *,
        split_input: bool,
        sequence_parallel: bool,
    ) -> None:
        super().__init__()
        self.scale = lora.alpha / lora.rank
        self._key = key
        self._group = group
        self._split_input = split_input
        self._sequence_parallel = sequence_parallel
        self.register_buffer("base", weight.detach().clone(), persistent=False)
        self.a = torch.nn.Parameter(weight.new_zeros(lora.rank, weight.shape[1]))
        self.b = torch.nn.Parameter(weight.new_zeros(weight.shape[0], lora.rank))
        split, whole = (self.a, self.b) if split_input else (self.b, self.a)
        set_tensor_model_parallel_attributes(split, True, 1 if split_input else 0, 1)
        set_tensor_model_parallel_attributes(whole, False, -1, 1)
        whole.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    @torch.no_grad()
    def draw(self, seed: int) -> None:
        """Draw A, fp32 on the host: uniform with variance 1 / (3 in), as in the reference implementation. B = 0.

        ``seed`` and ``key`` determine it, the same on any layout.
        """
        key = (seed, *self._key)
        generator = torch.Generator().manual_seed(int(np.random.SeedSequence(key).generate_state(1)[0]))
        ranks = self._group.size() if self._split_input else 1
        whole = torch.empty(self.a.shape[0], self.a.shape[1] * ranks)
        bound = 1.0 / math.sqrt(whole.shape[1])
        whole.uniform_(-bound, bound, generator=generator)
        self.a.copy_(whole.chunk(ranks, 1)[self._group.rank() if self._split_input else 0])
        self.b.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return B A x (alpha / rank) for the linear layer's input ``x``: its gradients are the adapter's."""
        low = linear(x, self.a) * self.scale
        if self._group.size() > 1:
            low = self._exchange(low)
        return linear(low, self.b)

    def merge_into(self, weight: torch.Tensor) -> None:
        """Set the layer's weight on this rank to ``base`` plus the adapter, rounded to its dtype."""
        low_rank.merge(self.base, self.a, self.b, self.scale, weight)

    def _exchange(self, low: torch.Tensor) -> torch.Tensor:
        """Exchange activations [t, 1, rank] over the tensor ranks (under sequence parallelism also
        [t / tp, 1, rank]).
        """
        exchanged: torch.Tensor
        if self._split_input:
            if self._sequence_parallel:
                exchanged = reduce_scatter_to_sequence_parallel_region(low, group=self._group)
            else:
                exchanged = reduce_from_tensor_model_parallel_region(low, group=self._group)
        elif self._sequence_parallel:
            exchanged = gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True, group=self._group)
        else:
            exchanged = copy_to_tensor_model_parallel_region(low, group=self._group)
        return exchanged


def attach(module: torch.nn.Module, lora: LoraConfig, groups: MeshGroups, seed: int) -> None:
    """Freeze a GPTModel except a value head, and add adapters to the layers that ``lora.targets`` names; its outputs do
    not change.

    Call it when the weights are loaded and gradient buffers are not made yet, so that frozen
    weights get none. ``seed`` determines every A, the same on any layout.
    """
    for name, parameter in module.named_parameters():
        # A value head is small, and at zero it would give the adapters no gradient.
        parameter.requires_grad_(name.startswith("value_head."))
    decoder: Any = module.decoder
    config = decoder.config
    for layer in decoder.layers:
        for number, (target, (path, split_input)) in enumerate(_TARGETS.items()):
            if target not in lora.targets:
                continue
            owner = layer.get_submodule(path)
            adapter = Adapter(
                owner.weight,
                lora,
                (layer.layer_number, number),
                groups.tensor,
                split_input=split_input,
                sequence_parallel=config.sequence_parallel,
            )
            owner.add_module(_CHILD, adapter)
            owner.register_forward_hook(_add)
    draw(module, seed)
    if groups.first_stage and config.recompute_granularity is not None:
        # Recomputation drops the gradients of a layer whose input needs none, as the output of a
        # frozen embedding.
        module.get_submodule("embedding").register_forward_hook(_require_grad)


def draw(module: torch.nn.Module, seed: int) -> None:
    """Give all adapters the values that they have at the start of a run with ``seed``. ``merge`` is not done."""
    for part in module.modules():
        if isinstance(part, Adapter):
            part.draw(seed)


def is_adapter(name: str) -> bool:
    """Return True if the parameter with this name belongs to an adapter."""
    return f".{_CHILD}." in name


@torch.no_grad()
def merge(module: torch.nn.Module) -> None:
    """Bring all weights with adapters up to date. Call it whenever adapters or their bases have changed."""
    for owner in module.modules():
        adapter = owner._modules.get(_CHILD)
        if isinstance(adapter, Adapter):
            adapter.merge_into(owner.get_parameter("weight"))


def names_of(owner: str) -> tuple[str, str]:
    """Return the names of A and B of the adapter of the layer ``owner``."""
    return f"{owner}.{_CHILD}.a", f"{owner}.{_CHILD}.b"


def adapter_of(module: torch.nn.Module, name: str) -> Adapter | None:
    """Return the adapter of parameter ``name``; None without one."""
    owner, _, kind = name.rpartition(".")
    adapter = module.get_submodule(owner)._modules.get(_CHILD) if kind == "weight" else None
    return adapter if isinstance(adapter, Adapter) else None


def base_of(module: torch.nn.Module, name: str, parameter: torch.Tensor) -> torch.Tensor:
    """Return the frozen weight under the adapter of parameter ``name``; without one, ``parameter``."""
    adapter = adapter_of(module, name)
    return parameter if adapter is None else adapter.base


def bases(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the frozen weights under all adapters."""
    return [part.base for part in module.modules() if isinstance(part, Adapter)]


def _add(
    owner: torch.nn.Module, inputs: tuple[torch.Tensor], output: tuple[torch.Tensor, torch.Tensor | None]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Give the adapter its gradients: a forward hook of a Megatron linear layer, which returns
    (product, bias that is not added yet).

    The product already contains the adapter, and so does the gradient of the layer's input.
    """
    product, bias = output
    if not torch.is_grad_enabled():
        return output
    part = owner.get_submodule(_CHILD)(inputs[0].detach())
    return product + (part - part.detach()), bias  # plus 0


def _require_grad(_module: torch.nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_()
