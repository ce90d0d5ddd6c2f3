"""The model of the embedded engine: forward passes, their key-value cache, and fused weights.

    decode    one token of every running completion ──> logits      attention reads views of the cache, group by group
    prefill   the tokens of a pass, packed ──> cache                only attention pads them

Cache: one row of ``context`` positions per running completion, and some for ended ones. Running completions always
occupy rows 0..n-1, so that a decode step works on plain slices. The scheduler plans the moves that keep it so.
Positions beyond a completion's length are stale: attention masks them.

Weights are fused for fast decoding. The query heads, key and value of a key-value head are neighbours in one
projection, so that one matrix product gives [rows * kv_heads, group + 2, head_dim] and the parts are views. Rotary
pairs (i, i + head_dim/2) become neighbours in the rows of q and k: rotating is then one complex product, and q.k does
not change because both are permuted alike. In float32 the RMSNorm gains are folded into the matrices that follow them;
in bfloat16 the product would be rounded. On a CPU, matrices in bfloat16 are packed for oneDNN, which would otherwise
reorder them in every product, and for a few rows that takes longer than the product.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from realsys.errors import ConfigError, ModelError
from realsys.generation.embedded.batch import PrefillBatch, PrefillGroup
from realsys.generation.embedded.scheduler import RowGroup
from realsys.model_files.architecture import HfModel
from realsys.model_files.rope import inverse_frequencies

#: buffer of older checkpoints; the engine computes these values
_IGNORED_SUFFIX = "rotary_emb.inv_freq"


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
        # In bf16 oneDNN copies a view before it multiplies, and copies the keys faster than their transpose.
        self._keys_first = device.type == "cpu" and self._dtype == torch.bfloat16
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
                torch.bmm(self._scores(queries[rows], k, mask).softmax(-1), v, out=context[rows])
            _add_product(x, context.view(n, -1), layer.out)
            self._mlp(layer, x)
        head = self.weights.head
        return _product(self._norm(x, self.weights.norm).to(head.dtype), head).float()

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
            _add_product(x, context, layer.out)
            self._mlp(layer, x)

    # ---- parts

    def _scores(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """Return the scaled products of queries and keys, plus ``mask``: [rows * H, G, T]."""
        # beta=0 ignores the first argument, which only has to be a tensor
        start, beta = (self._zero, 0) if mask is None else (mask, 1)
        if self._keys_first:
            scores = torch.baddbmm(start, k, q.transpose(1, 2), beta=beta, alpha=self._scale)
            return scores.transpose(1, 2)
        return torch.baddbmm(start, q, k.transpose(1, 2), beta=beta, alpha=self._scale)

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
        """Return a mask of 0 and -inf for ``_scores``; None if all rows of the group are equally long."""
        if group.equal:
            return None
        # Positions beyond a row's length are stale: an earlier completion, or an earlier version.
        last = positions[group.start : group.stop].repeat_interleave(self.arch.kv_heads).view(-1, 1, 1)
        mask = torch.where(self._positions[: group.length] > last, self._minus_infinity, self._zero)
        mask = mask.expand(-1, self.arch.group, -1)
        return mask.transpose(1, 2) if self._keys_first else mask

    def _qkv(self, layer: LayerWeights, x: Tensor) -> Tensor:
        """Project to [tokens, H * (G + 2) * D]: per kv head its queries, its key, its value."""
        projected = _product(self._norm(x, layer.attention_norm), layer.qkv, layer.qkv_bias)
        if layer.q_norm is None or layer.k_norm is None:
            return projected
        heads = projected.view(len(x), self.arch.kv_heads, self.arch.group + 2, self.arch.head_dim)
        shape, eps = (self.arch.head_dim,), self.arch.norm_eps
        heads[:, :, :-2] = F.rms_norm(heads[:, :, :-2], shape, layer.q_norm, eps)
        heads[:, :, -2] = F.rms_norm(heads[:, :, -2], shape, layer.k_norm, eps)
        return projected

    def _rotate(self, heads: Tensor, rotary: Tensor) -> None:
        """Apply the rotary embedding in place.

        Pairs are neighbours in memory, so it is one complex product.
        """
        pairs = heads.view(*heads.shape[:-1], -1, 2)
        if heads.dtype == torch.float32:
            torch.view_as_complex(pairs).mul_(rotary)
        else:  # torch has no complex type of 2 x bfloat16
            heads.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()) * rotary).flatten(-2))

    def _mlp(self, layer: LayerWeights, x: Tensor) -> None:
        """Add the feed-forward block to x in place."""
        gate, up = _product(self._norm(x, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
        _add_product(x, F.silu(gate).mul_(up), layer.down)

    def _norm(self, x: Tensor, gain: Tensor | None) -> Tensor:
        """Apply RMSNorm. Without a gain, return x / sqrt(|x|^2 + hidden * eps).

        The missing factor, sqrt(hidden) * gain, is folded into the next matrix.
        """
        if gain is None:
            norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            return x / torch.hypot(norm, self._norm_eps)  # hypot: squaring the norm could overflow
        return F.rms_norm(x, (self.arch.hidden,), gain, self.arch.norm_eps)


def _product(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ matrix.T + bias; ``matrix`` may be packed."""
    if matrix.is_mkldnn:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, matrix, bias, "none", [], "")
        return product
    return F.linear(x, matrix, bias)


