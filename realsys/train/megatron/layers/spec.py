"""The layer spec: replacements for the parts of Megatron's transformer layer that need Transformer
Engine.

* RMSNorm with sequence parallelism.
* Core attention over packed sequences, with the rotary embedding inside. Angles are computed once per micro-batch, and
  positions restart with every sequence. (Megatron's packed rotary embedding does not restart them when the longest
  segment is as long as the whole pack.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from realsys.cluster.gpu_devices import attention_kernel
from realsys.train.megatron.layers.fused import apply, pad_rows, rms_norm, rotate, swiglu
from realsys.train.megatron.megatron_core import (
    MLP,
    MegatronModule,
    PackedSeqParams,
    TransformerBlockSubmodules,
    TransformerConfig,
    get_gpt_layer_local_spec,
)
from realsys.train.packing import on_device

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
class Bucket:
    """Neighbouring segments of similar length, attended as one padded batch.

    start, stop  the tokens of the bucket
    count, width its batch size and padded length
    gather       int64 [count * width] token of each padded place, relative to start; None when nothing is padded
    scatter      int64 [stop - start]  padded place of each token
    real         [count * width, 1] 1 for a token, 0 for padding
    """

    start: int
    stop: int
    count: int
    width: int
    gather: torch.Tensor | None = None
    scatter: torch.Tensor | None = None
    real: torch.Tensor | None = None


def make_buckets(lengths: Sequence[int], device: torch.device, dtype: torch.dtype) -> list[Bucket]:
    """Cut the segments into buckets.

    A new bucket starts where padding would cost more than another kernel launch.
    """
    buckets = []
    start = first = 0
    while first < len(lengths):
        width = lengths[first]
        last, wasted = first, 0
        while last < len(lengths):
            # Attention is quadratic, so the waste of padding is counted in token pairs.
            wasted += abs(width * width - lengths[last] * lengths[last])
            if lengths[last] > width or wasted > _LAUNCH_COST:
                break
            last += 1
        members = lengths[first:last]
        stop = start + sum(members)
        if members[-1] == width and min(members) == width:
            buckets.append(Bucket(start, stop, len(members), width))
        else:
            buckets.append(_padded_bucket(start, stop, members, width, device, dtype))
        start, first = stop, last
    return buckets


def _padded_bucket(
    start: int, stop: int, members: Sequence[int], width: int, device: torch.device, dtype: torch.dtype
) -> Bucket:
    size = torch.tensor(members)
    ends = size.cumsum(0)
    place = torch.arange(width)
    real = place[None, :] < size[:, None]
    # Padding repeats the segment's last token. It is behind all real tokens, so the causal mask
    # hides it from their queries.
    gather = (ends - size)[:, None] + torch.minimum(place[None, :], size[:, None] - 1)
    return Bucket(
        start,
        stop,
        len(members),
        width,
        gather.reshape(-1).to(device),
        real.reshape(-1).nonzero()[:, 0].to(device),
        real.reshape(-1, 1).to(device, dtype),
    )


@dataclass
class PackedSegments(PackedSeqParams):
    """The segments of a packed micro-batch, for the attention.

    ``cos``, ``sin``: fp32 [t, 1, head_dim / 2].
    """

    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    buckets: list[Bucket] | None = None


def pack_segments(
    lengths: Sequence[int],
    inverse_frequencies: torch.Tensor,
    dtype: torch.dtype,
    *,
    kernel: bool,
    magnitude: float = 1.0,
) -> PackedSegments:
    """Return the segments of ``lengths``, for CUDA's variable-length kernel if ``kernel``, else as
    padded buckets.

    ``inverse_frequencies``, ``magnitude``: of the rotary embedding (``realsys.hf.rope``).
    """
    device = inverse_frequencies.device
    # Positions restart with every segment, as if it were alone.
    positions = on_device(torch.cat([torch.arange(n) for n in lengths]), device)
    # In float32: bf16 has 8 bits, so positions above 256 would share angles.
    angles = positions[:, None].float() * inverse_frequencies
    packed = PackedSegments(
        qkv_format="thd",
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        cos=angles.cos()[:, None] * magnitude,
        sin=angles.sin()[:, None] * magnitude,
    )
    if kernel:
        ends = on_device(torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32), device)
        packed.cu_seqlens_q = packed.cu_seqlens_kv = ends
    else:
        packed.buckets = make_buckets(lengths, device, dtype)
    return packed


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
        tensors = [torch.split(x, sizes) for x in (query, key, value)]
        parts = zip(*tensors, packed.buckets, strict=True)
        outputs = [self._bucket(*part) for part in parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _kernel(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSegments
    ) -> torch.Tensor:
        assert packed.max_seqlen_q is not None
        out = attention_kernel()(query, key, value, packed.cu_seqlens_q, packed.max_seqlen_q, self.scale)
        return out.reshape(out.shape[0], -1)

    def _bucket(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        def batched(x: torch.Tensor) -> torch.Tensor:
            if bucket.gather is not None and bucket.scatter is not None:
                x = pad_rows(x, bucket.gather, bucket.scatter)
            return x.reshape(bucket.count, bucket.width, x.shape[1], x.shape[2]).transpose(1, 2)

        attended = F.scaled_dot_product_attention(
            batched(query),
            batched(key),
            batched(value),
            is_causal=True,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
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
    spec.submodules.mlp.module = SwigluMLP
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=RMSNorm)
