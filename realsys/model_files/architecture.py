"""Sizes and switches of a Hugging Face decoder that realsys can train and serve, and the tokens of the tiny model.

No torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

#: the head that a role needs: logits over the vocabulary, or one value per token
Head = Literal["lm", "value"]


@dataclass(frozen=True, slots=True)
class HfModel:
    """A Qwen2, Qwen3, Llama or Mistral decoder with the head that its role needs.

    ``tied``: the embedding also serves as the language-model head. ``has_score``: the checkpoint has a
    ``score.weight``, the weight of a value head; without one a value head starts at 0.
    """

    family: str
    vocab: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    positions: int  # tokens of the longest sequence
    norm_eps: float
    rope: Rope
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    head: Head
    has_score: bool
    eos: tuple[int, ...]

    @property
    def group(self) -> int:
        """Query heads per key-value head."""
        return self.heads // self.kv_heads

    @property
    def sizes(self) -> ModelSizes:
        return ModelSizes(
            hidden=self.hidden,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            ffn=self.ffn,
            outputs=self.vocab if self.head == "lm" else 1,
        )

    @property
    def split_sizes(self) -> dict[str, int]:
        """Sizes that tensor parallelism divides, by their names in config.json."""
        return {
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.ffn,
        }

    def vocab_shard(self, ranks: int) -> int:
        """Return the rows of the vocabulary on each tensor rank; on the last ones some may be padding."""
        return -(-self.vocab // ranks)

    @property
    def parameters(self) -> int:
        """Number of parameters in the checkpoint."""
        return sum(math.prod(shape) for shape in self.tensor_shapes().values())

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return HF name -> shape of every tensor that the checkpoint must have."""
        hidden = self.hidden
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab, hidden),
            "model.norm.weight": (hidden,),
        }
        if self.head == "lm" and not self.tied:
            shapes["lm_head.weight"] = (self.vocab, hidden)
        if self.has_score:
            shapes["score.weight"] = (1, hidden)
        layer = self._layer_shapes()
        for index in range(self.layers):
            shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
        return shapes

    def _layer_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, ffn = self.hidden, self.ffn
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj.weight": (q, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, q),
            "mlp.gate_proj.weight": (ffn, hidden),
            "mlp.up_proj.weight": (ffn, hidden),
            "mlp.down_proj.weight": (hidden, ffn),
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        if self.qkv_bias:
            biases = {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
            shapes |= biases
        if self.qk_norm:
            shapes |= dict.fromkeys(("self_attn.q_norm.weight", "self_attn.k_norm.weight"), (self.head_dim,))
        return shapes


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes that determine the cost of a sequence; a checkpoint records them.

    ``outputs`` is the number of outputs per token: the size of the vocabulary, or 1 with a value head.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    outputs: int


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding; ``realsys.model_files.rope`` computes its frequencies.

    ``linear`` divides all positions by ``factor``. ``llama3`` and ``yarn`` stretch the low frequencies
    only; ``yarn`` (Peng et al., 2023) also scales the rotated vectors.
    """

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192
    beta_fast: float = 32.0  # yarn: rotations over the original positions from which on a frequency is kept
    beta_slow: float = 1.0  # yarn: rotations up to which it is divided by ``factor``

    @property
    def magnitude(self) -> float:
        """Factor of the rotated queries and keys."""
        return 0.1 * math.log(self.factor) + 1.0 if self.kind == "yarn" else 1.0


def stage_layers(layers: int, stages: int) -> list[int]:
    """Return the number of layers of each pipeline stage."""
    each, rest = divmod(layers, stages)
    # Not the last stages: the last has the head, too.
    return [each + (stage < rest) for stage in range(stages)]


def splits_over(name: str, size: int, ranks: int) -> bool:
    """Return True if tensor parallelism can divide a size of ``split_sizes`` over ``ranks``.

    With more ranks than key-value heads several ranks compute the same head.
    """
    return size % ranks == 0 or (name == "num_key_value_heads" and ranks % size == 0)


# ---- tokens of the tiny model, whose tokenizer and weights realsys.data.arith writes
#
# plain form   one token per character of ``ALPHABET``; other characters are lost
# chat form    one token per byte, so no text is lost; single tokens for the marks of a chat

PAD, EOS, BOS = "<pad>", "<eos>", "<bos>"
SPECIAL = (PAD, EOS, BOS)
PAD_ID, EOS_ID, BOS_ID = range(len(SPECIAL))
ALPHABET = "0123456789+=;#abcdefghijklmnopqrstuvwxyz "
END_OF_TURN = "<|im_end|>"
END_OF_TURN_ID = 4
CHAT_SPECIAL = (*SPECIAL, "<|im_start|>", END_OF_TURN, "<|endoftext|>")
# Single tokens, but part of the text, as in Qwen's tokenizers.
CHAT_MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_BYTES = 256
_SHARDS = 4  # tensor parallel 2 and 4 must divide the vocabulary


def vocabulary_size(*, chat: bool) -> int:
    """Return the number of rows of the embedding: all tokens, rounded up."""
    tokens = _BYTES + len(CHAT_SPECIAL) + len(CHAT_MARKS) if chat else len(ALPHABET) + len(SPECIAL)
    return -(-tokens // _SHARDS) * _SHARDS
