"""HF directories in and out: families, heads, tied or not, one file or several, on several layouts.

Log-probs are compared with transformers, exported weights with the imported ones, bit for bit. Gradients and steps on
every layout: test_layouts.py.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen2Config

from realsys.config.allocation import ACTOR, ParallelLayout
from realsys.config.dataflow import role_settings
from realsys.config.schema import Config
from realsys.errors import ModelError
from realsys.model_files.config_json import read_model
from realsys.train.megatron.collectives import ReplicaReader
from realsys.train.megatron.hf_model import HFReader, ShardMap
from realsys.train.megatron.train_engine import MegatronEngine
from realsys.train.worker.packing import MicroBatch
from tests.support.serving.generation_models import chosen, make_core, make_request, reference_logprobs
from tests.support.serving.generation_models import run as generate
from tests.support.serving.hf_models import FAMILIES, SIZES, VOCAB, make_model, weights_of
from tests.support.training.sample_records import make_ref, mask_of
from tests.support.training.train_ranks import FORMED, cat_exports, run_ranks

LENGTHS = [9, 5, 1]
TOKENS = torch.randint(0, VOCAB, (sum(LENGTHS),), generator=torch.Generator().manual_seed(5))
LAYOUTS = {
    "d1": ParallelLayout(),
    "m2": ParallelLayout(tensor=2),
    "p2": ParallelLayout(pipeline=2),
    "p3": ParallelLayout(pipeline=3),
    "p2m2": ParallelLayout(pipeline=2, tensor=2),
}


def sequences():
    return list(TOKENS.split(LENGTHS))


@torch.no_grad()
def expected_logprobs(model):
    """Return the log-probs of the vocabulary at every position, per sequence: [t, V]."""
    return torch.cat([model(ids[None]).logits[0].log_softmax(-1) for ids in sequences()])


@torch.no_grad()
def expected_values(model):
    """At every position: [t]."""
    body: Any = model.model
    score: Any = model.score
    return torch.cat([score(body(ids[None]).last_hidden_state[0])[:, 0] for ids in sequences()])


def load_engine(path, device, role=ACTOR, config=None):
    config = config or Config()
    engine = MegatronEngine(config, role_settings(config, role), FORMED[ACTOR], device, trainable=False)
    engine.load(path)
    return engine


def whole_vocabulary(engine):
    """Log-probs [t, V]; None before the last stage."""
    positions = torch.arange(len(TOKENS)).repeat_interleave(VOCAB)
    targets = torch.arange(VOCAB).repeat(len(TOKENS))
    found = engine.logprobs([MicroBatch([], list(LENGTHS), positions, TOKENS, targets)])
    return found[0].reshape(len(TOKENS), VOCAB) if found else None


def every_value(engine):
    """Values [t] of packed sequences, all of which but the first token is the answer; None before the last stage."""
    refs = [make_ref(f"s/{i}", length, 1, 0.0, False, i) for i, length in enumerate(LENGTHS)]
    positions = np.flatnonzero(np.concatenate([mask_of(ref) for ref in refs]))
    rows = torch.zeros(0, dtype=torch.int64)
    found = engine.values([MicroBatch(refs, list(LENGTHS), rows, TOKENS, positions=positions)])
    return found[0] if found else None


def exported(engine):
    return {name: tensor.clone() for name, tensor in engine.export()}


def assert_same_model(found, expected, weights):
    """Check the log-probs and the export of each rank in ``found``."""
    computed = [values for values, _ in found if values is not None]
    assert computed
    for values in computed:
        torch.testing.assert_close(values, expected, atol=1e-4, rtol=0)
    written = cat_exports([tensors for _, tensors in found])
    assert written.keys() == weights.keys()
    assert [name for name, tensor in weights.items() if not torch.equal(written[name], tensor)] == []


# ---- models that are read, computed with and written again


Saved = dict[tuple[str, bool, str], tuple[Path, torch.Tensor, dict[str, torch.Tensor]]]


@pytest.fixture(scope="module")
def language_models(tmp_path_factory):
    """(family, tied, form of the files) -> directory, log-probs, weights."""
    saved: Saved = {}
    for family in FAMILIES:
        for tied in (False, True):
            model = make_model(family, tied=tied)
            expected, weights = expected_logprobs(model), weights_of(model)
            for form, largest in (("single", "1GB"), ("sharded", "12KB")):
                path = tmp_path_factory.mktemp(f"{family}-{form}")
                model.save_pretrained(path, max_shard_size=largest)
                assert (path / "model.safetensors.index.json").exists() == (form == "sharded")
                saved[family, tied, form] = (path, expected, weights)
    return saved


@pytest.mark.parametrize("name", LAYOUTS)
def test_log_probs_and_exported_weights_match_transformers(name, language_models):
    form = "single" if name == "d1" else "sharded"
    models = {case: made for case, made in language_models.items() if case[2] == form}

    def body(rank, device):
        found = {}
        for case, (path, _, _) in models.items():
            engine = load_engine(path, device)
            found[case] = (whole_vocabulary(engine), exported(engine))
        return found

    ranks = run_ranks(LAYOUTS[name].world_size, body, Config(), LAYOUTS[name])
    for case, (_, expected, weights) in models.items():
        assert_same_model([found[case] for found in ranks], expected, weights)


@pytest.mark.parametrize("name", ["d1", "p2m2"])
def test_values_of_a_sequence_classification_model(name, tmp_path):
    models = {family: make_model(family, value=True, tied=family == "qwen2") for family in FAMILIES}
    for family, model in models.items():
        model.save_pretrained(tmp_path / family)

    def body(rank, device):
        found = {}
        for family in models:
            engine = load_engine(tmp_path / family, device, "critic")
            found[family] = (every_value(engine), exported(engine))
        return found

    ranks = run_ranks(LAYOUTS[name].world_size, body, Config(), LAYOUTS[name])
    for family, model in models.items():
        expected = expected_values(model)
        assert expected.abs().max() > 0.1
        assert_same_model([found[family] for found in ranks], expected, weights_of(model))


def test_value_role_starts_at_zero(language_models):
    """The folder holds a language model without a value head."""
    path, _, weights = language_models["qwen2", False, "single"]

    def body(rank, device):
        engine = load_engine(path, device, "critic")
        return every_value(engine), exported(engine)

    layout = LAYOUTS["p2m2"]
    expected = weights | {"score.weight": torch.zeros(1, SIZES["hidden_size"])}
    del expected["lm_head.weight"]
    assert_same_model(run_ranks(4, body, Config(), layout), torch.zeros(len(TOKENS)), expected)


def test_bfloat16_weights_come_out_as_they_went_in(tmp_path):
    model = make_model("mistral").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    config = Config.model_validate({"model": {"dtype": "bfloat16"}})

    def body(rank, device):
        return exported(load_engine(tmp_path, device, config=config))

    written = cat_exports(run_ranks(4, body, config, LAYOUTS["p2m2"]))
    weights = weights_of(model)
    assert written.keys() == weights.keys()
    assert all(written[name].dtype == torch.bfloat16 for name in weights)
    assert all(torch.equal(written[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_the_embedded_engine_serves_the_model(family, tied, tmp_path):
    """Qwen3's rotary embedding is stretched by YaRN here."""
    model = make_model(family, tied=tied)
    model.save_pretrained(tmp_path)
    prompt = [3, 1, 4, 1, 5]
    ((answer,),) = generate(make_core(tmp_path), make_request("r", prompt, max_new_tokens=12, temperature=1.0))
    tokens = [int(token) for token in answer.tokens]
    assert len(tokens) == 12
    expected = chosen(reference_logprobs(model, prompt, tokens), tokens)
    assert max(abs(a - b) for a, b in zip(answer.logprobs, expected, strict=True)) < 1e-4