def _add_product(total: Tensor, x: Tensor, matrix: Tensor) -> None:
    """Add x @ matrix.T to ``total`` in place; ``matrix`` may be packed."""
    if matrix.is_mkldnn:
        total.add_(_product(x, matrix))  # the fused sum costs more, and a trainer rounds the product, too
    else:
        total.addmm_(x, matrix.t())


def _pack(matrix: Tensor) -> Tensor:
    """Return a bf16 matrix of a CPU in the layout in which oneDNN multiplies: it would reorder it in every call.

    The products are the same. Other CPUs keep the plain layout: on ARM, oneDNN multiplies a packed one very slowly.
    """
    on_cpu = matrix.device.type == "cpu" and matrix.dtype == torch.bfloat16
    if on_cpu and torch.backends.cpu.get_cpu_capability() == "AVX512":
        matrix = torch.ops.mkldnn._reorder_linear_weight(matrix)
    return matrix


def rotary_table(arch: HfModel, context: int) -> Tensor:
    """Return exp(i * position * frequency) times the RoPE's magnitude, complex64 [context, head_dim / 2]."""
    frequencies = inverse_frequencies(arch.rope, arch.head_dim)
    angles = torch.outer(torch.arange(context).float(), frequencies)
    return torch.polar(torch.full_like(angles, arch.rope.magnitude), angles)


