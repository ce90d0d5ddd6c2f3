"""The layer spec: replacements for the parts of Megatron's transformer layer that need Transformer
Engine.

* RMSNorm with sequence parallelism.
* Core attention over packed rows, with the rotary embedding inside. Angles are computed once per micro-batch, and
  positions restart with every row. (Megatron's packed rotary embedding does not restart them when the longest segment
  is as long as the whole pack.) A segment may have parents, the segments before it in its row: beginnings that several
  rows share (``realsys.algorithm.prefix_tree``).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from realsys.cluster.gpu_devices import attention_kernel, on_device
from realsys.train.megatron.megatron_core import (
    MLP,
    MegatronModule,
    PackedSeqParams,
    TransformerBlockSubmodules,
    TransformerConfig,
    get_gpt_layer_local_spec,
    set_mlp,
)

log = logging.getLogger(__name__)

#: Token pairs whose attention costs about as much as one more kernel launch: the padding that is
#: worth saving one.
_LAUNCH_COST = 4096


class RMSNorm(torch.nn.Module):
    """Replacement of Megatron's norm.

    Under sequence parallelism its weight's gradient is summed over the tensor ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Each tensor rank normalises its part of the tokens only. Megatron sums the gradients of
        # weights with this mark.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class Above:
    """Keys that the segments of a bucket attend to before their own: those of their parents, padded.

    gather   int64 [chains, width] token of each padded key; with ``scatter``, its place in ``rows``
    chain    int64 [count] the parents of each segment
    visible  bool [count, 1, width of the bucket, width + width of the bucket]
    rows     int64 [r] the parents' tokens, each once
    scatter  int64 [r] padded place of each of ``rows``; None if one has several
    """

    gather: torch.Tensor
    chain: torch.Tensor
    visible: torch.Tensor
    rows: torch.Tensor
    scatter: torch.Tensor | None

    def before(self, x: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Return the keys or values [count, width + own width, heads, d] from all, [t, heads, d], and ``own``."""
        places = self.gather.reshape(-1)
        if self.scatter is None:
            padded = x.index_select(0, places)
        else:
            padded = pad_rows(select_rows(x, self.rows), places, self.scatter)
        chains = padded.reshape(*self.gather.shape, *x.shape[1:])
        return torch.cat([chains.index_select(0, self.chain), own], 1)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Neighbouring segments of similar length, attended as one padded batch.

    start, stop  the tokens of the bucket
    count, width its batch size and padded length
    gather       int64 [count * width] token of each padded place, relative to start; None when nothing is padded
    scatter      int64 [stop - start]  padded place of each token
    real         [count * width, 1] 1 for a token, 0 for padding
    above        of segments with parents
    """

    start: int
    stop: int
    count: int
    width: int
    gather: torch.Tensor | None = None
    scatter: torch.Tensor | None = None
    real: torch.Tensor | None = None
    above: Above | None = None


def make_buckets(
    lengths: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
    parents: Sequence[tuple[int, ...]] = (),
) -> list[Bucket]:
    """Cut the segments into buckets. ``parents``: of each segment; empty: none has any.

    A new bucket starts where padding would cost more than another kernel launch.
    """
    parents = parents or [()] * len(lengths)
    before = [sum(lengths[k] for k in above) for above in parents]
    starts = np.cumsum([0, *lengths]).tolist()
    buckets = []
    first = 0
    while first < len(lengths):
        last, needed = first, 0
        width = above = 0
        while last < len(lengths) and bool(parents[last]) == bool(parents[first]):
            # Attention is quadratic, so the waste of padding is counted in token pairs.
            wider, longer = max(width, lengths[last]), max(above, before[last])
            used = needed + lengths[last] * (before[last] + lengths[last])
            if (last + 1 - first) * wider * (longer + wider) - used > _LAUNCH_COST:
                break
            width, above, needed = wider, longer, used
            last += 1
        members = lengths[first:last]
        bucket = Bucket(starts[first], starts[last], len(members), width)
        if min(members) < width:
            bucket = _padded(bucket, members, device, dtype)
        if above:
            bucket = replace(bucket, above=_above(parents[first:last], starts, width, device))
        buckets.append(bucket)
        first = last
    return buckets


def _padded(bucket: Bucket, members: Sequence[int], device: torch.device, dtype: torch.dtype) -> Bucket:
    size = torch.tensor(members)
    ends = size.cumsum(0)
    place = torch.arange(bucket.width)
    real = place[None, :] < size[:, None]
    # Padding repeats the segment's last token. It is behind all real tokens, so the causal mask
    # hides it from their queries.
    gather = (ends - size)[:, None] + torch.minimum(place[None, :], size[:, None] - 1)
    return replace(
        bucket,
        gather=gather.reshape(-1).to(device),
        scatter=real.reshape(-1).nonzero()[:, 0].to(device),
        real=real.reshape(-1, 1).to(device, dtype),
    )


def _above(parents: Sequence[tuple[int, ...]], starts: Sequence[int], width: int, device: torch.device) -> Above:
    chains = {each: number for number, each in enumerate(dict.fromkeys(parents))}
    tokens = [torch.cat([torch.arange(starts[k], starts[k + 1]) for k in chain]) for chain in chains]
    sizes = torch.tensor([len(each) for each in tokens])
    chain = torch.tensor([chains[each] for each in parents])
    longest = int(sizes.max())
    gather = torch.stack([torch.cat([each, each[-1:].expand(longest - len(each))]) for each in tokens])
    real = torch.arange(longest)[None, :] < sizes[:, None]
    visible = torch.cat(
        [
            real[chain][:, None, :].expand(-1, width, -1),
            torch.ones(width, width, dtype=torch.bool).tril().expand(len(parents), -1, -1),
        ],
        2,
    )
    rows, scatter = torch.cat(tokens), None
    above = [number for each in chains for number in each]
    if len(set(above)) == len(above):  # no segment is above two chains
        scatter = real.reshape(-1).nonzero()[:, 0]
        places = torch.zeros(starts[-1], dtype=torch.int64)
        places[rows] = torch.arange(len(rows))
        gather = places[gather]
    return Above(
        gather.to(device),
        chain.to(device),
        visible[:, None].to(device),
        rows.to(device),
        None if scatter is None else scatter.to(device),
    )


@dataclass
class PackedSegments(PackedSeqParams):
    """The segments of a packed micro-batch, for the attention.

    ``cos``, ``sin``: fp32 [t, 1, head_dim / 2]. ``lengths``, ``parents``: of the segments.
    """

    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    buckets: list[Bucket] | None = None
    lengths: Sequence[int] = ()
    parents: Sequence[tuple[int, ...]] = ()


def pack_segments(
    lengths: Sequence[int],
    inverse_frequencies: torch.Tensor,
    dtype: torch.dtype,
    *,
    kernel: bool,
    magnitude: float = 1.0,
    parents: Sequence[tuple[int, ...]] = (),
) -> PackedSegments:
    """Return the segments of ``lengths``, for CUDA's variable-length kernel if ``kernel``, else as
    padded buckets.

    ``inverse_frequencies``, ``magnitude``: of the rotary embedding (``realsys.model_files.rope``). ``parents``: of
    each segment those before it in its row, from the start on; empty: none has any.
    """
    device = inverse_frequencies.device
    # Positions restart with every row, as if it were alone.
    begins = [sum(lengths[k] for k in above) for above in parents] or [0] * len(lengths)
    positions = on_device(torch.cat([torch.arange(b, b + n) for b, n in zip(begins, lengths, strict=True)]), device)
    # In float32: bf16 has 8 bits, so positions above 256 would share angles.
    angles = positions[:, None].float() * inverse_frequencies
    packed = PackedSegments(
        qkv_format="thd",
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(b + n for b, n in zip(begins, lengths, strict=True)),
        cos=angles.cos()[:, None] * magnitude,
        sin=angles.sin()[:, None] * magnitude,
        lengths=lengths,
        parents=parents,
    )
    if kernel:
        packed.cu_seqlens_q = _ends(lengths, device)
        packed.cu_seqlens_kv = (
            _ends([b + n for b, n in zip(begins, lengths, strict=True)], device) if parents else (packed.cu_seqlens_q)
        )
    else:
        packed.buckets = make_buckets(lengths, device, dtype, parents)
    return packed


def _ends(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    return on_device(torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32), device)


class _Unpad(torch.autograd.Function):
    """Padded places -> tokens. The gradient of padding is zero: its output is read by no token."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, scatter: torch.Tensor, gather: torch.Tensor, real: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(gather, real)
        return x.index_select(0, scatter)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        gather, real = ctx.saved_tensors
        return grads[0].index_select(0, gather).mul_(real), None, None, None


class SwigluMLP(MLP):
    """Megatron's MLP without its options: gate and up projection, no bias, one fused activation."""

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        gate_up, _bias = self.linear_fc1(hidden_states)
        output: tuple[torch.Tensor, torch.Tensor | None] = self.linear_fc2(swiglu(gate_up))
        return output


class PackedAttention(MegatronModule):
    """Causal attention within each packed segment.

    query [t, heads, d], key and value [t, kv_heads, d] -> [t, heads * d]
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, softmax_scale: float | None = None, **_: Any
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        packed_seq_params: PackedSegments,
        **_: Any,
    ) -> torch.Tensor:
        packed = packed_seq_params
        assert packed.cos is not None and packed.sin is not None
        query, key = rotate(query, packed.cos, packed.sin), rotate(key, packed.cos, packed.sin)
        if packed.buckets is None:
            return self._kernel(query, key, value, packed)
        # One split per tensor. Each slice would have a gradient of the whole size, and these would
        # be added up.
        sizes = [bucket.stop - bucket.start for bucket in packed.buckets]
        queries, keys, values = (torch.split(x, sizes) for x in (query, key, value))
        parts = zip(queries, keys, values, packed.buckets, strict=True)
        outputs = [self._bucket(*part, (key, value)) for part in parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _kernel(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSegments
    ) -> torch.Tensor:
        assert packed.max_seqlen_q is not None and packed.max_seqlen_kv is not None
        if packed.parents:  # the keys of each row in one piece
            order = [piece for number, above in enumerate(packed.parents) for piece in (*above, number)]
            pieces = [torch.split(x, list(packed.lengths)) for x in (key, value)]
            key, value = (torch.cat([each[number] for number in order]) for each in pieces)
        ends, longest = (packed.cu_seqlens_q, packed.cu_seqlens_kv), (packed.max_seqlen_q, packed.max_seqlen_kv)
        out = attention_kernel()(query, key, value, ends, longest, self.scale)
        return out.reshape(out.shape[0], -1)

    def _bucket(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bucket: Bucket,
        every: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Attend within a bucket. ``every``: keys and values of all tokens."""

        def batched(x: torch.Tensor) -> torch.Tensor:
            if bucket.gather is not None and bucket.scatter is not None:
                x = pad_rows(x, bucket.gather, bucket.scatter)
            return x.reshape(bucket.count, bucket.width, x.shape[1], x.shape[2])

        query, key, value = batched(query), batched(key), batched(value)
        if bucket.above is not None:
            key, value = (bucket.above.before(x, own) for x, own in zip(every, (key, value), strict=True))
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=None if bucket.above is None else bucket.above.visible,
            is_causal=bucket.above is None,
            scale=self.scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        flat = attended.transpose(1, 2).reshape(bucket.count * bucket.width, -1)
        if bucket.gather is None:
            return flat
        return apply(_Unpad, flat, bucket.scatter, bucket.gather, bucket.real)


def block_spec(config: TransformerConfig, layers: int) -> TransformerBlockSubmodules:
    """Return the spec of this pipeline stage's decoder block of ``layers`` layers."""
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    spec.submodules.input_layernorm = RMSNorm
    spec.submodules.pre_mlp_layernorm = RMSNorm
    set_mlp(spec, SwigluMLP)
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=RMSNorm)


