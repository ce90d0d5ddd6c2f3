"""Small random models of every family, as transformers makes and saves them."""

from typing import Any

import torch
from transformers import LlamaConfig, MistralConfig, PreTrainedModel, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaForSequenceClassification
from transformers.models.mistral.modeling_mistral import MistralForCausalLM, MistralForSequenceClassification
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM, Qwen2ForSequenceClassification
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM, Qwen3ForSequenceClassification
from transformers.utils import logging as transformers_logging

transformers_logging.disable_progress_bar()  # its monitor thread would outlive the test

VOCAB = 48
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "attn_implementation": "eager",
}
# The rotary embeddings of Llama and Qwen3 are stretched; Qwen3's and Mistral's heads are wider than hidden / heads.
FAMILIES: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification, {}),
    "qwen3": (
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3ForSequenceClassification,
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "llama": (
        LlamaConfig,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "mistral": (MistralConfig, MistralForCausalLM, MistralForSequenceClassification, {"head_dim": 12}),
}


def make_model(
    family: str = "qwen2", *, tied: bool = False, value: bool = False, seed: int = 11, **changes: Any
) -> PreTrainedModel:
    """Norms and biases are moved off 1 and 0, which would hide one that is permuted or forgotten.

    ``value``: with a value head instead of logits; ``changes`` of the configuration.
    """
    configuration, lm, classifier, own = FAMILIES[family]
    settings = {**SIZES, "sliding_window": None, **own, "tie_word_embeddings": tied, **changes}
    torch.manual_seed(seed)
    model: PreTrainedModel = (
        classifier(configuration(**settings, num_labels=1)) if value else lm(configuration(**settings))
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.2)
    return model.float().eval()


def weights_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    tied = bool(model.config.tie_word_embeddings)
    return {k: v.clone() for k, v in model.state_dict().items() if not (k == "lm_head.weight" and tied)}