# ---- keys and values of all rows


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Shape of a KVCache."""

    layers: int
    rows: int
    kv_heads: int
    context: int
    head_dim: int


class KVCache:
    """Keys and values, each [layers, rows * kv_heads, context, head_dim]."""

    def __init__(self, shape: CacheShape, dtype: torch.dtype, device: torch.device) -> None:
        self.rows = shape.rows
        self.kv_heads = shape.kv_heads
        self.context = shape.context
        self.head_dim = shape.head_dim
        self._dimensions = (shape.layers, shape.rows * shape.kv_heads, shape.context, shape.head_dim)
        self.keys = self.values = torch.empty(0, dtype=dtype, device=device)
        try:
            self.allocate()
        except (RuntimeError, OSError, OverflowError) as error:  # no memory on CUDA, or no addresses on a CPU
            size = 2 * dtype.itemsize * math.prod(self._dimensions)
            problem = (
                f"the KV cache of {shape.rows} x {shape.context} tokens needs {size >> 20} MiB, "
                f"which this device does not have"
            )
            raise ConfigError("generation.embedded.max_running", shape.rows, problem) from error

    def release(self) -> None:
        """Give the memory back; ``allocate`` takes it again."""
        self.keys = self.values = self.keys.new_empty(0)

    def allocate(self) -> None:
        """Take memory of zeros: a NaN in it would survive the mask, because NaN - inf and 0 * NaN are NaN."""
        self.keys, self.values = _zeros(self._dimensions, self.keys), _zeros(self._dimensions, self.keys)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.keys.element_size()

    def read(self, layer: int, rows: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Copy the first ``length`` positions of ``rows``: keys and values [len(rows), kv_heads, length, D]."""
        keys, values = (self._by_row(store[layer], length).index_select(0, rows) for store in (self.keys, self.values))
        return keys, values

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy (source row, target row, positions) together: a target may be the source of another copy."""
        if not copies:
            return
        # One call for all copies of similar length: a long one must not make the short ones as long.
        alike: dict[int, list[tuple[int, int, int]]] = {}
        for copy in copies:
            alike.setdefault(copy[2].bit_length(), []).append(copy)
        calls = []
        for group in alike.values():
            sources, targets, lengths = zip(*group, strict=True)
            rows = (torch.tensor(rows, device=self.keys.device) for rows in (sources, targets))
            calls.append((max(lengths), *rows))
        for store in (self.keys, self.values):
            # Layer by layer: the temporary copy of all layers could be as large as the cache.
            for layer in store:
                # All sources are read before a target is written, which may be a source.
                read = [self._by_row(layer, length).index_select(0, source) for length, source, _ in calls]
                for (length, _, target), values in zip(calls, read, strict=True):
                    self._by_row(layer, length).index_copy_(0, target, values)

    def _by_row(self, layer: Tensor, length: int) -> Tensor:
        return layer.view(self.rows, self.kv_heads, self.context, -1)[:, :, :length]


def _zeros(dimensions: tuple[int, ...], like: Tensor) -> Tensor:
    """Return zeros of a type and device. On a CPU a page takes memory when it is first written."""
    if like.device.type != "cpu":
        return like.new_zeros(dimensions)
    pages = mmap.mmap(-1, math.prod(dimensions) * like.dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=like.dtype).view(dimensions)


# ---- weights of one version, fused


@dataclass(slots=True)
class LayerWeights:
    """Weights of one decoder layer. ``attention_norm`` and ``mlp_norm`` are None if folded."""

    attention_norm: Tensor | None
    qkv: Tensor  # [kv_heads * (group + 2) * head_dim, hidden]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    out: Tensor  # [hidden, heads * head_dim]
    mlp_norm: Tensor | None
    gate_up: Tensor  # [2 * intermediate, hidden]
    down: Tensor  # [hidden, intermediate]


@dataclass(slots=True)
class ModelWeights:
    """All weights of one version, ready to decode with."""

    embedding: Tensor  # [vocab, hidden]
    layers: list[LayerWeights]
    norm: Tensor | None
    head: Tensor  # [vocab, hidden]; float32 if the logits are not rounded

    @classmethod
    def none(cls) -> ModelWeights:
        """Return the weights of no model."""
        return cls(torch.empty(0), [], None, torch.empty(0))

    def tensors(self) -> list[Tensor]:
        """Return all tensors, in the same order for every version of a model."""
        parts = [self.embedding, self.norm, self.head]
        for layer in self.layers:
            parts += [getattr(layer, field.name) for field in fields(layer)]
        return [part for part in parts if part is not None]

    def copy_from(self, other: ModelWeights) -> None:
        """Overwrite in place: on an accelerator two copies of the weights may not fit."""
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            mine.copy_(theirs)


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Read all tensors of an HF directory; ModelError names the file that is missing or broken."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{directory}: no *.safetensors file found: save the model in that format")
    tensors: dict[str, Tensor] = {}
    for path in files:
        try:
            tensors |= load_file(path)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
    return tensors


@torch.no_grad()
def fuse(
    arch: HfModel,
    tensors: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device,
    head_dtype: torch.dtype | None = None,
) -> ModelWeights:
    """Check names and shapes, and build the fused weights; ``tensors`` do not change.

    ``head_dtype``: of the head, if it is not ``dtype``: its numbers are those of ``dtype``, so that
    the head is the trained one. A tied head is then a copy of the embedding.
    ModelError names the first tensor that is missing, unknown or of another shape.
    """
    _check(arch, tensors)
    fold = dtype == torch.float32

    def get(name: str) -> Tensor:
        return tensors[name].to(torch.float32)

    def put(tensor: Tensor) -> Tensor:
        # Always a copy: the source may be a mapped file, or memory that its owner overwrites.
        return tensor.to(device=device, dtype=dtype, copy=True, memory_format=torch.contiguous_format)

    def norm(name: str) -> Tensor | None:
        return None if fold else put(get(name))

    def after_norm(matrix: Tensor, name: str) -> Tensor:
        # The forward pass divides by the vector norm instead of the root mean square. The factor
        # sqrt(hidden) between the two goes into the matrix, with the gain.
        return put(matrix * (get(name) * math.sqrt(arch.hidden))) if fold else put(matrix)

    layers = []
    for index in range(arch.layers):
        prefix = f"model.layers.{index}."
        attention = prefix + "self_attn."
        qkv = _interleave(arch, *(get(f"{attention}{part}_proj.weight") for part in "qkv"))
        bias = _interleave(arch, *(get(f"{attention}{part}_proj.bias") for part in "qkv")) if arch.qkv_bias else None
        gate_up = torch.cat([get(prefix + "mlp.gate_proj.weight"), get(prefix + "mlp.up_proj.weight")])
        layers.append(
            LayerWeights(
                attention_norm=norm(prefix + "input_layernorm.weight"),
                qkv=_pack(after_norm(qkv, prefix + "input_layernorm.weight")),
                qkv_bias=None if bias is None else put(bias),
                q_norm=put(_pairs_together(get(attention + "q_norm.weight"))) if arch.qk_norm else None,
                k_norm=put(_pairs_together(get(attention + "k_norm.weight"))) if arch.qk_norm else None,
                out=_pack(put(get(attention + "o_proj.weight"))),
                mlp_norm=norm(prefix + "post_attention_layernorm.weight"),
                gate_up=_pack(after_norm(gate_up, prefix + "post_attention_layernorm.weight")),
                down=_pack(put(get(prefix + "mlp.down_proj.weight"))),
            )
        )
    embedding = put(get("model.embed_tokens.weight"))
    if arch.tied:
        head = after_norm(get("model.embed_tokens.weight"), "model.norm.weight") if fold else embedding
    else:
        head = after_norm(get("lm_head.weight"), "model.norm.weight")
    head = _pack(head.to(head_dtype or dtype))
    return ModelWeights(embedding, layers, norm("model.norm.weight"), head)


def _pairs_together(rows: Tensor) -> Tensor:
    """Make the pairs (i, i + head_dim/2) of the last dimension neighbours."""
    return rows.reshape(*rows.shape[:-1], 2, -1).transpose(-1, -2).reshape(rows.shape)


def _interleave(arch: HfModel, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Group the rows of the three projections (or biases) by key-value head: queries, key, value."""
    tail = q.shape[1:]

    def per_head(rows: Tensor, count: int, rotary: bool) -> Tensor:
        by_dim = rows.reshape(arch.kv_heads, count, arch.head_dim, -1)
        if rotary:
            by_dim = _pairs_together(by_dim.transpose(-1, -2)).transpose(-1, -2)
        return by_dim

    parts = [per_head(q, arch.group, True), per_head(k, 1, True), per_head(v, 1, False)]
    return torch.cat(parts, dim=1).reshape(-1, *tail)


def _check(arch: HfModel, tensors: Mapping[str, Tensor]) -> None:
    expected = arch.tensor_shapes()
    for name, shape in expected.items():
        if name not in tensors:
            raise ModelError(f"tensor {name} is missing: the weights do not fit config.json ({arch.family})")
        if tuple(tensors[name].shape) != shape:
            raise ModelError(f"tensor {name} has shape {tuple(tensors[name].shape)}: config.json requires {shape}")
    for name in tensors:
        # Some exporters save the head of a tied model, too; it equals the embedding.
        ignored = name.endswith(_IGNORED_SUFFIX) or (arch.tied and name == "lm_head.weight")
        if name not in expected and not ignored:
            raise ModelError(f"tensor {name} is not part of the {arch.family} model that config.json describes")