# ---- elementwise parts of the layer with explicit backward passes
#
# Memory traffic between elementwise operations bounds the step of a small model on a CPU, and costs a tenth of a large
# model's on a GPU. Each function here replaces a chain of operations that autograd would run one by one.


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


class Fused:
    """An elementwise function that torch compiles to one kernel. If it cannot, the function runs as it is written.

    A chain of elementwise operations reads and writes the GPU's memory once for each operation, and the kernel once.
    It computes in float32 and rounds its result only. Compiling takes seconds, once per process and dtype, and needs
    Triton and a C compiler.
    """

    def __init__(self, function: Callable[..., torch.Tensor], backend: str = "inductor") -> None:
        self.written = function
        self.backend = backend
        self._compiled: Callable[..., torch.Tensor] | None = None

    @property
    def is_compiled(self) -> bool:
        """True after a call that ran the kernel."""
        return self._compiled not in (None, self.written)

    def on(self, device: torch.device) -> Callable[..., torch.Tensor]:
        """Return the kernel for a GPU, and the function as it is written for a CPU: compiling would take longer."""
        return self if device.type == "cuda" else self.written

    def __call__(self, *inputs: Any) -> torch.Tensor:
        if self._compiled is None:
            self._compiled = torch.compile(self.written, fullgraph=True, dynamic=True, backend=self.backend)
        try:
            return self._compiled(*inputs)
        except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
            cause = str(error).strip().partition("\n")[0]
            log.warning("%s is not one kernel, because it cannot be compiled: %s", self.written.__name__, cause)
            self._compiled = self.written
            return self.written(*inputs)


@Fused
def swiglu_kernel(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.float().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


@Fused
def swiglu_gradient_kernel(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    gate, up = x.float().chunk(2, -1)
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    return torch.cat([grad * up * (sigmoid + silu - silu * sigmoid), grad * silu], -1).to(x.dtype)


@Fused
def rotation_kernel(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class _Swiglu(torch.autograd.Function):
    """[..., 2n] -> [..., n]: silu of the first half times the second."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        if x.is_cuda:
            return swiglu_kernel(x)
        gate, up = x.chunk(2, -1)
        activated: torch.Tensor = torch.nn.functional.silu(gate).mul_(up)
        return activated

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        if x.is_cuda:
            return swiglu_gradient_kernel(x, grads[0])
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
    if x.is_cuda:
        return rotation_kernel(x, cos, sin if sign > 0 else -sin)
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

    Its backward pass copies rows; that of index_select adds them up one by one, which repeated rows need.
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


def select_rows(x: torch.Tensor, rows: torch.Tensor, *, repeated: bool = False) -> torch.Tensor:
    """Return ``x[rows]``. The ``rows`` must be distinct, unless they may be ``repeated``."""
    return x.index_select(0, rows) if repeated else apply(_Select, x, rows)
