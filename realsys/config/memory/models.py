"""Model of a role, from its directory or from the section of the tiny model."""

from __future__ import annotations

from pathlib import Path

from realsys.config.allocation import ACTOR
from realsys.config.roles import role_settings
from realsys.config.rules.lengths import longest_sequence
from realsys.config.schema import Config
from realsys.hf.architecture import HfModel, Rope
from realsys.hf.config import read_model
from realsys.hf.tiny_vocabulary import vocabulary_size


def model_of(config: Config, role: str = ACTOR) -> HfModel:
    """Return the model of ``role``. Raises ModelError."""
    settings = role_settings(config, role)
    if settings.path:
        return read_model(Path(settings.path), settings.head)
    tiny = config.model.tiny
    return HfModel(
        family="qwen2",
        vocab=vocabulary_size(chat=tiny.chat),
        hidden=tiny.hidden_size,
        ffn=tiny.intermediate_size,
        layers=tiny.num_hidden_layers,
        heads=tiny.num_attention_heads,
        kv_heads=tiny.num_key_value_heads,
        head_dim=tiny.head_dim,
        positions=tiny.max_position_embeddings,
        norm_eps=1e-6,
        rope=Rope(10000.0),
        tied=tiny.tie_word_embeddings and settings.head == "lm",
        qkv_bias=True,
        qk_norm=False,
        head=settings.head,
        has_score=False,
        eos=(),
    )


def batch_tokens(config: Config) -> int:
    """Return the tokens of a train step whose episodes all have the longest row."""
    return config.train.batch_groups * config.rollout.trained_episodes * longest_sequence(config)
