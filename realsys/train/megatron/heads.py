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

from realsys.config.dataflow import TEACHER_TOKENS
from realsys.model_files.architecture import HfModel, stage_layers
from realsys.train.megatron.layers import Fused, block_spec, select_rows
from realsys.train.megatron.megatron_core import GPTModel, TransformerConfig, gather_from_sequence_parallel_region
from realsys.train.megatron.mesh import MeshGroups
from realsys.train.worker.packing import MicroBatch


@dataclass(frozen=True, slots=True)
class Outputs:
    """The model's outputs that a loss reads, fp32 [a] over the loss tokens of a micro-batch.

    lm head     logprobs and entropy, which has a gradient only if train.ppo.entropy_coef > 0; highest, the log-prob of
                the most probable token, without one; top [a, k], the log-probs of the teacher's tokens if the batch has
                them, with a gradient; -inf for a token that this model does not have
    value head  values, of the state before each token; or scores [n], the values at ``MicroBatch.ends``, if it has them
    """

    logprobs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    highest: torch.Tensor | None = None
    top: torch.Tensor | None = None
    values: torch.Tensor | None = None
    scores: torch.Tensor | None = None


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
        if batch.ends is not None:
            return Outputs(scores=self.evaluate(batch, hidden, batch.ends))
        if self._kind == "value":
            return Outputs(values=self.evaluate(batch, hidden, batch.rows))
        projected = self._projected(batch, hidden, self._scoring, temperature)
        teacher = batch.arrays.get(TEACHER_TOKENS)
        if teacher is None:
            return Outputs(*projected_logprobs(*projected))
        states, weight, targets, how = projected
        asked = torch.cat([targets[:, None], teacher], 1)
        logprobs, entropy, highest = projected_logprobs(states, weight, asked, how)
        top = logprobs[:, 1:].masked_fill(teacher >= how.vocab, -torch.inf)
        return Outputs(logprobs[:, 0], entropy, highest, top)

    def logprobs(self, batch: MicroBatch, hidden: torch.Tensor) -> torch.Tensor:
        """Return the log-probs of the loss tokens, fp32 [a]. For an lm head."""
        return projected_logprobs(*self._projected(batch, hidden, replace(self._scoring, entropy=False)))[0]

    def top_logprobs(self, batch: MicroBatch, hidden: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the k most probable tokens at each loss token, int64 [a, k], and the log-probs of the loss token and
        of these, fp32 [a, 1 + k]. For an lm head.
        """
        states, weight, targets, how = self._projected(batch, hidden, replace(self._scoring, entropy=False))
        tokens = top_tokens(states, weight, k, how)
        return tokens, projected_logprobs(states, weight, torch.cat([targets[:, None], tokens], 1), how)[0]

    def _projected(
        self, batch: MicroBatch, hidden: torch.Tensor, how: Scoring, temperature: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Scoring]:
        """Return the arguments of ``projected_logprobs`` for the loss tokens."""
        module = self._module
        assert batch.targets is not None
        own = batch.temperature if temperature is None else temperature
        how = how if own is None else replace(how, temperature=own)
        # With a single stage the tied embedding is the head. With several, the last stage has its
        # own copy of it.
        tied = module.share_embeddings_and_output_weights and self._groups.first_stage
        weight = module.embedding.word_embeddings.weight if tied else module.output_layer.weight
        return self._states(batch, hidden, batch.rows), weight, batch.targets, how

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
# It is one autograd function. Both passes make the logits chunk by chunk, and keep none: from the forward to the
# backward pass there are four numbers per token. On a GPU each pass reads the logits of a chunk in one kernel. The
# weight's gradient is added up in fp32, in Megatron's gradient buffer. (Megatron's own cross entropy keeps fp32 logits,
# and has no temperature and no entropy.)


@dataclass(frozen=True, slots=True)
class Scoring:
    """The settings of scoring.

    temperature       of the distribution, as in generation: one, or fp32 [n] with one for each row
    chunk             rows whose logits exist at the same time; 0: all
    entropy           True if the entropy is computed
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

    def shard(self, weight: torch.Tensor) -> tuple[int, int]:
        """Return the first token of this rank's shard and the number of its tokens: padding has no probability."""
        if self.group is None or self.group.size() == 1:
            return 0, len(weight)
        first = self.group.rank() * len(weight)
        return first, min(len(weight), (self.vocab or self.group.size() * len(weight)) - first)

    def parts(self, rows: int) -> list[slice]:
        """Return the chunks of ``rows`` rows."""
        step = self.chunk or max(1, rows)
        return [slice(start, start + step) for start in range(0, rows, step)]

    def reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Reduce ``tensor`` over the shards, in place."""
        if self.group is not None and self.group.size() > 1 and tensor.numel():
            dist.all_reduce(tensor, op, group=self.group)


def _logits(hidden: torch.Tensor, weight: torch.Tensor, how: Scoring) -> torch.Tensor:
    """Return new logits [n, V/tp], rounded to the model's dtype or not, as in generation (``model.head_dtype``)."""
    if how.fp32 and hidden.is_cuda and hidden.dtype is not torch.float32:
        # The kernel adds up in fp32 anyway; a copy of the weight in fp32 would be gigabytes.
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return hidden.float() @ weight.float().t() if how.fp32 else hidden @ weight.t()


def _scaled(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Return ``logits`` / ``temperature`` in fp32, on a CPU in the same memory. A kernel has no temporaries."""
    wide = logits.float()
    return wide / temperature if wide.is_cuda else wide.div_(temperature)


@Fused
def sums_kernel(logits: torch.Tensor, temperature: torch.Tensor, entropy: bool) -> torch.Tensor:
    """Return of each row of ``logits`` / ``temperature`` [n, 1], fp32 [2 or 3, n]: the largest entry m, the sum of
    exp(z) over all entries m + z, and that of z exp(z). Like the next one it may overwrite ``logits``.
    """
    z = _scaled(logits, temperature)
    peak = z.amax(-1)
    z = z.sub_(peak[:, None])
    p = z.exp()
    return torch.stack([peak, p.sum(-1), *([z.mul_(p).sum(-1)] if entropy else [])])


@Fused
def logit_gradient_kernel(
    logits: torch.Tensor,
    dtype: torch.dtype,
    columns: torch.Tensor,
    temperature: torch.Tensor,
    normaliser: torch.Tensor,
    grad: torch.Tensor,
    entropy: torch.Tensor | None = None,
    grad_entropy: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the gradient of ``logits`` [n, V/tp] in ``dtype``. All others are [n, 1].

    d logp / dz = onehot - p,   dH / dz = -p (log p + H),   z = logits / temperature

    columns  of the targets in this shard; one that is outside of it is another rank's
    """
    logp = _scaled(logits, temperature).sub_(normaliser)
    is_target = torch.arange(logits.shape[1], device=logits.device) == columns
    if entropy is None or grad_entropy is None:
        return logp.exp_().add_(is_target, alpha=-1).mul_(-grad / temperature).to(dtype)
    p = logp.exp()
    curved = logp.add_(entropy).mul_(p).mul_(-grad_entropy / temperature)
    return p.add_(is_target, alpha=-1).mul_(-grad / temperature).add_(curved).to(dtype)


class _ProjectedLogprobs(torch.autograd.Function):
    """Projection, log-probs and entropy, in chunks."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, how: Scoring
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        (first, size), (rows, asked) = how.shard(weight), targets.shape
        columns = targets - first
        is_here, at = (columns >= 0) & (columns < size), columns.clamp(0, size - 1)
        temperature = how.temperature
        if not isinstance(temperature, torch.Tensor):
            temperature = torch.full((rows,), temperature, dtype=torch.float32, device=hidden.device)
        sums = temperature.new_empty(asked + (3 if how.entropy else 2), rows)  # logits of the targets; the kernel's
        for part in how.parts(rows):  # the logits of a chunk are free before the next ones are made
            logits = _logits(hidden[part], weight[:size], how)
            sums[:asked, part] = logits.gather(1, at[part]).t()
            sums[asked:, part] = sums_kernel.on(hidden.device)(logits, temperature[part, None], how.entropy)
            del logits
        own, total = sums[asked], sums[asked + 1]
        # The largest logit of all shards is subtracted, so that no exponential overflows.
        peak = own.clone()
        how.reduce(peak, dist.ReduceOp.MAX)
        shift = own - peak
        if how.entropy:
            sums[-1] += shift * total
        sums[asked + 1 :] *= shift.exp()
        sums[:asked] = (sums[:asked] / temperature - peak).masked_fill(~is_here.t(), 0.0)
        how.reduce(sums)  # one reduction, because each costs a latency
        log_total = total.log()
        logprobs = (sums[:asked] - log_total).t()
        entropy = log_total - sums[-1] / total if how.entropy else None
        ctx.save_for_backward(hidden, weight, columns, temperature, peak + log_total, entropy)
        ctx.how = how
        highest = -log_total
        ctx.mark_non_differentiable(highest, *([] if entropy is None or how.entropy_gradient else [entropy]))
        return logprobs, entropy, highest

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        hidden, weight, columns, temperature, normaliser, entropy = ctx.saved_tensors
        how: Scoring = ctx.how
        _, size = how.shard(weight)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        total = _gradient_buffer(weight) if ctx.needs_input_grad[1] else None
        several = columns.shape[1] > 1
        # With several targets of a row the kernel makes the part of -p, and the others are added before it is rounded.
        inputs = [columns[:, 0] if not several else columns.new_full((len(columns),), -1), temperature, normaliser]
        inputs += [grads[0].sum(1), *([entropy, grads[1]] if how.entropy_gradient else [])]
        for part in how.parts(len(columns)):
            logits = _logits(hidden[part], weight[:size], how)
            of_rows = (each[part, None] for each in inputs)
            dtype = torch.float32 if several else weight.dtype
            slope = logit_gradient_kernel.on(hidden.device)(logits, dtype, *of_rows)
            del logits
            if several:
                slope = _add_targets(slope, columns[part], grads[0][part] / temperature[part, None]).to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(slope, weight[:size], out=grad_hidden[part])
            if total is not None:
                _add_product(total[:size], slope.t(), hidden[part])
            del slope
        if grad_hidden is not None:
            how.reduce(grad_hidden)  # each rank computed the part of its shard of the vocabulary
        return grad_hidden, None if total is None else _rest_of(weight, total), None, None


def _add_targets(slope: torch.Tensor, columns: torch.Tensor, grads: torch.Tensor) -> torch.Tensor:
    """Add ``grads`` [n, m] to ``slope`` [n, V/tp] at ``columns`` [n, m], if these are in the shard."""
    is_here, at = (columns >= 0) & (columns < slope.shape[1]), columns.clamp(0, slope.shape[1] - 1)
    grads = grads.masked_fill(~is_here, 0.0)
    # The sampled token may be one of the others, which differ: two calls, so that the order of the sums is fixed.
    return slope.scatter_add_(1, at[:, :1], grads[:, :1]).scatter_add_(1, at[:, 1:], grads[:, 1:])


def _gradient_buffer(weight: torch.Tensor) -> torch.Tensor:
    """Return where the gradient of ``weight`` is added up: Megatron's buffer, or else zeros. fp32."""
    buffer: torch.Tensor | None = getattr(weight, "main_grad", None)
    return torch.zeros_like(weight, dtype=torch.float32) if buffer is None else buffer


def _rest_of(weight: torch.Tensor, total: torch.Tensor) -> torch.Tensor | None:
    """Return what autograd still has to add to the gradient of ``weight``."""
    if getattr(weight, "main_grad", None) is not total:
        return total.to(weight.dtype)
    if getattr(weight, "zero_out_wgrad", False):
        return None  # Megatron's mark of a weight that is also the embedding, whose gradient follows
    # Megatron's hook must see a gradient, and does not add it.
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.empty_like(weight)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add ``a`` @ ``b`` to ``total`` in fp32."""
    if a.dtype is total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a @ b)


def projected_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, how: Scoring
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return log-probs of ``targets``, entropies, and log-probs of the most probable tokens, fp32 [n] each, in nats.

    ``hidden`` [n, h], this rank's ``weight`` [V/tp, h], ``targets`` int64 [n]; or [n, m] for m log-probs of each row,
    whose tokens after the first one differ from each other. ``hidden`` is the same on all ranks of ``how.group``, and
    so are the results and the gradient of ``hidden``. The entropy is None without ``how.entropy``, and has a gradient
    only with ``how.entropy_gradient``.
    """
    function: Any = _ProjectedLogprobs
    one = targets.dim() == 1
    logprobs, entropy, highest = function.apply(hidden, weight, targets[:, None] if one else targets, how)
    return logprobs[:, 0] if one else logprobs, entropy, highest


@torch.no_grad()
def top_tokens(hidden: torch.Tensor, weight: torch.Tensor, k: int, how: Scoring) -> torch.Tensor:
    """Return the k most probable tokens after each of ``hidden``, int64 [n, k], in descending order.

    Arguments as in ``projected_logprobs``; the result is the same on all ranks of ``how.group``.
    """
    first, size = how.shard(weight)
    own = min(k, len(weight))
    values = torch.empty(len(hidden), own, dtype=torch.float32, device=hidden.device)
    tokens = torch.empty(len(hidden), own, dtype=torch.int64, device=hidden.device)
    for part in how.parts(len(hidden)):
        logits = _logits(hidden[part], weight, how)
        logits[:, size:] = -torch.inf  # padding
        values[part], tokens[part] = logits.topk(own)
        del logits
    tokens += first
    if how.group is None or how.group.size() == 1:
        return tokens
    shards = [[torch.empty_like(each) for _ in range(how.group.size())] for each in (values, tokens)]
    for gathered, each in zip(shards, (values, tokens), strict=True):
        dist.all_gather(gathered, each, group=how.group)
    all_values, all_tokens = (torch.cat(gathered, 1) for gathered in shards)
    return all_tokens.gather(1, all_values.topk(k).indices)
