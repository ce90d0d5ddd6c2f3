"""Imports the names of Megatron-Core that the trainer uses, in one place.

While it is imported, Megatron passes its fused functions to ``torch.compile``. That loads the whole
inductor: half of the import's seconds, and a third of its memory. The fused functions are for GPUs,
and no CPU rank calls them.

Megatron-Core 0.16 to 0.19 are supported. What differs between them is asked here, by what the
installed one has, never by its number.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

#: loggers whose warnings say nothing that a user could act on
_TALKATIVE = (
    # an unknown MLP, once per layer: only its own MLP gets further arguments, which ours does not need
    "megatron.core.transformer.transformer_layer",
    "megatron.core.models.gpt.gpt_model",  # GPTModel gets no new features
    "megatron.core.distributed.distributed_data_parallel",  # it computes the layout of its buffers itself
    "torch.utils.cpp_extension",  # a build of torch for CUDA finds none
)


def _not_compiled(function: Callable[..., Any] | None = None, **_: Any) -> Callable[..., Any]:
    return (lambda decorated: decorated) if function is None else function


@contextlib.contextmanager
def _importing() -> Iterator[None]:
    # it reports missing packages, which are optional
    logging.getLogger("megatron").setLevel(logging.WARNING)
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    torch_compile = torch.compile
    if not torch.cuda.is_available():
        torch.compile = _not_compiled  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():
            # Several modules warn that Apex and Transformer Engine are not installed. Both are
            # optional here. Python 3.12 warns of a backslash in one of Megatron's texts.
            for category in (UserWarning, DeprecationWarning, SyntaxWarning):
                warnings.filterwarnings("ignore", category=category)
            yield
    finally:
        # Other users of torch in this process must find the real function.
        torch.compile = torch_compile


with _importing():
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
    from megatron.core.optimizer import clip_grads, get_megatron_optimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import (
        copy_to_tensor_model_parallel_region,
        gather_from_sequence_parallel_region,
        reduce_from_tensor_model_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
        set_tensor_model_parallel_attributes,
    )
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


#: Global of a group that spans the axis of generalized tensor parallelism -> the same group without that axis, which
#: has one rank here. Megatron-Core 0.19 asks for the former almost everywhere.
ALIASES = {
    name: name.removesuffix(ending)
    for name in vars(parallel_state)
    for ending in ("_WITH_GTP_REMAT", "_WITH_EGTP")
    if name.startswith("_") and name.endswith(ending)
}
# the axis itself: each rank alone, as on that of contexts
ALIASES |= {name: "_CONTEXT_PARALLEL_GROUP" for name in vars(parallel_state) if name.endswith("GTP_WEIGHT_REMAT_GROUP")}


def set_mlp(layer: Any, mlp: type[MLP]) -> None:
    """Let the layers of a spec have ``mlp``. It is made from the same parts as Megatron's own."""
    parts = layer.submodules
    if isinstance(parts.mlp, functools.partial):
        parts.mlp = functools.partial(mlp.as_mlp_submodule, **parts.mlp.keywords)
    else:  # Megatron-Core 0.17 and older name the class
        parts.mlp.module = mlp


def _l2_norm(
    chunk: int, flag: torch.Tensor, lists: list[list[torch.Tensor]], per_tensor: bool
) -> tuple[torch.Tensor, None]:
    """Return the norm of all tensors together, fp32 [1]. It stays on the device."""
    [tensors] = lists
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))[None], None


if clip_grads.l2_norm_impl.__module__ == "megatron.core.utils":
    # Without Transformer Engine and Apex, Megatron's function waits for the device once per parameter.
    clip_grads.l2_norm_impl = _l2_norm

__all__ = [
    "ALIASES",
    "MLP",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "DistributedOptimizer",
    "GPTModel",
    "MegatronModule",
    "MegatronOptimizerConfig",
    "PackedSeqParams",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "copy_to_tensor_model_parallel_region",
    "finalize_model_grads",
    "gather_from_sequence_parallel_region",
    "get_forward_backward_func",
    "get_gpt_layer_local_spec",
    "get_megatron_optimizer",
    "megatron_random",
    "parallel_state",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "set_mlp",
    "set_tensor_model_parallel_attributes",
]