# ---- a rank reads its own slices only


MEBI = 1 << 20


def big_model(path):
    """A checkpoint of tens of MB, its tensors far larger than one read-ahead of the kernel. Returns its bytes."""
    config = Qwen2Config(**(SIZES | {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 2048}))
    path.mkdir()
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(path)
    shapes = read_model(path).tensor_shapes()
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, path / "model.safetensors")
    return (path / "model.safetensors").stat().st_size


def status_bytes(field):
    """A figure of /proc/self/status, which counts in kB."""
    match = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(match[1]) << 10


def mapped_bytes(path):
    """Return the bytes of ``path`` that this process has read through its mappings."""
    read, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"^[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            read += int(line.split()[1]) << 10
    return read


def test_a_rank_touches_only_its_own_slices(tmp_path):
    path = tmp_path / "model"
    size = big_model(path)
    assert size > 80 * MEBI

    def body(rank, device):
        engine = load_engine(path, device)  # imports and allocators are warm from here on
        shard = sum(p.numel() * p.element_size() for p in engine.module.parameters())
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = status_bytes("VmRSS")
        other = load_engine(path, device)
        peak = status_bytes("VmHWM") - before
        shards = ShardMap(read_model(path), engine.groups.tensor_rank, 2)
        with HFReader(path) as reader:
            reader.check(shards.model)
            checked = mapped_bytes(path / "model.safetensors")
            assert other.module is not None
            shards.fill(other.module, reader, ReplicaReader(engine.groups.data, device, ModelError))
            return shard, peak, checked, mapped_bytes(path / "model.safetensors")

    for shard, peak, checked, read in run_ranks(4, body, Config(), LAYOUTS["p2m2"]):
        assert shard < 0.3 * size
        assert checked < MEBI  # names and shapes are in the headers
        # A quarter, and its neighbours: pages may be 2 MiB, and a tensor split by columns is in each of its pages.
        assert shard - MEBI < read < 0.5 * size
        # Beside the pages of the file (shared, and the kernel's to drop) there is one parameter on its way at a time.
        assert peak - read < shard + 8 * MEBI
