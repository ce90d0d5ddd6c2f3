"""An HF ``config.json`` -> what the trainer needs to know of the model, and Megatron's TransformerConfig."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from realsys.config.allocation import ParallelLayout
from realsys.config.model_families import Head, has_score, is_size, refuse_unsupported, understood
from realsys.config.schema_train import TrainConfig
from realsys.errors import ModelError
from realsys.train.megatron import TransformerConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding. ``llama3`` is the frequency-dependent stretching of Llama 3.1 and later."""

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def inverse_frequencies(self, head_dim: int) -> torch.Tensor:
        """float32 [head_dim / 2], radians per position."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        inverse = 1.0 / (self.theta**exponents)
        if self.kind == "linear":
            return inverse / self.factor
        if self.kind == "llama3":
            wavelength = 2 * math.pi / inverse
            low = self.original_max_position / self.low_freq_factor
            high = self.original_max_position / self.high_freq_factor
            blend = (self.original_max_position / wavelength - self.low_freq_factor) / (
                self.high_freq_factor - self.low_freq_factor
            )
            between = (1 - blend) * inverse / self.factor + blend * inverse
            stretched = torch.where(wavelength > low, inverse / self.factor, inverse)
            return torch.where((wavelength <= low) & (wavelength >= high), between, stretched)
        return inverse


@dataclass(frozen=True, slots=True)
class HFModel:
    """Sizes and switches of a Qwen2, Qwen3, Llama or Mistral model, with the head that its role needs.

    ``head``: "lm" (logits over the vocabulary; ``tied``: through the embedding) or "value" (one number per token).
    ``scored``: the checkpoint has a ``score.weight``, the weight of a value head; without one the values start at 0.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    norm_eps: float
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    rope: Rope
    head: Head = "lm"
    scored: bool = False


def read_hf_config(directory: Path, head: Head = "lm") -> HFModel:
    """Raises ModelError naming the file and the key that is missing or not supported, or the head that is not there."""
    path = directory / "config.json"
    try:
        raw = json.loads(path.read_text())
    except OSError as error:
        raise ModelError(
            f"{path}: cannot be read ({error.strerror}); model.path must be a HF model directory"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: no JSON ({error})") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: no JSON object")
    with understood(str(path)):
        return _model(path, raw, head)


def _model(path: Path, raw: dict[str, Any], head: Head) -> HFModel:
    refuse_unsupported(str(path), raw)
    scored = has_score(str(path), raw, head)
    family, heads = raw["model_type"], _size(path, raw, "num_attention_heads")
    hidden = _size(path, raw, "hidden_size")
    return HFModel(
        family=family,
        layers=_size(path, raw, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_size(path, raw, "num_key_value_heads", heads),
        head_dim=_size(path, raw, "head_dim", hidden // heads),
        ffn=_size(path, raw, "intermediate_size"),
        vocab=_size(path, raw, "vocab_size"),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        tied=head == "lm" and bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        rope=_read_rope(path, raw),
        head=head,
        scored=scored,
    )


def _size(path: Path, raw: dict[str, Any], name: str, otherwise: int | None = None) -> int:
    """``otherwise`` where the file leaves the size out, or says null."""
    value = otherwise if raw.get(name) is None else raw[name]
    if value is None:
        raise ModelError(f"{path}: {name} is missing")
    if not is_size(value, name):
        raise ModelError(f"{path}: {name}={value!r} must be a positive integer")
    return value


def _read_rope(path: Path, raw: dict[str, Any]) -> Rope:
    # transformers 5 writes rope_parameters; before, rope_theta and rope_scaling.
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    try:
        if kind == "default":
            return Rope(theta)
        if kind == "linear":
            return Rope(theta, "linear", float(scaling["factor"]))
        if kind == "llama3":
            return Rope(
                theta,
                "llama3",
                float(scaling["factor"]),
                float(scaling["low_freq_factor"]),
                float(scaling["high_freq_factor"]),
                int(scaling["original_max_position_embeddings"]),
            )
    except KeyError as error:
        raise ModelError(f"{path}: rope_type={kind!r} needs {error.args[0]}") from error
    raise ModelError(f"{path}: rope_type={kind!r} is not supported; known: default, linear, llama3")


def check_layout(model: HFModel, layout: ParallelLayout) -> None:
    """Raises ModelError with the numbers when the model does not divide by the layout."""
    tensor_sizes = {
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "intermediate_size": model.ffn,
        "vocab_size": model.vocab,
    }
    for name, size in tensor_sizes.items():
        if size % layout.tensor:
            raise ModelError(f"{name}={size} does not divide by m{layout.tensor} of the training layout {layout}")
    if model.layers % layout.pipeline:
        raise ModelError(
            f"num_hidden_layers={model.layers} does not divide by p{layout.pipeline} of the training layout {layout}"
        )
    if model.heads % model.kv_heads:
        raise ModelError(f"num_attention_heads={model.heads} does not divide by num_key_value_heads={model.kv_heads}")


def transformer_config(model: HFModel, layout: ParallelLayout, train: TrainConfig, dtype: str) -> TransformerConfig:
    """Megatron's description of the model; raises ModelError when it does not fit the layout."""
    check_layout(model, layout)
    recompute: dict[str, Any] = {}
    if train.recompute:
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    parameters = DTYPES[dtype]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="full scope is deprecated")  # of Megatron's own default
        return _megatron_config(model, layout, train, parameters, recompute)


def _megatron_config(
    model: HFModel, layout: ParallelLayout, train: TrainConfig, parameters: torch.dtype, recompute: dict[str, Any]
) -> TransformerConfig:
    return TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        qk_layernorm=model.qk_norm,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=model.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=parameters,
        pipeline_dtype=parameters,
        bf16=parameters is torch.bfloat16,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        # Sequence parallelism splits over the tensor ranks: with one there is nothing to split.
        sequence_parallel=train.sequence_parallel and layout.tensor > 1,
        # Every parameter is read from the checkpoint; drawing random ones first would be waste. (Megatron's own
        # switch for that also drops the attributes that make the grad norm right under tensor parallelism.)
        init_method=_keep,
        output_layer_init_method=_keep,
        embedding_init_method=_keep,
        gradient_accumulation_fusion=False,  # needs Apex
        variable_seq_lengths=layout.pipeline > 1,
        moe_token_dispatcher_type="alltoall",  # the default is refused together with variable lengths
        **recompute,
    )


def _keep(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
