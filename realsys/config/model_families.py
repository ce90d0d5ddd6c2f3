"""Which HF models can be run, by what their config.json says. No torch: asked before the start and again at load.

A model comes with the head of a language model (``lm_head.weight``) or with one number per token (``score.weight``, the
sequence classification of transformers with one label). A role of the first kind needs the former; a role that is
trained to give values takes either, and starts from zero values where there is no score.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeGuard

from realsys.errors import ModelError

Head = Literal["lm", "value"]

#: ``model_type`` -> how its classes in transformers begin
FAMILIES = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama", "mistral": "Mistral"}
_MOST_LAYERS, _MOST = 4096, 1 << 24
# What transformers takes where the file says nothing.
_SLIDING_WINDOW = 4096
_MISTRAL_POSITIONS = 4096 * 32


def is_size(value: object, name: str) -> TypeGuard[int]:
    """Whether a config.json may have ``name`` = ``value``: a positive whole number that could be of a model. What is
    larger is damage, and to work with it would take for ever.
    """
    most = _MOST_LAYERS if name == "num_hidden_layers" else _MOST
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


@contextlib.contextmanager
def understood(where: str) -> Iterator[None]:
    """ModelError for what is no setting of a model: a list where a number belongs, text that is no number."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ModelError(f"{where}: cannot be understood: {type(error).__name__}: {error}") from error


def has_score(where: str, raw: Mapping[str, Any], head: Head) -> bool:
    """Whether a directory of a known ``model_type`` holds a ``score.weight``; ``head`` is what its role needs.

    Raises ModelError for an architecture that is not known, or has no such head.
    """
    family = raw["model_type"]
    plain, scoring = f"{FAMILIES[family]}ForCausalLM", f"{FAMILIES[family]}ForSequenceClassification"
    name = (raw.get("architectures") or ["none"])[0]
    if name == plain:
        return False
    if name != scoring:
        known = plain if head == "lm" else f"{plain}, {scoring}"
        raise ModelError(f"{where}: architecture {name} is not supported for model_type={family!r}; known: {known}")
    if head == "lm":
        raise ModelError(f"{where}: {name} has no language-model head; name a directory of a {plain}")
    labels = raw.get("num_labels") or len(raw.get("id2label") or "01")  # two labels are the default
    if labels != 1:
        raise ModelError(f"{where}: {name} with {labels} labels; a value needs one (num_labels=1)")
    return True


def refuse_unsupported(where: str, raw: Mapping[str, Any]) -> None:
    """Raises ModelError for a setting that changes the forward pass in a way that no code here knows.

    Running such a model as if the setting were off would be silently wrong.
    """
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ModelError(f"{where}: model_type={family!r} is not supported; known: {', '.join(FAMILIES)}")
    found = {
        "quantization_config": raw.get("quantization_config") is not None,
        "hidden_act": raw.get("hidden_act", "silu") != "silu",
        "attention_bias": family != "qwen2" and bool(raw.get("attention_bias")),
        "mlp_bias": bool(raw.get("mlp_bias")),
        "partial_rotary_factor": _rotary_part(raw) != 1.0,
    }
    for name, unsupported in found.items():
        if unsupported:
            raise ModelError(f"{where}: {name}={raw.get(name)!r} is not supported for {family}")
    _refuse_sliding_window(where, raw)


def position_count(raw: Mapping[str, Any]) -> float | None:
    """The longest sequence the model was made for; None where the file does not say."""
    positions = raw.get("max_position_embeddings")
    if not isinstance(positions, int):
        return None
    return positions * float(_rope(raw).get("factor") or 1.0)


def _refuse_sliding_window(where: str, raw: Mapping[str, Any]) -> None:
    # Mistral slides whenever it has a window; the others have one in the file and switch it on.
    mistral = raw["model_type"] == "mistral"
    if not (mistral or raw.get("use_sliding_window") or "sliding_attention" in (raw.get("layer_types") or ())):
        return
    window = raw.get("sliding_window", _SLIDING_WINDOW)
    positions = position_count(raw) or (_MISTRAL_POSITIONS if mistral else None)
    if window is not None and (positions is None or window < positions):
        reach = "an unknown number of" if positions is None else f"{positions:.0f}"
        raise ModelError(f"{where}: sliding_window={window} is not supported: it is less than {reach} positions")


def _rotary_part(raw: Mapping[str, Any]) -> float:
    return float(_rope(raw).get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0)


def _rope(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """transformers 5 writes ``rope_parameters``; before, ``rope_scaling``."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    return scaling if isinstance(scaling, dict) else {}
