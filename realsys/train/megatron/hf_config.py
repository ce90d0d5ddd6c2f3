"""Translates a Hugging Face model into Megatron's TransformerConfig for a layout."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from realsys.config.allocation import ParallelLayout
from realsys.config.sections.schema_train import TrainConfig
from realsys.errors import ModelError
from realsys.hf.architecture import HfModel, splits_over, stage_layers
from realsys.train.megatron.megatron_core import TransformerConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def check_layout(model: HfModel, layout: ParallelLayout) -> None:
    """Check that the model divides by the layout. Raises ModelError with the numbers."""
    for name, size in model.split_sizes.items():
        if not splits_over(name, size, layout.tensor):
            raise ModelError(
                f"{name}={size} must divide by m{layout.tensor} of the training layout {layout}: choose another m"
            )
    if (rows := (model.heads + 2 * model.kv_heads) * model.head_dim) % layout.tensor:
        raise ModelError(
            f"the {rows} rows of query, key and value must divide by m{layout.tensor} of the training layout {layout}: "
            "choose another m"
        )
    if model.vocab_shard(layout.tensor) * (layout.tensor - 1) >= model.vocab:
        raise ModelError(
            f"vocab_size={model.vocab} leaves nothing for the last of m{layout.tensor} of the training layout {layout}:"
            " choose another m"
        )
    if model.layers < layout.pipeline:
        raise ModelError(
            f"num_hidden_layers={model.layers} must be at least p{layout.pipeline} of the training layout {layout}: "
            "choose another p"
        )


def transformer_config(model: HfModel, layout: ParallelLayout, train: TrainConfig, dtype: str) -> TransformerConfig:
    """Return Megatron's description of the model.

    Raises ModelError if it does not fit the layout.
    """
    check_layout(model, layout)
    recompute: dict[str, Any] = {}
    if train.recompute:
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    parameters = DTYPES[dtype]
    with warnings.catch_warnings():
        # the warning is about Megatron's own default
        warnings.filterwarnings("ignore", message="full scope is deprecated")
        return _megatron_config(model, layout, train, parameters, recompute)


def _megatron_config(
    model: HfModel, layout: ParallelLayout, train: TrainConfig, parameters: torch.dtype, recompute: dict[str, Any]
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
        pipeline_model_parallel_layout=_stage_contents(model.layers, layout.pipeline),
        # With one tensor rank sequence parallelism has nothing to split.
        sequence_parallel=train.sequence_parallel and layout.tensor > 1,
        deterministic_mode=train.deterministic,
        # The checkpoint fills every parameter, so random initial values would be wasted work.
        # Megatron's own switch for that also drops the attributes that make the gradient norm right
        # under tensor parallelism.
        init_method=_keep,
        output_layer_init_method=_keep,
        embedding_init_method=_keep,
        gradient_accumulation_fusion=False,  # needs Apex
        variable_seq_lengths=layout.pipeline > 1,
        # Megatron refuses its default together with variable lengths
        moe_token_dispatcher_type="alltoall",
        **recompute,
    )


def _stage_contents(layers: int, stages: int) -> list[list[str]] | None:
    """Return Megatron's list of what each stage has; None without a pipeline."""
    if stages == 1:
        return None
    contents = [["decoder"] * count for count in stage_layers(layers, stages)]
    return [["embedding", *contents[0]], *contents[1:-1], [*contents[-1], "loss"]]


def _keep(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
