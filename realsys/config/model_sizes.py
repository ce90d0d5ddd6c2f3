"""The sizes of a model, from the config.json of its HF directory and without torch: what the master plans with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from realsys.config.model_families import is_size
from realsys.errors import ModelError


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """A decoder of ``layers`` gated layers; ``outputs`` per token: the vocabulary, 1 with a value head."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    outputs: int


def read_sizes(directory: Path, head: Literal["lm", "value"] = "lm") -> ModelSizes:
    """Raises ModelError naming the file and what is missing or no positive integer in it."""
    path = directory / "config.json"
    try:
        raw = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    hidden, heads = _size(raw, "hidden_size", path), _size(raw, "num_attention_heads", path)
    return ModelSizes(
        hidden=hidden,
        layers=_size(raw, "num_hidden_layers", path),
        heads=heads,
        kv_heads=_size(raw, "num_key_value_heads", path, heads),
        head_dim=_size(raw, "head_dim", path, hidden // heads),
        ffn=_size(raw, "intermediate_size", path),
        outputs=_size(raw, "vocab_size", path) if head == "lm" else 1,
    )


def _size(raw: Any, name: str, path: Path, otherwise: int | None = None) -> int:
    """``otherwise`` where the file leaves the size out, or says null."""
    found = raw.get(name) if isinstance(raw, dict) else None
    value = otherwise if found is None else found
    if not is_size(value, name):
        raise ModelError(f"{path}: {name}={value!r} must be a positive integer")
    return value
