"""Forward passes of the embedded engine: prefill of prompts, and one decode step for all running completions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from realsys.generation.embedded.forward.batch import PrefillBatch, PrefillGroup
from realsys.generation.embedded.forward.kv_cache import KVCache
from realsys.generation.embedded.forward.weights import LayerWeights, ModelWeights
from realsys.generation.embedded.scheduler import RowGroup
from realsys.model_files.architecture import HfModel
from realsys.model_files.rope import inverse_frequencies


class Decoder:
    """Decoder-only model over a KV cache.

    Shapes: n rows, H kv heads, G query heads per kv head, D head_dim, T positions.
    """

    def __init__(self, arch: HfModel, weights: ModelWeights, cache: KVCache) -> None:
        self.arch = arch
        self.weights = weights
        self.cache = cache
        device = weights.embedding.device
        self._dtype = weights.embedding.dtype
        self._scale = 1.0 / math.sqrt(arch.head_dim)
        self._norm_eps = torch.tensor(math.sqrt(arch.hidden * arch.norm_eps), dtype=self._dtype, device=device)
        self._rotary = rotary_table(arch, cache.context).to(device)
        self._positions = torch.arange(cache.context, device=device)
        #: index of position 0 of every (row, head) in a layer of the cache seen as [rows * H * context, D]
        self._origins = (torch.arange(cache.rows * cache.kv_heads, device=device) * cache.context).view(
            cache.rows, cache.kv_heads
        )
        self._minus_infinity = torch.tensor(float("-inf"), dtype=self._dtype, device=device)
        self._zero = torch.zeros((), dtype=self._dtype, device=device)

    def decode(self, ids: Tensor, positions: Tensor, groups: Sequence[RowGroup]) -> Tensor:
        """Feed token ids[r] at positions[r] to rows 0..n-1; return float32 logits [n, vocab].

        ``groups`` cut the rows into ranges of similar length; attention of a group reads only up to its
        longest row.
        """
        arch, weights = self.arch, self.weights
        n = len(ids)
        kv_heads = arch.kv_heads
        head_dim = arch.head_dim
        x = weights.embedding.index_select(0, ids)
        rotary = self._rotary.index_select(0, positions).view(n, 1, 1, -1)
        slots = (self._origins[:n] + positions.unsqueeze(1)).view(-1)
        masks = [self._mask(group, positions) for group in groups]
        context = torch.empty(n * kv_heads, arch.group, head_dim, dtype=x.dtype, device=x.device)
        for index, layer in enumerate(weights.layers):
            heads = self._qkv(layer, x).view(n, kv_heads, arch.group + 2, head_dim)
            self._rotate(heads[:, :, :-1], rotary)
            heads = heads.view(n * kv_heads, arch.group + 2, head_dim)
            keys, values = self.cache.keys[index], self.cache.values[index]
            # Written before attention: a token attends to its own key and value.
            keys.view(-1, head_dim).index_copy_(0, slots, heads[:, -2])
            values.view(-1, head_dim).index_copy_(0, slots, heads[:, -1])
            queries = heads[:, :-2]
            for group, mask in zip(groups, masks, strict=True):
                rows = slice(group.start * kv_heads, group.stop * kv_heads)
                # Views, not copies: this reading of the cache is the cost of a decode step.
                k, v = keys[rows, : group.length], values[rows, : group.length]
                q = queries[rows]
                if mask is None:  # beta=0 ignores the first argument, which only has to be a tensor
                    scores = torch.baddbmm(self._zero, q, k.transpose(1, 2), beta=0, alpha=self._scale)
                else:
                    scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=self._scale)
                torch.bmm(scores.softmax(-1), v, out=context[rows])
            x.addmm_(context.view(n, -1), layer.out.t())
            self._mlp(layer, x)
        return self._head(x)

    def prefill(self, batch: PrefillBatch) -> None:
        """Fill the cache for the batch's tokens; earlier positions of their rows must be cached.

        Returns no logits: the engine feeds the last token of a prompt through ``decode``, which also
        samples. The N tokens are packed; only attention pads them, group by group.
        """
        arch, tokens = self.arch, len(batch.ids)
        x = self.weights.embedding.index_select(0, batch.ids)
        rotary = self._rotary.index_select(0, batch.positions).view(tokens, 1, 1, -1)
        slots = (self._origins.index_select(0, batch.rows) + batch.positions.unsqueeze(1)).view(-1)
        masks = [self._prefix_mask(group) for group in batch.groups]
        last = len(self.weights.layers) - 1
        for index, layer in enumerate(self.weights.layers):
            heads = self._qkv(layer, x).view(tokens, arch.kv_heads, arch.group + 2, arch.head_dim)
            self._rotate(heads[:, :, :-1], rotary)
            for store, new in ((self.cache.keys, heads[:, :, -2]), (self.cache.values, heads[:, :, -1])):
                store[index].view(-1, arch.head_dim).index_copy_(0, slots, new.reshape(-1, arch.head_dim))
            if index == last:
                return  # the rest of the last layer only serves the logits
            queries = heads[:, :, :-2].reshape(tokens, -1)
            context = torch.empty_like(queries)
            for group, mask in zip(batch.groups, masks, strict=True):
                context[group.tokens] = self._attend(index, group, mask, queries[group.tokens])
            x.addmm_(context, layer.out.t())
            self._mlp(layer, x)

    # ---- parts

    def _attend(self, layer: int, group: PrefillGroup, mask: Tensor | None, queries: Tensor) -> Tensor:
        """Attend from packed queries [tokens of the group, heads * D] to their cache rows; same shape."""
        rows, width = len(group.rows), group.width
        # Padded queries give results, too; index_select at the end leaves them out.
        padded = queries.new_zeros(rows * width, queries.shape[1]).index_copy_(0, group.places, queries)
        q = padded.view(rows, width, self.arch.heads, self.arch.head_dim).transpose(1, 2)
        k, v = self.cache.read(layer, group.rows, group.reach)
        context = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=self.arch.group > 1
        )
        return context.transpose(1, 2).reshape(rows * width, -1).index_select(0, group.places)

    def _prefix_mask(self, group: PrefillGroup) -> Tensor | None:
        """Return a mask [rows, 1, width, reach] of 0 and -inf; None if no row has a prefix (plain causal)."""
        if group.starts is None:
            return None
        positions = group.starts.view(-1, 1, 1, 1) + self._positions[: group.width].view(-1, 1)
        return torch.where(self._positions[: group.reach] > positions, self._minus_infinity, self._zero)

    def _mask(self, group: RowGroup, positions: Tensor) -> Tensor | None:
        """Return a mask [rows * H, G, T] of 0 and -inf; None if all rows of the group are equally long."""
        if group.equal:
            return None
        # Positions beyond a row's length are stale: an earlier completion, or an earlier version.
        last = positions[group.start : group.stop].repeat_interleave(self.arch.kv_heads).view(-1, 1, 1)
        return torch.where(self._positions[: group.length] > last, self._minus_infinity, self._zero).expand(
            -1, self.arch.group, -1
        )

    def _qkv(self, layer: LayerWeights, x: Tensor) -> Tensor:
        """Project to [tokens, H * (G + 2) * D]: per kv head its queries, its key, its value."""
        projected = F.linear(self._norm(x, layer.attention_norm), layer.qkv, layer.qkv_bias)
        if layer.q_norm is None or layer.k_norm is None:
            return projected
        heads = projected.view(len(x), self.arch.kv_heads, self.arch.group + 2, self.arch.head_dim)
        shape, eps = (self.arch.head_dim,), self.arch.norm_eps
        heads[:, :, :-2] = F.rms_norm(heads[:, :, :-2], shape, layer.q_norm, eps)
        heads[:, :, -2] = F.rms_norm(heads[:, :, -2], shape, layer.k_norm, eps)
        return projected

    def _rotate(self, heads: Tensor, rotary: Tensor) -> None:
        """Apply the rotary embedding in place.

        Pairs are neighbours in memory (see weights.py), so it is one complex product.
        """
        pairs = heads.view(*heads.shape[:-1], -1, 2)
        if heads.dtype == torch.float32:
            torch.view_as_complex(pairs).mul_(rotary)
        else:  # torch has no complex type of 2 x bfloat16
            heads.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()) * rotary).flatten(-2))

    def _mlp(self, layer: LayerWeights, x: Tensor) -> None:
        """Add the feed-forward block to x in place."""
        gate, up = F.linear(self._norm(x, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
        x.addmm_(F.silu(gate).mul_(up), layer.down.t())

    def _head(self, x: Tensor) -> Tensor:
        head = self.weights.head
        return F.linear(self._norm(x, self.weights.norm).to(head.dtype), head).float()

    def _norm(self, x: Tensor, gain: Tensor | None) -> Tensor:
        """Apply RMSNorm. Without a gain, return x / sqrt(|x|^2 + hidden * eps).

        The missing factor, sqrt(hidden) * gain, is folded into the next matrix (weights.py).
        """
        if gain is None:
            norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            return x / torch.hypot(norm, self._norm_eps)  # hypot: squaring the norm could overflow
        return F.rms_norm(x, (self.arch.hidden,), gain, self.arch.norm_eps)


def rotary_table(arch: HfModel, context: int) -> Tensor:
    """Return exp(i * position * frequency) times the RoPE's magnitude, complex64 [context, head_dim / 2]."""
    frequencies = inverse_frequencies(arch.rope, arch.head_dim)
    angles = torch.outer(torch.arange(context).float(), frequencies)
    return torch.polar(torch.full_like(angles, arch.rope.magnitude), angles)
