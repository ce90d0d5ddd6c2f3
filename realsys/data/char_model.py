"""A small random Qwen2 with a character tokenizer, as an HF directory, for runs without a downloaded model.

It needs numpy only. Every program that reads HF directories can read it, for example transformers and SGLang.
Its tokens are those of ``realsys.model_files.architecture``. The chat form has a chat template.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from realsys.config.schema import TinyModelConfig
from realsys.data.dataset_files import write_atomically
from realsys.errors import ModelError
from realsys.model_files.architecture import (
    ALPHABET,
    BOS,
    BOS_ID,
    CHAT_MARKS,
    CHAT_SPECIAL,
    END_OF_TURN,
    END_OF_TURN_ID,
    EOS,
    EOS_ID,
    PAD,
    PAD_ID,
    SPECIAL,
    vocabulary_size,
)
from realsys.types import F32

# The layout of Qwen's templates. Of a tool it shows the name only: each character is a token.
CHAT_TEMPLATE = """\
{%- if tools -%}
<|im_start|>system
{% if messages[0].role == "system" %}{{ messages[0].content }}
{% endif %}tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == "tool" -%}
<|im_start|>user
<tool_response>{{ message.content }}</tool_response><|im_end|>
{% elif not (tools and loop.first and message.role == "system") -%}
<|im_start|>{{ message.role }}
{{ message.content or "" }}
{%- for call in message.tool_calls or [] -%}
{%- set arguments = call.function.arguments -%}
<tool_call>{"name": {{ call.function.name | tojson }}, "arguments": {{ "" -}}
{{ arguments if arguments is string else arguments | tojson }}}</tool_call>
{%- endfor -%}
<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
EMBEDDING_STD = 0.02
RESIDUAL_SCALE = 0.5  # layers start with a smaller contribution to the residual stream


def _characters(chat: bool) -> list[str]:
    """Return the characters with a token, as byte-level tokenizers write them."""
    return sorted(pre_tokenizers.ByteLevel.alphabet()) if chat else list(ALPHABET.replace(" ", "Ġ"))


def write_char_tokenizer(directory: Path, *, chat: bool = False) -> None:
    """Write a tokenizer with one token per character (``chat``: per byte), and BOS before a prompt that is no chat.

    Creates the directory if it does not exist.
    """
    directory.mkdir(parents=True, exist_ok=True)
    special, marks = (CHAT_SPECIAL, CHAT_MARKS) if chat else (SPECIAL, ())
    # BPE without merges over byte-level characters, like Qwen2's tokenizer. For a model of type qwen2,
    # transformers builds that class for any tokenizer.json, and drops the blanks of other character models.
    names = [*special, *marks, *_characters(chat)]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in marks])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END_OF_TURN if chat else EOS,
        "pad_token": PAD,
        "unk_token": None,  # otherwise transformers adds one, whose id is outside the embedding
        "clean_up_tokenization_spaces": False,
    }
    write_atomically(directory / "tokenizer.json", [tokenizer.to_str(pretty=True).encode()])
    if chat:
        settings["chat_template"] = CHAT_TEMPLATE
    _write_json(directory / "tokenizer_config.json", settings)


def make_tiny_model(tiny: TinyModelConfig, directory: Path, *, seed: int) -> None:
    """Write config.json, generation_config.json and model.safetensors of a random model. Raises ModelError.

    The same seed gives the same weights. Matrices have standard deviation fan_in^-0.5, or half of it if they write
    into the residual stream; embeddings and head have 0.02.
    """
    if tiny.num_attention_heads % tiny.num_key_value_heads or tiny.head_dim % 2:
        problem = "num_attention_heads must be a multiple of num_key_value_heads, and head_dim even"
        raise ModelError(f"model.tiny: {problem}: {tiny.model_dump()}")
    directory.mkdir(parents=True, exist_ok=True)
    tensors = dict(_tensors(tiny, np.random.default_rng(seed)))
    write_atomically(directory / "model.safetensors", [save(tensors, metadata={"format": "pt"})])
    _write_json(directory / "generation_config.json", _token_ids(tiny.chat))
    _write_json(directory / "config.json", _model_config(tiny))


def _model_config(tiny: TinyModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": vocabulary_size(chat=tiny.chat),
        **tiny.model_dump(exclude={"chat"}),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_dropout": 0.0,
        "initializer_range": EMBEDDING_STD,
        "use_sliding_window": False,
        "use_cache": True,
        "torch_dtype": "float32",
        **_token_ids(tiny.chat),
    }


def _token_ids(chat: bool) -> dict[str, int]:
    return {"bos_token_id": BOS_ID, "eos_token_id": END_OF_TURN_ID if chat else EOS_ID, "pad_token_id": PAD_ID}


def _tensors(tiny: TinyModelConfig, rng: np.random.Generator) -> Iterator[tuple[str, F32]]:
    """Yield HF names and values, in a fixed order: the random values depend on it."""
    hidden, inner, vocabulary = tiny.hidden_size, tiny.intermediate_size, vocabulary_size(chat=tiny.chat)
    query, key_value = tiny.num_attention_heads * tiny.head_dim, tiny.num_key_value_heads * tiny.head_dim

    def normal(rows: int, columns: int, std: float) -> F32:
        return (rng.standard_normal((rows, columns)) * std).astype(np.float32)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> F32:
        return normal(rows, columns, scale * columns**-0.5)

    def bias(size: int) -> F32:
        return rng.uniform(-(hidden**-0.5), hidden**-0.5, size).astype(np.float32)

    yield "model.embed_tokens.weight", normal(vocabulary, hidden, EMBEDDING_STD)
    for layer in range(tiny.num_hidden_layers):
        name = f"model.layers.{layer}"
        yield f"{name}.input_layernorm.weight", np.ones(hidden, np.float32)
        for part, rows in (("q", query), ("k", key_value), ("v", key_value)):
            yield f"{name}.self_attn.{part}_proj.weight", matrix(rows, hidden)
            yield f"{name}.self_attn.{part}_proj.bias", bias(rows)
        yield f"{name}.self_attn.o_proj.weight", matrix(hidden, query, RESIDUAL_SCALE)
        yield f"{name}.post_attention_layernorm.weight", np.ones(hidden, np.float32)
        yield f"{name}.mlp.gate_proj.weight", matrix(inner, hidden)
        yield f"{name}.mlp.up_proj.weight", matrix(inner, hidden)
        yield f"{name}.mlp.down_proj.weight", matrix(hidden, inner, RESIDUAL_SCALE)
    yield "model.norm.weight", np.ones(hidden, np.float32)
    if not tiny.tie_word_embeddings:
        yield "lm_head.weight", normal(vocabulary, hidden, EMBEDDING_STD)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_atomically(path, [json.dumps(value, indent=2).encode() + b"\n"])
