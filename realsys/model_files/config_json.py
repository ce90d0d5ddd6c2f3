"""The one reader of a Hugging Face ``config.json``. No torch.

The launcher, the planner of the master, trainers and generation servers all call ``read_model``. Therefore the
launcher refuses every model that a worker would refuse, in the same words.

Rules:

- A key that is not in the file has the value that transformers gives it for that family. The sizes of a model have
  no default, because a file without them is damaged.
- A key that is read here has the type that transformers demands.
- A setting that changes the forward pass in a way that no code here knows is refused: to run the model as if the
  setting were off would be silently wrong.
"""

from __future__ import annotations

import json
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realsys.errors import ModelError
from realsys.model_files.architecture import Head, HfModel, ModelSizes, Rope


@dataclass(frozen=True, slots=True)
class _Family:
    """Defaults of one ``model_type`` in transformers."""

    classes: str  # prefix of the names of its classes
    positions: int
    kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden_size // num_attention_heads
    null_kv_heads: bool = True  # null means as many as query heads, else it is refused
    null_head_dim: bool = False  # null means hidden_size // num_attention_heads, else it is refused


FAMILIES = {
    "qwen2": _Family("Qwen2", 32768, kv_heads=32),
    "qwen3": _Family("Qwen3", 32768, kv_heads=32, head_dim=128),
    "llama": _Family("Llama", 2048, null_head_dim=True),
    "mistral": _Family("Mistral", 131072, kv_heads=8, null_kv_heads=False, null_head_dim=True),
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_THETA = 10000.0
_SLIDING_WINDOW = 4096
_LAYER_TYPES = ("full_attention", "sliding_attention")
# Numbers outside these bounds are damage: building a table of such a size would not end, and float32
# would overflow.
_MOST_LAYERS = 4096
_MOST = 1 << 24
_LEAST_NUMBER = 1e-12
_MOST_NUMBER = 1e12


def read_model(directory: Path, head: Head = "lm") -> HfModel:
    """Read config.json, and the end-of-text tokens of generation_config.json, for a role that needs ``head``.

    ModelError names file, field and value of a model that cannot be trained or served.
    """
    path = directory / "config.json"
    values = _read_object(path)
    if values is None:
        raise ModelError(f"{path}: not found: name a directory with a Hugging Face model")
    keys = _Keys(path, values)
    name = keys.choice("model_type", tuple(FAMILIES))
    family = FAMILIES[name]
    has_score = _has_score(keys, family, head)
    _refuse_unsupported(keys, name)
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    if name == "llama" and hidden % heads:
        raise keys.refuse("hidden_size", f"must be a multiple of num_attention_heads ({heads})")
    stated = keys.size("max_position_embeddings", family.positions)
    rope = _read_rope(keys)
    positions = _stretched(stated, rope)
    _refuse_sliding_window(keys, name, positions)
    null = "head_dim" in keys and keys.get("head_dim") is None
    if "head_dim" not in keys or (null and family.null_head_dim):
        head_dim = family.head_dim or (hidden // heads)
    else:
        head_dim = keys.size("head_dim")
    if head_dim < 2 or head_dim % 2:  # the rotary embedding rotates pairs of dimensions
        if null or "head_dim" not in keys:
            raise keys.refuse("hidden_size", f"gives heads of {head_dim} dimensions: head_dim must be even")
        raise keys.refuse("head_dim", "must be even")
    return HfModel(
        family=name,
        vocab=keys.size("vocab_size"),
        hidden=hidden,
        ffn=keys.size("intermediate_size"),
        layers=keys.size("num_hidden_layers", most=_MOST_LAYERS),
        heads=heads,
        kv_heads=_read_kv_heads(keys, family, heads),
        head_dim=head_dim,
        positions=positions,
        norm_eps=keys.number("rms_norm_eps", 1e-6, most=0.1),
        rope=rope,
        tied=keys.switch("tie_word_embeddings") and head == "lm",
        qkv_bias=name == "qwen2",
        qk_norm=name == "qwen3",
        head=head,
        has_score=has_score,
        eos=tuple(sorted(set(read_end_of_text(directory)))),
    )


def read_sizes(directory: Path, head: Head = "lm") -> ModelSizes:
    """Read the sizes that the master plans with. Raises ModelError as ``read_model`` does."""
    return read_model(directory, head).sizes


def read_end_of_text(directory: Path) -> list[int]:
    """Return the ids of ``eos_token_id`` in generation_config.json, then those in config.json; often the same.

    Raises ModelError for a file that cannot be read, or an id that is not an integer.
    """
    all_ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        keys = _Keys(path, _read_object(path) or {})
        value = keys.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and abs(token) < 1 << 31 for token in ids):
            raise keys.refuse("eos_token_id", "must be a token id, or a list of them")
        all_ids += ids
    return all_ids


def read_vocabulary(directory: Path) -> int | None:
    """Return ``vocab_size`` of config.json, None if it has none. Raises ModelError."""
    path = directory / "config.json"
    keys = _Keys(path, _read_object(path) or {})
    return keys.size("vocab_size") if "vocab_size" in keys else None


class _Keys:
    """Keys of one JSON object; every getter raises ModelError with file, key and value."""

    def __init__(self, path: Path, values: dict[str, Any], prefix: str = "") -> None:
        self._path = path
        self._values = values
        self._prefix = prefix

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str, default: Any = None) -> Any:
        return self._values.get(key, default)

    def first_object(self) -> str | None:
        return next((key for key, value in self._values.items() if isinstance(value, dict)), None)

    def refuse(self, key: str, problem: str, supported: str = "", default: object = None) -> ModelError:
        """Build the error for a key. ``default``: the value that a file without the key has."""
        name, value = self._prefix + key, self._values.get(key, default)
        if value is None and key not in self._values:
            remedy = f"; known: {supported}" if supported else f": it {problem}"
            return ModelError(f"{self._path}: {name} is missing{remedy}")
        return ModelError(f"{self._path}: {name}={_shown(value)} {problem}{supported and f'; known: {supported}'}")

    def size(self, key: str, default: int | None = None, most: int = _MOST) -> int:
        """Return an integer; ``default`` if the file has no such key. A missing key without default is refused."""
        value = self._values.get(key, default)
        if type(value) is not int or not 1 <= value <= most:
            raise self.refuse(key, f"must be a positive integer (at most {most})")
        return value

    def number(self, key: str, default: float | None = None, most: float = _MOST_NUMBER) -> float:
        value = self._values.get(key, default)
        if not isinstance(value, int | float) or value is True or not _LEAST_NUMBER <= value <= most:
            raise self.refuse(key, f"must be a number from {_LEAST_NUMBER:g} to {most:g}")
        return float(value)

    def switch(self, key: str) -> bool:
        """Return a boolean; False if the file has no such key."""
        value = self._values.get(key, False)
        if type(value) is not bool:
            raise self.refuse(key, "must be true or false")
        return value

    def choice(self, key: str, supported: tuple[str, ...], default: str | None = None) -> str:
        value = self._values.get(key, default)
        if value not in supported:
            raise self.refuse(key, "is not supported", ", ".join(supported))
        return str(value)

    def below(self, key: str) -> _Keys:
        """Return the object under ``key``; empty if the key is missing or null."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.refuse(key, "must be an object")
        return _Keys(self._path, value or {}, f"{key}.")


def scoring_config(values: dict[str, Any]) -> dict[str, Any]:
    """Return config.json of the model in ``values`` with a ``score.weight`` instead of its language-model head."""
    names = [
        str(name).replace("ForCausalLM", "ForSequenceClassification") for name in values.get("architectures") or ()
    ]
    # One label, as ``_label_count`` and transformers read it.
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {**values, "architectures": names, **labels, **({"num_labels": 1} if "num_labels" in values else {})}


def _has_score(keys: _Keys, family: _Family, head: Head) -> bool:
    """Return True if the checkpoint has a ``score.weight``. Raises ModelError if the role cannot use its head.

    A model has a language-model head or, if it is a sequence classification with one label, a score. A
    value role accepts either; without a score its values start at zero.
    """
    plain = f"{family.classes}ForCausalLM"
    scoring = f"{family.classes}ForSequenceClassification"
    architectures = keys.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if name == plain:
        return False
    if name != scoring:
        usable = plain if head == "lm" else f"{plain}, {scoring}"
        raise keys.refuse("architectures", f"is not supported for {keys.get('model_type')}", usable)
    if head == "lm":
        raise keys.refuse("architectures", f"has no language-model head: name a directory of a {plain}")
    labels = _label_count(keys)
    if labels != 1:
        raise keys.refuse("architectures", f"with {labels} labels is not supported: a value needs one (num_labels=1)")
    return True


def _label_count(keys: _Keys) -> int:
    """Return ``num_labels``, else the length of ``id2label``, else 2, as transformers does."""
    named = keys.get("id2label")
    if named is not None and not isinstance(named, dict):
        raise keys.refuse("id2label", "must be an object")
    count = keys.get("num_labels")
    if count is None:
        return 2 if named is None else len(named)
    if type(count) is not int:
        raise keys.refuse("num_labels", "must be an integer")
    return count


def _refuse_unsupported(keys: _Keys, family: str) -> None:
    if keys.get("quantization_config") is not None:
        raise keys.refuse("quantization_config", f"is not supported for {family}: name a model that is not quantized")
    keys.choice("hidden_act", ("silu",), "silu")
    # Qwen2 always has its biases; in the other families the key adds one at the output projection, too.
    biases = ("mlp_bias",) if family == "qwen2" else ("attention_bias", "mlp_bias")
    for name in biases:
        if keys.get(name, False) is not False:
            raise keys.refuse(name, f"is not supported for {family}", "false")


def _read_kv_heads(keys: _Keys, family: _Family, heads: int) -> int:
    null = "num_key_value_heads" in keys and keys.get("num_key_value_heads") is None
    if null and family.null_kv_heads:
        return heads
    kv_heads = keys.size("num_key_value_heads", family.kv_heads or heads)
    if heads % kv_heads:
        stated = "num_key_value_heads" in keys
        origin = "" if stated else f", the default of {family.classes}"
        raise keys.refuse("num_attention_heads", f"must be a multiple of num_key_value_heads={kv_heads}{origin}")
    return kv_heads


def _read_rope(keys: _Keys) -> Rope:
    """Read ``rope_scaling``, else ``rope_parameters`` (written by transformers 5 and later), as transformers does."""
    scaling = keys.below("rope_scaling" if keys.get("rope_scaling") else "rope_parameters")
    if (nested := scaling.first_object()) is not None:
        raise scaling.refuse(nested, "is not supported: all layers must have the same RoPE")
    owner = scaling if "rope_theta" in scaling else keys
    theta = owner.number("rope_theta", _THETA)
    for part in (scaling, keys):
        if part.get("partial_rotary_factor") not in (None, 1.0):
            raise part.refuse("partial_rotary_factor", "is not supported", "1.0")
    kind = scaling.choice("rope_type" if "rope_type" in scaling else "type", ROPE_TYPES, "default")
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, "linear", scaling.number("factor"))
    return (_read_llama3 if kind == "llama3" else _read_yarn)(keys, scaling, theta)


def _stretched(stated: int, rope: Rope) -> int:
    """Return the positions of a model whose file states ``stated``."""
    # A llama3 file states the positions after stretching, a linear one those before, a yarn one either.
    if rope.kind == "linear":
        return int(stated * rope.factor)
    return max(stated, int(rope.original_positions * rope.factor)) if rope.kind == "yarn" else stated


def _read_llama3(keys: _Keys, scaling: _Keys, theta: float) -> Rope:
    low = scaling.number("low_freq_factor")
    high = scaling.number("high_freq_factor")
    if high <= low:
        raise scaling.refuse("high_freq_factor", f"must be larger than low_freq_factor ({low:g})")
    return Rope(theta, "llama3", scaling.number("factor"), low, high, _read_original(keys, scaling))


def _read_yarn(keys: _Keys, scaling: _Keys, theta: float) -> Rope:
    # transformers reads these keys, SGLang does not: the two would compute different models.
    for name, default in (("attention_factor", None), ("mscale", None), ("mscale_all_dim", None), ("truncate", True)):
        if scaling.get(name, default) not in (None, default):
            raise scaling.refuse(name, "is not supported with yarn: remove it, if the model was made without it")
    factor, fast, slow = scaling.number("factor"), scaling.number("beta_fast", 32.0), scaling.number("beta_slow", 1.0)
    if factor < 1:
        raise scaling.refuse("factor", "must be at least 1")
    if fast < slow:
        raise scaling.refuse("beta_fast", f"must be at least beta_slow ({slow:g})")
    if theta <= 1:
        raise keys.refuse("rope_theta", "must be larger than 1 with yarn")
    original = _read_original(keys, scaling)
    return Rope(theta, "yarn", factor, original_positions=original, beta_fast=fast, beta_slow=slow)


def _read_original(keys: _Keys, scaling: _Keys) -> int:
    original = scaling.size("original_max_position_embeddings")
    if keys.get("original_max_position_embeddings", original) != original:
        # transformers reads this key, SGLang the one inside rope_scaling.
        raise keys.refuse("original_max_position_embeddings", f"must be {original}, as for the RoPE")
    return original


def _refuse_sliding_window(keys: _Keys, family: str, positions: int) -> None:
    """Raise ModelError for a window that is shorter than the model's positions.

    Mistral uses its window if the file has one; the other families also need a switch.
    """
    layers = keys.get("layer_types") or []
    if not isinstance(layers, list) or not all(layer in _LAYER_TYPES for layer in layers):
        raise keys.refuse("layer_types", "is not supported", f"a list of {', '.join(_LAYER_TYPES)}")
    if not (family == "mistral" or keys.switch("use_sliding_window") or "sliding_attention" in layers):
        return
    window = keys.get("sliding_window", _SLIDING_WINDOW)
    if window is not None and (type(window) is not int or window < positions):
        problem = f"is not supported: it is less than {positions} positions"
        raise keys.refuse("sliding_window", problem, default=_SLIDING_WINDOW)


def _read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in ``path``, None if the file does not exist. Raises ModelError."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must contain a JSON object")
    return value


def _shown(value: object) -> str:
    """Show a value of any size and depth in one short line."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 80
    return short.repr(value)
