"""The model up to its last hidden states, and the two heads that read them.

    tokens -> HiddenStatesModel -> hidden [t, 1, h] -> the rows that are needed -> lm head     log-probs, entropies
                                                                               -> value head  values

Only the rows that are needed reach a head: logits of prompt tokens would be most of its work, and are for nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from realsys.hf.architecture import HfModel
from realsys.train.megatron.fused import select_rows
from realsys.train.megatron.megatron_core import GPTModel, TransformerConfig, gather_from_sequence_parallel_region
from realsys.train.megatron.mesh import MeshGroups
from realsys.train.megatron.spec import block_spec


class HiddenStatesModel(GPTModel):
    """Megatron's GPTModel, ending with the hidden states [t, 1, h] after the final norm instead of with logits."""

    def _postprocess(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states


class ValueHead(torch.nn.Module):
    """One number per state: a row vector [1, h], the same on every tensor rank. Zero until it is loaded."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden, dtype=dtype))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[n, h] any dtype -> fp32 [n]."""
        return torch.nn.functional.linear(states.float(), self.weight.float())[:, 0]


def build_model(model: HfModel, megatron: TransformerConfig, groups: MeshGroups) -> HiddenStatesModel:
    """This rank's shard, its parameters not yet set. On the last stage it has ``output_layer`` or ``value_head``."""
    module = HiddenStatesModel(
        megatron,
        block_spec(megatron, model.layers // groups.mesh.layout.pipeline),
        vocab_size=model.vocab,
        max_sequence_length=1 << 20,  # only a hint: positions are ours
        pre_process=groups.first_stage,
        post_process=groups.last_stage,
        parallel_output=True,
        share_embeddings_and_output_weights=model.tied,
        position_embedding_type="none",  # the core attention rotates
    )
    if model.head == "value" and groups.last_stage:
        del module.output_layer
        module.post_process = False  # for Megatron that is whether there is an output layer
        module.value_head = ValueHead(model.hidden, megatron.params_dtype)
    return module


def select_states(
    hidden: torch.Tensor, rows: torch.Tensor, group: dist.ProcessGroup, *, sequence_parallel: bool
) -> torch.Tensor:
    """``hidden`` [t, 1, h], or this tensor rank's [t / tp, 1, h]; ``rows`` int64 [n] of all t -> [n, h].

    The same on every tensor rank (``group``), and so must be its gradient.
    """
    if sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=group)
    return select_rows(hidden[:, 0], rows)
