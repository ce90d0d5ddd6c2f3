"""Published sizes of Qwen2.5 and Qwen3 models as HF directories without weights: values of their config.json only."""

import json
from pathlib import Path

_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
)
_SIZES = {
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "3B": (2048, 11008, 36, 16, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
    "14B": (5120, 13824, 48, 40, 8, 152064, False),
    "32B": (5120, 27648, 64, 40, 8, 152064, False),
}
_QWEN3_4B = (2560, 9728, 36, 32, 8, 151936, True)
QWEN = ("1.5B", "7B", "14B", "32B")


def write_qwen(folder: Path, name: str, **changes: object) -> Path:
    """Write the directory of Qwen2.5 ``name``, or of Qwen3 4B, and return it. The weight file is empty."""
    family, cls, sizes = ("qwen3", "Qwen3", _QWEN3_4B) if name == "3-4B" else ("qwen2", "Qwen2", _SIZES[name])
    directory = folder / name
    directory.mkdir(parents=True, exist_ok=True)
    config = {"model_type": family, "architectures": [f"{cls}ForCausalLM"], "max_position_embeddings": 32768}
    config |= dict(zip(_KEYS, sizes, strict=True))
    (directory / "config.json").write_text(json.dumps(config | changes))
    for file in ("tokenizer.json", "model.safetensors"):
        (directory / file).touch()
    return directory
