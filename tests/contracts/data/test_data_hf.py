"""The tiny model and its tokenizer, as transformers sees them."""

import msgspec
import numpy as np
import pytest
import transformers

from realsys.config.schema import TinyModelConfig
from realsys.data.arith import make_tiny_model, write_char_tokenizer
from realsys.data.lines import Message
from realsys.data.tokenizer import TextTokenizer
from realsys.model_files.architecture import ALPHABET

transformers.utils.logging.disable_progress_bar()  # it leaves a thread behind


@pytest.mark.parametrize("loader", ["AutoTokenizer", "PreTrainedTokenizerFast"])
def test_transformers_reads_the_tokenizer_the_same_way(tmp_path, loader):
    write_char_tokenizer(tmp_path)
    make_tiny_model(TinyModelConfig(num_hidden_layers=1), tmp_path, seed=1)
    ours, theirs = TextTokenizer(tmp_path), getattr(transformers, loader).from_pretrained(tmp_path)
    ids = ours.encode_prompt(ALPHABET)
    assert theirs(ALPHABET).input_ids == ids
    assert theirs.decode(ids, skip_special_tokens=True) == ALPHABET
    assert len(theirs) == ours.vocab_size, "a token beyond the embedding"
    assert (theirs.eos_token_id, theirs.bos_token_id, theirs.pad_token_id) == (1, 2, 0)


def test_transformers_renders_the_chat_form_the_same(tmp_path):
    write_char_tokenizer(tmp_path, chat=True)
    make_tiny_model(TinyModelConfig(num_hidden_layers=1, chat=True), tmp_path, seed=1)
    ours, theirs = TextTokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"of": "3+5"}}}
    chat = [Message("user", "Wie groß?\n"), Message("assistant", None, [call]), Message("tool", "8")]
    dicts = [msgspec.to_builtins(message) for message in chat]
    rendered = theirs.apply_chat_template(dicts, tools=tools, add_generation_prompt=True, return_dict=True)
    assert list(rendered["input_ids"]) == ours.encode_prompt(chat, tools=tools)
    assert len(theirs) == ours.vocab_size and theirs.eos_token_id == ours.eos_token_id
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path).config.vocab_size == ours.vocab_size


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_every_tensor_of_the_tiny_model(tmp_path, tied):
    tiny = TinyModelConfig(tie_word_embeddings=tied, head_dim=48)
    make_tiny_model(tiny, tmp_path, seed=5)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    state = model.state_dict()
    assert state["model.embed_tokens.weight"].shape == (44, 128)
    assert (state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()) == tied
    spread = {name: float(value.std()) for name, value in state.items()}
    assert spread["model.embed_tokens.weight"] == pytest.approx(0.02, rel=0.05)
    assert spread["model.layers.0.self_attn.q_proj.weight"] == pytest.approx(128**-0.5, rel=0.05)
    assert spread["model.layers.1.mlp.down_proj.weight"] == pytest.approx(0.5 * 256**-0.5, rel=0.05)
    assert model.generation_config.eos_token_id == 1


def test_the_seed_decides_the_weights(tmp_path):
    from safetensors.numpy import load_file

    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_tiny_model(TinyModelConfig(), tmp_path / name, seed=seed)
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert all(np.array_equal(a[name], b[name]) for name in a) and a.keys() == b.keys()
    assert not np.array_equal(a["lm_head.weight"], c["lm_head.weight"])
