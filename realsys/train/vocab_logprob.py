"""The output projection, log-probs of given tokens and entropy, over a vocabulary sharded over the
tensor ranks.

    hidden [n, h], weight [V/tp, h] -> logits [n, V/tp] -> log-probs [n], entropies [n]

It is one autograd function, so that logits are never kept. The backward pass needs only the
softmax; with chunks it keeps nothing and computes the softmax again, chunk by chunk. (Megatron's
own cross entropy overwrites fp32 logits in place, and has no temperature and no entropy.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist


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
