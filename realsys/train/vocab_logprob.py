"""Log-prob of given tokens and entropy, over logits whose vocabulary is sharded over the tensor ranks.

Megatron's own cross entropy overwrites fp32 logits in place and knows no temperature and no entropy.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class _VocabLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, temperature: float, group: dist.ProcessGroup | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rank, sharded = (0, False) if group is None else (group.rank(), group.size() > 1 and len(targets) > 0)
        size = logits.shape[-1]
        z = logits.float()
        if temperature != 1.0:
            z = z / temperature
        peak = z.amax(-1)
        if sharded:
            dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
        z = z - peak[:, None]
        local = targets - rank * size
        elsewhere = (local < 0) | (local >= size)
        local = local.masked_fill(elsewhere, 0)
        target_z = z.gather(1, local[:, None])[:, 0].masked_fill(elsewhere, 0.0)
        p = z.exp()
        total = p.sum(-1)
        weighted = (p * z).sum(-1)
        if sharded:
            packed = torch.stack([target_z, total, weighted])
            dist.all_reduce(packed, group=group)
            target_z, total, weighted = packed
        p.div_(total[:, None])
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(p, local, elsewhere)
        ctx.dtype, ctx.temperature = logits.dtype, temperature
        ctx.mark_non_differentiable(entropy)
        return target_z - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        p, local, elsewhere = ctx.saved_tensors
        scale = grads[0] / ctx.temperature
        # d logp / d z = onehot - p
        out = p * -scale[:, None]
        out.scatter_add_(1, local[:, None], scale.masked_fill(elsewhere, 0.0)[:, None])
        return out.to(ctx.dtype), None, None, None


def vocab_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, *, temperature: float = 1.0, group: dist.ProcessGroup | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``logits`` [n, V/tp] any dtype, ``targets`` int64 [n] -> log-probs fp32 [n], entropies fp32 [n] (no gradient).

    Both are of the distribution at ``temperature``, in nats. ``group``: the tensor ranks, each with its shard in order.
    """
    function: Any = _VocabLogprob
    logprobs, entropy = function.apply(logits, targets, temperature, group)
    return logprobs, entropy
