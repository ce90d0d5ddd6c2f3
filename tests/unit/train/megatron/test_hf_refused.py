"""Model directories that do not fit: one line with file, tensor and numbers, at the check and again at load."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from realsys.config.allocation import ParallelLayout
from realsys.config.machine import Machine
from realsys.config.rules import check
from realsys.errors import ConfigError, ModelError
from realsys.model_files.config_json import read_model
from realsys.model_files.weight_headers import check_weights
from realsys.train.megatron.hf_model import HFReader, check_layout
from tests.support.processes.config_trees import changed
from tests.support.serving.hf_models import make_model

MACHINE = Machine(cpus=8, memory_bytes=64 << 30)
SHORT = ["data.max_prompt_tokens=20", "generation.sampling.max_new_tokens=20"]


def directory(path, family="qwen2", *, value=False, **changes):
    """A model directory as config checks want it: with a tokenizer (which they do not read)."""
    make_model(family, value=value, **changes).save_pretrained(path)
    (path / "tokenizer.json").touch()
    return path


def change_config(path, **changes):
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


SLIDING: list[tuple[dict[str, Any], str | None]] = [
    ({"sliding_window": None}, None),
    ({"sliding_window": 128}, None),
    ({"sliding_window": 127}, "sliding_window=127 is not supported: it is less than 128 positions"),
]


@pytest.mark.parametrize(("changes", "problem"), SLIDING)
def test_sliding_window_is_refused_at_check_and_load(changes, problem, tmp_path):
    path = directory(tmp_path, "mistral", **changes)
    config = changed(f"model.path={path}", *SHORT)
    if problem is None:
        check(config, MACHINE)
        assert read_model(path).family == "mistral"
        return
    for refuse in (lambda: check(config, MACHINE), lambda: read_model(path)):
        with pytest.raises(ModelError, match=problem):
            refuse()


def test_mistral_without_window_setting_slides_over_4096(tmp_path):
    path = directory(tmp_path, "mistral")
    raw = json.loads((path / "config.json").read_text()) | {"max_position_embeddings": 32768}
    del raw["sliding_window"]
    (path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match="sliding_window=4096 is not supported: it is less than 32768 positions"):
        read_model(path)


UNEVEN = [
    ({"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 4}, "m4", "num_attention_heads", 6),
    ({"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 4}, "m4", "num_key_value_heads", 6),
    ({"num_key_value_heads": 4, "intermediate_size": 50}, "m4", "intermediate_size", 50),
]


@pytest.mark.parametrize(("changes", "axis", "name", "size"), UNEVEN, ids=[case[2] for case in UNEVEN])
def test_indivisible_sizes_are_refused_with_numbers(changes, axis, name, size, tmp_path):
    path = directory(tmp_path, "qwen3", **changes)
    with pytest.raises(ConfigError) as caught:
        check(changed(f"model.path={path}", f"allocation=sglang.d1+{axis}", *SHORT), MACHINE)
    said = str(caught.value)
    assert str(size) in said and axis in said and "divide by" in said and "\n" not in said
    layout = ParallelLayout(tensor=4)
    with pytest.raises(ModelError, match=f"{name}={size} must divide by {axis} of the training layout"):
        check_layout(read_model(path), layout)


def test_a_head_that_is_not_there_is_refused(tmp_path):
    scored = directory(tmp_path / "scored", value=True)
    plain = directory(tmp_path / "plain")
    problem = "has no language-model head: name a directory of a Qwen2ForCausalLM"
    with pytest.raises(ModelError, match=problem):
        read_model(scored)
    with pytest.raises(ModelError, match=problem):
        check(changed(f"model.path={scored}", *SHORT), MACHINE)
    reward = ["train.ppo.reward_model_weight=1", *SHORT]
    check(changed(f"roles.reward.path={scored}", *reward), MACHINE)
    with pytest.raises(ConfigError, match=r"roles\.reward\.path.*without score\.weight"):
        check(changed(f"roles.reward.path={plain}", *reward), MACHINE)
    change_config(scored, id2label={"0": "no", "1": "yes"})
    with pytest.raises(ModelError, match="with 2 labels is not supported: a value needs one"):
        check(changed(f"roles.reward.path={scored}", *reward), MACHINE)


def load(path):
    """As a rank does before it builds anything."""
    with HFReader(path) as reader:
        reader.check(read_model(path))


def edit(path, change, file="model.safetensors"):
    tensors = load_file(path / file)
    change(tensors)
    save_file(tensors, path / file, {"format": "pt"})


def spoil_shard(path):
    shard = sorted(path.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])


def remove_shard(path):
    sorted(path.glob("model-*.safetensors"))[1].unlink()


def move_tensor(path):
    """The index says another file than the one a tensor is in."""
    index = json.loads((path / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"]["model.norm.weight"] = next(f for f in files if f != index["weight_map"]["model.norm.weight"])
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def other_model(path):
    make_model("qwen3").save_pretrained(path)
    change_config(path, model_type="qwen2", architectures=["Qwen2ForCausalLM"])


NORM = "model.norm.weight"
UP = "model.layers.0.mlp.up_proj.weight"
WRONG: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "config disagrees": (
        "single",
        lambda p: change_config(p, intermediate_size=64),
        r"model\.safetensors: tensor \S+\.gate_proj\.weight has shape \(48, 32\), config\.json requires \(64, 32\)",
    ),
    "more layers": (
        "single",
        lambda p: change_config(p, num_hidden_layers=5),
        r"model\.safetensors: tensor model\.layers\.4\..* not found; config\.json requires one of shape \(32, 32\)",
    ),
    "fewer layers": (
        "single",
        lambda p: change_config(p, num_hidden_layers=3),
        r"tensor model\.layers\.3\.input_layernorm\.weight is not part of the model that config\.json describes",
    ),
    "tensor missing": (
        "single",
        lambda p: edit(p, lambda t: t.pop(NORM)),
        r"tensor model\.norm\.weight not found; config\.json requires one of shape \(32,\)",
    ),
    "tensor too many": (
        "single",
        lambda p: edit(p, lambda t: t.update({"visual.weight": torch.zeros(3)})),
        r"tensor visual\.weight is not part of the model",
    ),
    "wrong shape": (
        "single",
        lambda p: edit(p, lambda t: t.update({UP: torch.zeros(48, 31)})),
        r"tensor model\.layers\.0\.mlp\.up_proj\.weight has shape \(48, 31\), config\.json requires \(48, 32\)",
    ),
    "quantised": (
        "single",
        lambda p: edit(p, lambda t: t.update({NORM: torch.zeros(32, dtype=torch.int8)})),
        r"tensor model\.norm\.weight is I8: must be one of F32, BF16, F16, F64",
    ),
    "another model": ("single", other_model, r"tensor model\.layers\.0\.self_attn\.k_norm\.weight is not part of"),
    "shard truncated": ("sharded", spoil_shard, r"model-00002-of-\d+\.safetensors: cannot be read"),
    "shard not there": (
        "sharded",
        remove_shard,
        r"index\.json: file model-00002-of-\d+\.safetensors not found, which should hold \d+ tensors, such as \S+",
    ),
    "index wrong": ("sharded", move_tensor, r"\.safetensors: tensor model\.norm\.weight: "),
    "index broken": (
        "sharded",
        lambda p: (p / "model.safetensors.index.json").write_text("{}"),
        r"index\.json must be an index of safetensors with a weight_map",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_files_that_contradict_model_are_named(case, tmp_path):
    form, spoil, problem = WRONG[case]
    make_model("qwen2").save_pretrained(tmp_path, max_shard_size="12KB" if form == "sharded" else "1GB")
    load(tmp_path)
    spoil(tmp_path)
    with pytest.raises(ModelError, match=problem) as caught:
        load(tmp_path)
    assert str(caught.value).startswith(str(tmp_path)) and "\n" not in str(caught.value)


def test_head_beside_a_tied_embedding_must_equal_it(tmp_path):
    """transformers would load both, so a model that takes one of them is another model."""
    path = directory(tmp_path, tie_word_embeddings=True)
    tensors = load_file(path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    for change, problem in ((0.0, None), (1e-3, "lm_head.weight differs from model.embed_tokens.weight")):
        save_file({**tensors, "lm_head.weight": embedding + change}, path / "model.safetensors", {"format": "pt"})
        if problem is None:
            check_weights(path, read_model(path))
            continue
        with pytest.raises(ModelError, match=problem):
            check_weights(path, read_model(path))
