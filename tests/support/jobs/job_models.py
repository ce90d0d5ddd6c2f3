"""Tiny random models of a user: an HF directory with a byte-level BPE tokenizer and a chat template."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
VOCABULARY = 384
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,  # heads x head_dim is not hidden_size, as in the real Qwen3
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": SPECIAL.index("<|im_end|>"),
}


def make_qwen3(path: Path) -> Path:
    """Normalised queries and keys, tied embeddings."""
    return _save(Qwen3ForCausalLM, Qwen3Config(**SIZES, tie_word_embeddings=True), path)


def make_llama(path: Path) -> Path:
    """Untied embeddings, no biases."""
    return _save(LlamaForCausalLM, LlamaConfig(**SIZES, tie_word_embeddings=False), path)


def _save(kind: type[PreTrainedModel], config: Qwen3Config | LlamaConfig, path: Path) -> Path:
    _tokenizer().save_pretrained(path)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(config)
        for name, parameter in model.named_parameters():
            if "norm" in name:  # all ones otherwise: a norm that is left out or mixed up would not show
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        # A random model hardly ever ends a completion. Here a third of the vocabulary does, in addition to the
        # tokenizer's end-of-text token; a completion that does not end is wrong without being judged.
        model.generation_config.eos_token_id = [SIZES["eos_token_id"], *range(len(SPECIAL), VOCABULARY // 3)]
        model.save_pretrained(path)
    return path


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((f"What is {a} + {b}? It is {a + b}." for a in range(50) for b in range(50)), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast
