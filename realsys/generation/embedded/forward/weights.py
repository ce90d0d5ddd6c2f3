"""Weights of a decoder, fused for fast decoding.

The query heads, key and value of a key-value head are neighbours in one projection, so that one matrix product gives
[rows * kv_heads, group + 2, head_dim] and the parts are views. Rotary pairs (i, i + head_dim/2) become neighbours in
the rows of q and k: rotating is then one complex product, and q.k does not change because both are permuted alike. In
float32 the RMSNorm gains are folded into the matrices that follow them; in bfloat16 the product would be rounded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from realsys.errors import ModelError
from realsys.model_files.architecture import HfModel

#: buffer of older checkpoints; the engine computes these values
_IGNORED_SUFFIX = "rotary_emb.inv_freq"


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
                qkv=after_norm(qkv, prefix + "input_layernorm.weight"),
                qkv_bias=None if bias is None else put(bias),
                q_norm=put(_pairs_together(get(attention + "q_norm.weight"))) if arch.qk_norm else None,
                k_norm=put(_pairs_together(get(attention + "k_norm.weight"))) if arch.qk_norm else None,
                out=put(get(attention + "o_proj.weight")),
                mlp_norm=norm(prefix + "post_attention_layernorm.weight"),
                gate_up=after_norm(gate_up, prefix + "post_attention_layernorm.weight"),
                down=put(get(prefix + "mlp.down_proj.weight")),
            )
        )
    embedding = put(get("model.embed_tokens.weight"))
    if arch.tied:
        head = after_norm(get("model.embed_tokens.weight"), "model.norm.weight") if fold else embedding
    else:
        head = after_norm(get("lm_head.weight"), "model.norm.weight")
    head = head.to(head_dtype or dtype)
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
