"""The architecture of an HF model directory, as far as the embedded engine can run it. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realsys.config.model_families import is_size, refuse_unsupported, understood
from realsys.errors import ModelError


@dataclass(frozen=True, slots=True)
class LinearRope:
    """All positions divided by ``factor``."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3's stretching of the low rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes and switches of a Qwen2, Qwen3, Llama or Mistral decoder."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope: LinearRope | Llama3Rope | None
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    max_position: int
    eos: tuple[int, ...]

    @property
    def group(self) -> int:
        """Query heads per key-value head."""
        return self.heads // self.kv_heads

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """HF name -> shape of every tensor the model has."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        for index in range(self.layers):
            layer = {
                "input_layernorm.weight": (hidden,),
                "post_attention_layernorm.weight": (hidden,),
                "self_attn.q_proj.weight": (q, hidden),
                "self_attn.k_proj.weight": (kv, hidden),
                "self_attn.v_proj.weight": (kv, hidden),
                "self_attn.o_proj.weight": (hidden, q),
                "mlp.gate_proj.weight": (inner, hidden),
                "mlp.up_proj.weight": (inner, hidden),
                "mlp.down_proj.weight": (hidden, inner),
            }
            if self.qkv_bias:
                layer |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
            if self.qk_norm:
                layer |= {"self_attn.q_norm.weight": (self.head_dim,), "self_attn.k_norm.weight": (self.head_dim,)}
            shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
        return shapes


def read_architecture(directory: Path) -> Architecture:
    """Read config.json (and generation_config.json for the end-of-text tokens).

    Raises ModelError naming the field for anything the embedded engine cannot run.
    """
    path = directory / "config.json"
    with understood(str(path)):
        return _read_architecture(directory, path)


def _read_architecture(directory: Path, path: Path) -> Architecture:
    raw = _read_json(path)
    if raw is None:
        raise ModelError(f"{path} does not exist: {directory} is no HF model directory")
    refuse_unsupported(str(path), raw)
    model_type = raw["model_type"]
    sizes = {name: _size(path, raw, name) for name in _SIZES}
    heads = sizes["num_attention_heads"]
    kv_heads = _size(path, raw, "num_key_value_heads", heads)
    head_dim = _size(path, raw, "head_dim", sizes["hidden_size"] // heads)
    if heads % kv_heads:
        raise ModelError(f"{path}: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}")
    if head_dim % 2:
        raise ModelError(f"{path}: head_dim={head_dim} must be even")
    theta, rope = _rope(path, raw)
    generation = _read_json(directory / "generation_config.json") or {}
    return Architecture(
        model_type=model_type,
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        layers=sizes["num_hidden_layers"],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope=rope,
        tied=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=model_type == "qwen2",
        qk_norm=model_type == "qwen3",
        max_position=sizes["max_position_embeddings"],
        eos=tuple(sorted({*_ids(raw.get("eos_token_id")), *_ids(generation.get("eos_token_id"))})),
    )


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object")
    return value


def _size(path: Path, raw: dict[str, Any], name: str, default: int | None = None) -> int:
    value = raw.get(name)
    if value is None:
        value = default
    if not is_size(value, name):
        raise ModelError(f"{path}: {name}={value!r} must be a positive whole number")
    return value


def _rope(path: Path, raw: dict[str, Any]) -> tuple[float, LinearRope | Llama3Rope | None]:
    """Base and scaling, from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling``."""
    scaling: dict[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3"):
        raise ModelError(f"{path}: rope_type={kind!r} is not supported; supported: default, linear, llama3")
    try:
        if kind == "linear":
            return theta, LinearRope(float(scaling["factor"]))
        return theta, Llama3Rope(
            factor=float(scaling["factor"]),
            low_freq_factor=float(scaling["low_freq_factor"]),
            high_freq_factor=float(scaling["high_freq_factor"]),
            original_context=int(scaling["original_max_position_embeddings"]),
        )
    except KeyError as error:
        raise ModelError(f"{path}: rope_type={kind!r} needs {error.args[0]}") from error


def _ids(value: Any) -> list[int]:
    """One token id, a list of them, or none."""
    if value is None:
        return []
    return [int(v) for v in value] if isinstance(value, list) else [int(value)]
