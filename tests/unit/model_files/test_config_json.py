"""The reader of config.json: sizes, end of text, damage. The verdict on each key: test_hf_verdicts.py."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realsys.config.allocation import ParallelLayout, parse_allocation
from realsys.config.rules import check_model
from realsys.config.schema_train import TrainConfig
from realsys.errors import ConfigError, ModelError
from realsys.generation.embedded.engine import build_engine
from realsys.model_files.architecture import ModelSizes
from realsys.model_files.config_json import read_end_of_text, read_model, read_sizes
from realsys.model_files.rope import inverse_frequencies
from realsys.train.megatron.hf_model import transformer_config
from tests.support.processes.config_trees import changed

GOOD: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 20,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "layer_types": ["full_attention", "full_attention"],
    "eos_token_id": [1, 2],
    "rope_theta": 500.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


def write(directory, **changes):
    (directory / "config.json").write_text(json.dumps(GOOD | changes))
    return directory


def test_sizes_and_stored_defaults_are_read(tmp_path):
    sizes = ModelSizes(hidden=8, layers=2, heads=4, kv_heads=2, head_dim=4, ffn=12, outputs=20)
    assert read_sizes(write(tmp_path)) == sizes
    assert read_sizes(write(tmp_path, head_dim=None)).head_dim == 2
    assert read_sizes(write(tmp_path, num_key_value_heads=None)).kv_heads == 4
    assert read_sizes(tmp_path, head="value").outputs == 1


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "not found: name a directory with a Hugging Face model"),
        (b"{", "cannot be read as JSON: Expecting"),
        (b"\xff\xfe", "cannot be read as JSON: 'utf-8' codec"),
        (b"[" * 10**6, "cannot be read as JSON: maximum recursion"),
        (b"[]", "must contain a JSON object"),
    ],
)
def test_damaged_file_is_named(content, problem, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError) as caught:
        read_model(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/config.json: {problem}")
    assert "\n" not in str(caught.value)


def test_end_of_text_comes_from_both_files(tmp_path):
    write(tmp_path, eos_token_id=3)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 3]}')
    assert read_model(tmp_path).eos == (3, 5)
    assert read_end_of_text(tmp_path) == [5, 3, 3]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, true]}')
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id=\[5, True\] must be a token id"):
        read_model(tmp_path)


def test_rope_is_equal_in_old_and_new_transformers(tmp_path):
    old = read_model(write(tmp_path, rope_scaling=None)).rope
    new = {"rope_type": "default", "rope_theta": 500.0}
    assert read_model(write(tmp_path, rope_scaling=None, rope_theta=1.0, rope_parameters=new)).rope == old


# ---- random damage


CONFIG = changed("data.max_prompt_tokens=1", "generation.sampling.max_new_tokens=1")


def launcher(directory):
    try:
        check_model(directory, CONFIG, parse_allocation("sglang.d1+d1"))
    except ConfigError as error:
        assert "positions" in error.problem  # the run's lengths do not fit; nothing is wrong with the file


def trainer(directory):
    """Read what a rank reads before it opens the weights."""
    model = read_model(directory)
    transformer_config(model, ParallelLayout(), TrainConfig(), "float32")
    assert inverse_frequencies(model.rope, model.head_dim).isfinite().all()


def server(directory):
    try:
        build_engine(directory, CONFIG.generation, lambda *_: pytest.fail("no update"), context=1)
    except ModelError as error:
        if "model.safetensors" not in str(error):  # which is empty, and is read after config.json
            raise


def verdict(read, directory):
    try:
        read(directory)
    except ModelError as error:
        return str(error)
    return None


VALUES: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([None, True, False, "", "x", "yarn", [], [[]], {}, {"a": 1}, [1], ["x"], [None]]),
    st.sampled_from([0, -1, 1, 2, 3, 2.0, 1e-300, 0.5, 10**12, 10**400, 1e300, -1e300, float("nan"), float("inf")]),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
)
ROPE_KEYS = [*GOOD["rope_scaling"], "rope_theta", "type", "partial_rotary_factor", "full_attention"]
OTHER_KEYS = [*GOOD, "rope_parameters", "use_sliding_window", "quantization_config", "num_labels", "id2label"]
DAMAGE = st.tuples(st.sampled_from(["drop", "change", "drop in rope", "change in rope"]), st.integers(0, 99), VALUES)


def damaged(damage):
    values: dict[str, Any] = json.loads(json.dumps(GOOD))
    rope = values["rope_scaling"]
    for kind, number, value in damage:
        keys, target = (ROPE_KEYS, rope) if kind.endswith("rope") else (OTHER_KEYS, values)
        key = keys[number % len(keys)]
        if kind.startswith("drop"):
            target.pop(key, None)
        else:
            target[key] = value
    return values


@settings(max_examples=300, deadline=None)
@given(st.lists(DAMAGE, min_size=1, max_size=3))
def test_damaged_config_gets_one_verdict_from_all(damage):
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        for name in ("tokenizer.json", "model.safetensors"):
            (directory / name).touch()
        (directory / "config.json").write_text(json.dumps(damaged(damage)))
        found = [verdict(read, directory) for read in (launcher, trainer, server)]
        assert len(set(found)) == 1, found
        assert found[0] is None or (found[0].startswith(f"{directory}/config.json: ") and "\n" not in found[0])


def test_undamaged_config_is_accepted(tmp_path):
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / name).touch()
    write(tmp_path)
    assert [verdict(read, tmp_path) for read in (launcher, trainer, server)] == [None, None, None]
