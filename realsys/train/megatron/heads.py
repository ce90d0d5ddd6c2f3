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

from realsys.model_files.architecture import HfModel, stage_layers
from realsys.train.megatron.layers import block_spec, select_rows
from realsys.train.megatron.megatron_core import GPTModel, TransformerConfig, gather_from_sequence_parallel_region
from realsys.train.megatron.mesh import MeshGroups
from realsys.train.worker.packing import MicroBatch


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
    hidden: torch.Tensor,
    rows: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    sequence_parallel: bool,
    repeated: bool = False,
) -> torch.Tensor:
    """Return the states at ``rows`` (int64 [n], of all t tokens) as [n, h].

    ``hidden``: [t, 1, h], or this tensor rank's [t / tp, 1, h] under sequence parallelism. The
    result is the same on every rank of ``group`` (tensor), and its gradient must be the same, too. ``repeated``: a
    row may be named more than once.
    """
    if sequence_parallel:
        # The gradient is the same on all ranks, so each keeps its part of it; a sum over the ranks
        # would count it ``tp`` times.
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=group)
    return select_rows(hidden[:, 0], rows, repeated=repeated)


class OutputHead:
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
            return Outputs(values=self.evaluate(batch, hidden, batch.rows))
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
        return projected_logprobs(self._states(batch, hidden, batch.rows), weight, batch.targets, how)

    def evaluate(self, batch: MicroBatch, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the values of the states at ``rows``, fp32 [n]. For a value head."""
        values: torch.Tensor = self._module.value_head(self._states(batch, hidden, rows))
        return values

    def _states(self, batch: MicroBatch, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return select_states(
            hidden,
            rows,
            self._groups.tensor,
            sequence_parallel=self._sequence_parallel,
            repeated=bool(batch.parents),  # the last token of a beginning comes before the next one of several rows
        )


# ---- output projection, log-probs of given tokens and entropy
#
# The vocabulary is sharded over the tensor ranks.
#
#     hidden [n, h], weight [V/tp, h] -> logits [n, V/tp] -> log-probs [n], entropies [n]
#
# It is one autograd function, so that logits are never kept. The backward pass needs only the softmax; with chunks it
# keeps nothing and computes the softmax again, chunk by chunk. (Megatron's own cross entropy overwrites fp32 logits in
# place, and has no temperature and no entropy.)


@dataclass(frozen=True, slots=True)
class Scoring:
    """The settings of scoring.

    temperature       of the distribution, as in generation: one, or fp32 [n] with one for each row
    chunk             rows whose logits exist at the same time; 0: all
    entropy           True if the entropy is computed: one more pass over the logits
    entropy_gradient  True if it has a gradient
    vocab             rows of all shards, without padding at the end; 0: all rows count
    fp32              True if the logits are not rounded to the model's dtype
    group             the tensor ranks, each with its shard of the vocabulary in order; None: one rank has it all
    """

    temperature: float | torch.Tensor = 1.0
    chunk: int = 0
    entropy_gradient: bool = False
    group: dist.ProcessGroup | None = None
    entropy: bool = True
    fp32: bool = False
    vocab: int = 0

    @property
    def sharded(self) -> bool:
        return self.group is not None and self.group.size() > 1

    def without_padding(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the rows of this rank's shard that are tokens: padding must have no probability."""
        if self.group is None or not (self.sharded and self.vocab):
            return weight
        rows = self.vocab - self.group.rank() * len(weight)
        return weight[:rows] if rows < len(weight) else weight

    def parts(self, rows: int) -> list[slice]:
        """Return the chunks of ``rows`` rows: at least one, which is empty without rows."""
        step = self.chunk or max(1, rows)
        return [slice(start, start + step) for start in range(0, max(1, rows), step)]

    def of(self, part: slice) -> Scoring:
        """Return the settings of the rows of one chunk."""
        own = self.temperature
        return replace(self, temperature=own[part]) if isinstance(own, torch.Tensor) else self

    def reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Reduce ``tensor`` over the shards, in place."""
        if self.sharded and tensor.numel():
            dist.all_reduce(tensor, op, group=self.group)

    def local(self, targets: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the targets as columns [n, 1] of this rank's shard of ``size``, and a mask of
        those on another rank (column 0).
        """
        if self.group is None or not self.sharded:
            return targets[:, None], None
        local = targets - self.group.rank() * (-(-self.vocab // self.group.size()) or size)
        elsewhere = (local < 0) | (local >= size)
        return local.masked_fill(elsewhere, 0)[:, None], elsewhere


@dataclass(frozen=True, slots=True)
class _Scored:
    """Scores, fp32 [n] each.

    ``normaliser``: log of the partition function. ``softmax``: fp32 [n, V/tp], or None.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor | None
    normaliser: torch.Tensor
    softmax: torch.Tensor | None


def _logits(hidden: torch.Tensor, weight: torch.Tensor, how: Scoring) -> torch.Tensor:
    """Return the logits, fp32 [n, V/tp]; the caller may overwrite them.

    The product is rounded to the model's dtype or not, as in generation (``model.head_dtype``).
    """
    if not how.fp32:
        logits = (hidden @ weight.t()).float()
    elif hidden.is_cuda and hidden.dtype is not torch.float32:
        # The kernel adds up in fp32 anyway; a copy of the weight in fp32 would be gigabytes.
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        logits = hidden.float() @ weight.float().t()
    if isinstance(how.temperature, torch.Tensor):
        return logits.div_(how.temperature[:, None])
    return logits if how.temperature == 1.0 else logits.div_(how.temperature)


def _score(logits: torch.Tensor, targets: torch.Tensor, how: Scoring, *, keep: bool) -> _Scored:
    """Score ``targets``.

    Overwrites ``logits``, and allocates one more tensor of their size, the softmax.
    """
    # The largest logit of all shards is subtracted, so that no exponential overflows.
    peak = logits.amax(-1)
    how.reduce(peak, dist.ReduceOp.MAX)
    z = logits.sub_(peak[:, None])
    local, elsewhere = how.local(targets, logits.shape[-1])
    target_z = z.gather(1, local)[:, 0]
    if elsewhere is not None:
        target_z.masked_fill_(elsewhere, 0.0)
    p = z.exp()
    # One reduction for the three sums: each reduction costs a latency.
    sums = torch.stack([target_z, p.sum(-1), *([z.mul_(p).sum(-1)] if how.entropy else [])])
    how.reduce(sums)
    target_z, total, *weighted = sums
    log_total = total.log()
    softmax = p.div_(total[:, None]) if keep else None
    entropy = log_total - weighted[0] / total if weighted else None
    return _Scored(target_z - log_total, entropy, peak + log_total, softmax)


class _ProjectedLogprobs(torch.autograd.Function):
    """Projection, log-probs and entropy with one backward pass, in chunks."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, how: Scoring, backward: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        parts = how.parts(len(targets))
        # With a single part the softmax fits into memory: it is kept, not computed again.
        # ``needs_input_grad`` is True of a trained weight even inside no_grad.
        keep = len(parts) == 1 and backward and any(ctx.needs_input_grad)
        scored = [_score(_logits(hidden[part], weight, how.of(part)), targets[part], how, keep=keep) for part in parts]
        logprobs = _join([chunk.logprobs for chunk in scored])
        entropies = [chunk.entropy for chunk in scored if chunk.entropy is not None]
        entropy = _join(entropies) if entropies else None
        normaliser = _join([chunk.normaliser for chunk in scored])
        ctx.save_for_backward(hidden, weight, targets, entropy, normaliser, scored[0].softmax)
        ctx.how = how
        if entropy is not None and not how.entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        hidden, weight, targets, entropy, normaliser, softmax = ctx.saved_tensors
        how: Scoring = ctx.how
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # Chunks are summed in fp32; a single chunk needs no sum.
        grad_weight: torch.Tensor | None = None
        for part in how.parts(len(targets)):
            p = softmax
            if p is None:
                p = _logits(hidden[part], weight, how.of(part)).sub_(normaliser[part, None]).exp_()
            grad_entropy = grads[1][part] if how.entropy_gradient else None
            own_entropy = None if entropy is None else entropy[part]
            slope = _logit_gradient(p, targets[part], grads[0][part], grad_entropy, own_entropy, how.of(part))
            slope = slope.to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(slope, weight, out=grad_hidden[part])
            if ctx.needs_input_grad[1]:
                share = slope.t() @ hidden[part]
                grad_weight = share if grad_weight is None else grad_weight.float().add_(share)
        if grad_hidden is not None:
            how.reduce(grad_hidden)  # each rank computed the part of its shard of the vocabulary
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _logit_gradient(
    p: torch.Tensor,
    targets: torch.Tensor,
    grad_logprobs: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    entropy: torch.Tensor | None,
    how: Scoring,
) -> torch.Tensor:
    """Return the gradient of the logits, fp32 [n, V/tp], in the memory of the softmax ``p``.

    d logp / dz = onehot - p,   dH / dz = -p (log p + H),   z = logits / temperature
    """
    scale = grad_logprobs / how.temperature
    local, elsewhere = how.local(targets, p.shape[-1])
    if grad_entropy is None or entropy is None:
        gradient = p.mul_(-scale[:, None])
    else:
        scale_entropy = grad_entropy / how.temperature
        curved = torch.special.entr(p).mul_(scale_entropy[:, None])  # entr: -p log p, 0 at 0
        gradient = p.mul_(-(scale + scale_entropy * entropy)[:, None]).add_(curved)
    at_target = scale if elsewhere is None else scale.masked_fill(elsewhere, 0.0)
    # index_put_ has a deterministic kernel on CUDA (``train.deterministic``), scatter_add_ has none.
    rows = torch.arange(len(local), device=local.device)
    return gradient.index_put_((rows, local[:, 0]), at_target, accumulate=True)


def _join(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def projected_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, how: Scoring
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log-probs and entropies of ``targets``, fp32 [n] each, in nats.

    ``hidden`` [n, h], this rank's ``weight`` [V/tp, h], ``targets`` int64 [n]. ``hidden`` is the
    same on all ranks of ``how.group``, and so are the results and the gradient of ``hidden``. The
    entropy is None without ``how.entropy``, and has a gradient only with ``how.entropy_gradient``.
    """
    function: Any = _ProjectedLogprobs
    logprobs, entropy = function.apply(hidden, how.without_padding(weight), targets, how, torch.is_grad_enabled())
    return logprobs, entropy
