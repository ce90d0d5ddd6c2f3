"""Elementwise parts of the layer with explicit backward passes.

On a CPU, memory traffic between elementwise operations bounds the step of a small model. Each
function here replaces a chain of operations that autograd would run one by one.
"""

from __future__ import annotations

from typing import Any

import torch


class _RmsNorm(torch.autograd.Function):
    """y = x / rms(x) * weight over the last dimension, in float32 inside."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x32 = x.float()
        size = x.shape[-1]
        scale = torch.linalg.vector_norm(x32, dim=-1, keepdim=True).square_().div_(size).add_(eps).rsqrt_()
        normed = x32 * scale
        ctx.save_for_backward(normed, scale, weight)
        scaled: torch.Tensor = (normed * weight).to(x.dtype)
        return scaled

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        normed, scale, weight = ctx.saved_tensors
        grad = grads[0].float()
        product = grad * normed
        grad_weight = product.reshape(-1, product.shape[-1]).sum(0)
        # d/dx: scale * (g w - normed * mean(g w normed))
        mean = (product @ weight.float())[..., None].div_(product.shape[-1])
        grad_x = (grad * weight).addcmul_(normed, mean, value=-1).mul_(scale)
        return grad_x.to(grads[0].dtype), grad_weight.to(weight.dtype), None


class _Swiglu(torch.autograd.Function):
    """[..., 2n] -> [..., n]: silu of the first half times the second."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        activated: torch.Tensor = torch.nn.functional.silu(gate).mul_(up)
        return activated

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        out = torch.empty_like(x)
        grad_gate, grad_up = out.chunk(2, -1)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        torch.mul(grads[0], silu, out=grad_up)
        # d silu = sigmoid + silu - silu * sigmoid
        slope = silu.addcmul(silu, sigmoid, value=-1).add_(sigmoid)
        torch.mul(grads[0], up, out=grad_gate).mul_(slope)
        return out


class _Rotate(torch.autograd.Function):
    """Rotary embedding. Its backward pass is the opposite rotation."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, sin, -1.0), None, None


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float) -> torch.Tensor:
    # In fp32, rounded once at the end, as the generation engines do: in bf16 the error of a score at
    # 32k tokens is 1.5 times as large.
    first, second = x.float().chunk(2, -1)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    out_first, out_second = out.chunk(2, -1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=sign)
    return out.to(x.dtype)


class _Pad(torch.autograd.Function):
    """Rows [n, ...] -> rows[gather].

    Selected rows that ``scatter`` does not name are padding, without a gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gather: torch.Tensor, scatter: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(scatter)
        return x.index_select(0, gather)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (scatter,) = ctx.saved_tensors
        return grads[0].index_select(0, scatter), None, None


class _Select(torch.autograd.Function):
    """Distinct rows of x.

    Its backward pass copies rows; that of index_select would add them up one by one.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.size = x.shape[0]
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (rows,) = ctx.saved_tensors
        grad = grads[0]
        inverse = torch.full((ctx.size,), -1, dtype=torch.int64, device=grad.device)
        inverse[rows] = torch.arange(len(rows), device=grad.device)
        if not len(rows):
            return grad.new_zeros(ctx.size, *grad.shape[1:]), None
        missing = (inverse < 0).view(-1, *(1 for _ in grad.shape[1:]))
        out = grad.index_select(0, inverse.clamp_(min=0))
        return out.masked_fill_(missing, 0), None


def apply(function: Any, *inputs: Any) -> torch.Tensor:
    """Call ``function.apply``, which torch leaves untyped."""
    out: torch.Tensor = function.apply(*inputs)
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise over the last dimension. On CUDA this is torch's own kernel."""
    if x.is_cuda:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    return apply(_RmsNorm, x, weight, eps)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """Return silu(first half) * second half over the last dimension, [..., 2n] -> [..., n]."""
    return apply(_Swiglu, x)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply the rotary embedding to x [t, heads, d]; cos, sin fp32 [t, 1, d / 2]."""
    return apply(_Rotate, x, cos, sin)


def pad_rows(x: torch.Tensor, gather: torch.Tensor, scatter: torch.Tensor) -> torch.Tensor:
    """Return ``x[gather]``.

    Only its places ``scatter`` (one per row of x, in order) get a gradient.
    """
    return apply(_Pad, x, gather, scatter)


def select_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return ``x[rows]``. The ``rows`` must be distinct."""
    return apply(_Select, x, rows)
