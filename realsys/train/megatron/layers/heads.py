"""The model up to its last hidden states, and the two heads that read them.

    tokens -> HiddenStatesModel -> hidden [t, 1, h] -> selected rows -> lm head     log-probs, entropies
                                                                     -> value head  values

Only the rows that a result needs reach a head. Logits of prompt tokens would be most of its work,
and no one reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist

from realsys.hf.architecture import HfModel, stage_layers
from realsys.train.megatron.layers.fused import select_rows
from realsys.train.megatron.layers.spec import block_spec
from realsys.train.megatron.megatron_core import GPTModel, TransformerConfig, gather_from_sequence_parallel_region
from realsys.train.megatron.mesh import MeshGroups
from realsys.train.packing import MicroBatch
from realsys.train.vocab_logprob import Scoring, projected_logprobs


@dataclass(frozen=True, slots=True)
class Outputs:
    """The model's outputs that a loss reads, fp32 [a] over the loss tokens of a micro-batch.

    lm head     logprobs and entropy; the entropy has a gradient only if train.ppo.entropy_coef > 0
    value head  values, of the state before each token
    """

    logprobs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    values: torch.Tensor | None = None


class HiddenStatesModel(GPTModel):
    """Megatron's GPTModel without its output layer: it returns the hidden states [t, 1, h] after
    the final norm.
    """

    def _postprocess(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states


class ValueHead(torch.nn.Module):
    """One number per state: a row vector [1, h], the same on every tensor rank.

    It is zero until it is loaded.
    """

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden, dtype=dtype))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the values of ``states`` [n, h], any dtype, as fp32 [n]."""
        return torch.nn.functional.linear(states.float(), self.weight.float())[:, 0]


def build_model(model: HfModel, megatron: TransformerConfig, groups: MeshGroups) -> HiddenStatesModel:
    """Build this rank's shard with unset parameters.

    On the last stage it has ``output_layer`` or ``value_head``.
    """
    module = HiddenStatesModel(
        megatron,
        block_spec(megatron, stage_layers(model.layers, groups.mesh.layout.pipeline)[groups.pipeline_rank]),
        vocab_size=model.vocab_shard(groups.tensor.size()) * groups.tensor.size(),
        max_sequence_length=1 << 20,  # unused: the core attention computes positions
        pre_process=groups.first_stage,
        post_process=groups.last_stage,
        parallel_output=True,
        share_embeddings_and_output_weights=model.tied,
        position_embedding_type="none",  # the core attention applies the rotary embedding
    )
    if model.head == "value" and groups.last_stage:
        del module.output_layer
        module.post_process = False  # Megatron reads it as "has an output layer"
        module.value_head = ValueHead(model.hidden, megatron.params_dtype)
    return module


def select_states(
    hidden: torch.Tensor, rows: torch.Tensor, group: dist.ProcessGroup, *, sequence_parallel: bool
) -> torch.Tensor:
    """Return the states at ``rows`` (int64 [n], of all t tokens) as [n, h].

    ``hidden``: [t, 1, h], or this tensor rank's [t / tp, 1, h] under sequence parallelism. The
    result is the same on every rank of ``group`` (tensor), and its gradient must be the same, too.
    """
    if sequence_parallel:
        # The gradient is the same on all ranks, so each keeps its part of it; a sum over the ranks
        # would count it ``tp`` times.
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=group)
    return select_rows(hidden[:, 0], rows)


class Head:
    """The head of one role on a rank of the last pipeline stage: hidden states -> log-probs, or
    values.

    ``hidden`` is what ``HiddenStatesModel`` returns: [t, 1, h], or [t / tp, 1, h] under sequence
    parallelism.
    """

    def __init__(
        self,
        module: HiddenStatesModel,
        groups: MeshGroups,
        scoring: Scoring,
        *,
        kind: Literal["lm", "value"],
        sequence_parallel: bool,
    ) -> None:
        self._module = module
        self._groups = groups
        self._scoring = scoring
        self._kind = kind
        self._sequence_parallel = sequence_parallel

    def outputs(self, batch: MicroBatch, hidden: torch.Tensor, temperature: float | None = None) -> Outputs:
        """Return what a loss reads, for either kind of head. ``temperature`` None: that of each token."""
        if self._kind == "value":
            return Outputs(values=self.evaluate(hidden, batch.rows))
        logprobs, entropy = self._score(batch, hidden, self._scoring, temperature)
        return Outputs(logprobs=logprobs, entropy=entropy)

    def logprobs(self, batch: MicroBatch, hidden: torch.Tensor) -> torch.Tensor:
        """Return the log-probs of the loss tokens, fp32 [a]. For an lm head."""
        return self._score(batch, hidden, replace(self._scoring, entropy=False))[0]

    def _score(
        self, batch: MicroBatch, hidden: torch.Tensor, how: Scoring, temperature: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        module = self._module
        assert batch.targets is not None
        own = batch.temperature if temperature is None else temperature
        how = how if own is None else replace(how, temperature=own)
        # With a single stage the tied embedding is the head. With several, the last stage has its
        # own copy of it.
        tied = module.share_embeddings_and_output_weights and self._groups.first_stage
        weight = module.embedding.word_embeddings.weight if tied else module.output_layer.weight
        return projected_logprobs(self._states(hidden, batch.rows), weight, batch.targets, how)

    def evaluate(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the values of the states at ``rows``, fp32 [n]. For a value head."""
        values: torch.Tensor = self._module.value_head(self._states(hidden, rows))
        return values

    def _states(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return select_states(hidden, rows, self._groups.tensor, sequence_parallel=self._sequence_parallel)
