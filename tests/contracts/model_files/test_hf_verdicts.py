"""One directory, four readers: launcher, trainer, embedded engine and SGLang's builder give the same verdict.

Each case also says whether transformers runs the model. Where both run it, tensors and frequencies are compared.
"""

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from realsys.config.allocation import ACTOR, ParallelLayout, parse_allocation
from realsys.config.dataflow import role_settings
from realsys.config.rules import check_model
from realsys.config.schema import Config
from realsys.errors import ModelError
from realsys.generation.embedded.engine import build_engine
from realsys.generation.sglang.backend import build_sglang_engine
from realsys.model_files.architecture import Head, Rope
from realsys.model_files.config_json import FAMILIES, read_model
from realsys.model_files.rope import inverse_frequencies
from realsys.train.megatron.train_engine import MegatronEngine
from tests.support.processes.config_trees import changed
from tests.support.serving.generation_models import make_tokenizer
from tests.support.training.train_ranks import FORMED, run_ranks

MISSING = "<the key is not in the file>"
BASE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "sliding_window": None,
}
LINEAR = {"rope_type": "linear", "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
ONE_LABEL, TWO_LABELS = {"0": "value"}, {"0": "no", "1": "yes"}


@dataclass(frozen=True)
class Case:
    """``problem``: what every reader says, None if all accept. ``runs``: transformers runs it (None: not asked)."""

    family: str
    changes: dict[str, Any]
    problem: str | None = None
    runs: bool | None = True
    head: Head = "lm"
    score: bool = False

    def write(self, directory):
        """A complete directory; weights are zeros, of the shapes that the reader says."""
        suffix = "ForSequenceClassification" if self.score else "ForCausalLM"
        raw: dict[str, Any] = {"model_type": self.family, "architectures": [FAMILIES[self.family].classes + suffix]}
        raw |= BASE | ({"head_dim": 8} if self.family == "qwen3" else {}) | self.changes
        directory.mkdir()
        text = json.dumps({key: value for key, value in raw.items() if value is not MISSING})
        (directory / "config.json").write_text(text)
        make_tokenizer(directory)
        shapes = read_model(directory, self.head).tensor_shapes() if self.problem is None else {"x": (1,)}
        save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, directory / "model.safetensors")
        return directory


def accepted():
    everywhere = [Case(family, {}) for family in FAMILIES]
    everywhere += [Case(family, {"max_position_embeddings": MISSING}) for family in FAMILIES]
    everywhere += [Case(family, {"tie_word_embeddings": True}) for family in FAMILIES]
    everywhere += [Case(family, {"head_dim": MISSING}) for family in FAMILIES]
    return [
        *everywhere,
        Case("llama", {"head_dim": None}),
        Case("mistral", {"head_dim": None}),
        *(Case(family, {"num_key_value_heads": None}) for family in ("qwen2", "qwen3", "llama")),
        Case("llama", {"num_key_value_heads": MISSING}),
        Case("qwen2", {"num_key_value_heads": MISSING, "num_attention_heads": 32, "head_dim": 2}),
        Case("mistral", {"num_key_value_heads": MISSING, "num_attention_heads": 16, "head_dim": 4}),
        Case("qwen2", {"hidden_size": 34}),
        Case("qwen2", {"attention_bias": True}),
        Case("llama", {"attention_bias": False, "mlp_bias": False}),
        Case("llama", {"rope_scaling": LINEAR}),
        Case("qwen2", {"rope_scaling": {"type": "linear", "factor": 2}, "rope_theta": 500.0}),
        Case("llama", {"rope_parameters": LLAMA3 | {"rope_theta": 500.0}}),
        Case("llama", {"rope_scaling": LLAMA3, "rope_theta": 500}),
        *(Case(family, {"rope_scaling": YARN}) for family in FAMILIES),
        Case("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}),
        Case("qwen3", {"rope_parameters": YARN | {"rope_theta": 1e6, "beta_fast": 2, "beta_slow": 2}}),
        Case("llama", {"rope_scaling": YARN | {"factor": 1.0, "truncate": True, "attention_factor": None}}),
        Case("llama", {"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}),
        Case("llama", {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}),
        Case("llama", {"partial_rotary_factor": 1.0}),
        Case("mistral", {"sliding_window": MISSING}),
        Case("qwen2", {"sliding_window": 8, "use_sliding_window": False}),
        Case("qwen2", {"eos_token_id": [1, 2]}),
        Case("qwen2", {}, head="value"),
        Case("qwen2", {"id2label": ONE_LABEL}, head="value", score=True),
        Case("llama", {"num_labels": 1}, head="value", score=True),
        Case("mistral", {"num_labels": 1, "id2label": TWO_LABELS}, head="value", score=True),
    ]


def refused():
    integer, switch, most = "must be a positive integer", "must be true or false", "max_position_embeddings"
    return [
        *(Case(f, {most: None}, f"{most}=None {integer}", False) for f in FAMILIES),
        *(Case(f, {"head_dim": 5}, "head_dim=5 must be even", False) for f in FAMILIES),
        Case("llama", {"hidden_size": 20}, "hidden_size=20 gives heads of 5 dimensions", False),
        Case("qwen2", {"head_dim": None}, f"head_dim=None {integer}", False),
        Case("qwen3", {"head_dim": None}, f"head_dim=None {integer}", False),
        Case("mistral", {"num_key_value_heads": None}, f"num_key_value_heads=None {integer}", False),
        Case("qwen2", {"num_key_value_heads": MISSING}, "num_key_value_heads=32, the default of Qwen2", False),
        Case("mistral", {"num_key_value_heads": MISSING}, "num_key_value_heads=8, the default of Mistral", False),
        Case("llama", {"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads=3", False),
        Case("llama", {"hidden_size": 34}, "hidden_size=34 must be a multiple of num_attention_heads", False),
        *(Case("qwen2", {name: MISSING}, f"{name} is missing", None) for name in list(BASE)[:5]),
        Case("qwen2", {"num_hidden_layers": 2.0}, f"num_hidden_layers=2.0 {integer}", False),
        Case("qwen2", {"num_attention_heads": "4"}, f"num_attention_heads='4' {integer}", False),
        Case("qwen2", {"num_attention_heads": True}, f"num_attention_heads=True {integer}", False),
        Case("qwen2", {"num_hidden_layers": 10**12}, "at most 4096", None),
        *(Case(f, {"tie_word_embeddings": None}, f"tie_word_embeddings=None {switch}", False) for f in FAMILIES),
        Case("qwen3", {"attention_bias": True}, "attention_bias=True is not supported for qwen3; known: false"),
        Case("llama", {"attention_bias": True}, "attention_bias=True is not supported for llama"),
        Case("mistral", {"attention_bias": True}, "attention_bias=True is not supported for mistral"),
        Case("llama", {"attention_bias": None}, "attention_bias=None is not supported for llama", False),
        Case("llama", {"mlp_bias": True}, "mlp_bias=True is not supported for llama"),
        Case("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported; known: 1.0"),
        Case("qwen2", {"rms_norm_eps": None}, "rms_norm_eps=None must be a number", False),
        Case("qwen2", {"rms_norm_eps": 1}, "rms_norm_eps=1 must be a number", False),
        Case("qwen2", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; known: silu"),
        Case("qwen2", {"hidden_act": "swish"}, "hidden_act='swish' is not supported; known: silu"),
        Case("qwen2", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config=.* not quantized", None),
        Case("qwen2", {"eos_token_id": "5"}, "eos_token_id='5' must be a token id", False),
        Case("mistral", {"sliding_window": 8}, "sliding_window=8 is not supported: it is less than 64 positions"),
        Case("mistral", {"sliding_window": MISSING, "max_position_embeddings": 8192}, "sliding_window=4096 is not"),
        Case("qwen2", {"use_sliding_window": True, "sliding_window": 8}, "sliding_window=8 is not supported"),
        Case("qwen2", {"layer_types": 3}, "layer_types=3 is not supported; known: a list of", False),
        Case("qwen2", {"model_type": MISSING}, "model_type is missing; known: qwen2, qwen3, llama, mistral", None),
        Case("qwen2", {"model_type": "mamba"}, "model_type='mamba' is not supported; known: qwen2, ", None),
        Case("qwen2", {"architectures": MISSING}, "architectures is missing; known: Qwen2ForCausalLM"),
        Case("qwen2", {"architectures": ["LlamaForCausalLM"]}, "is not supported for qwen2; known: Qwen2ForCausalLM"),
        Case("qwen2", {"id2label": ONE_LABEL}, "has no language-model head", None, score=True),
        Case("qwen2", {}, "with 2 labels is not supported: a value needs one", head="value", score=True),
        Case("qwen2", {"id2label": {}}, "with 0 labels is not supported", None, head="value", score=True),
        Case("qwen2", {"num_labels": 3, "id2label": ONE_LABEL}, "with 3 labels", head="value", score=True),
        Case("qwen2", {"id2label": 7}, "id2label=7 must be an object", False, head="value", score=True),
    ]


def refused_ropes():
    known = "is not supported; known: default, linear, llama3, yarn"
    return [
        Case("llama", {"rope_scaling": YARN | {"attention_factor": 1.5}}, "attention_factor=1.5 is not supported"),
        Case("llama", {"rope_parameters": YARN | {"mscale": 2.0}}, "mscale=2.0 is not supported with yarn"),
        Case("llama", {"rope_scaling": YARN | {"truncate": False}}, "truncate=False is not supported with yarn"),
        Case("llama", {"rope_scaling": YARN | {"factor": 0.5}}, "factor=0.5 must be at least 1"),
        Case("llama", {"rope_scaling": YARN | {"beta_fast": 0.5}}, "beta_fast=0.5 must be at least beta_slow"),
        Case("llama", {"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta=1.0 must be larger than 1", False),
        Case("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, f"rope_scaling.type='dynamic' {known}"),
        Case("llama", {"rope_scaling": {"rope_type": "odd"}}, f"rope_type='odd' {known}", False),
        Case("llama", {"rope_scaling": {"rope_type": None, **LINEAR} | {"rope_type": None}}, "rope_type=None", False),
        Case("llama", {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing", False),
        Case("llama", {"rope_scaling": LINEAR | {"factor": "2"}}, "rope_scaling.factor='2' must be a number", False),
        Case("llama", {"rope_scaling": LINEAR | {"factor": 0}}, "rope_scaling.factor=0 must be a number from 1e-12"),
        Case("llama", {"rope_scaling": [1]}, r"rope_scaling=\[1\] must be an object", False),
        Case("llama", {"rope_theta": None}, "rope_theta=None must be a number", False),
        Case(
            "llama",
            {"rope_scaling": {key: value for key, value in LLAMA3.items() if not key.startswith("original")}},
            "rope_scaling.original_max_position_embeddings is missing",
        ),
        Case("llama", {"rope_scaling": LLAMA3, "original_max_position_embeddings": 8}, "=8 must be 16", None),
        Case(
            "mistral",
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}, "layer_types": ["full_attention"] * 2},
            "rope_parameters.full_attention=.* all layers must have the same RoPE",
            False,
        ),
    ]


CASES = [*accepted(), *refused(), *refused_ropes()]


def name_of(case):
    head = case.head + ("+score" if case.score else "")
    return f"{case.family}-{head}-{case.changes or 'as it is'}"[:90]


def verdict(read):
    """The message of a refusal; any other exception than ModelError fails the test."""
    try:
        read()
    except ModelError as error:
        return str(error)
    return None


CONFIG = changed("data.max_prompt_tokens=4", "generation.sampling.max_new_tokens=4")


def launcher(path, case):
    role = ACTOR if case.head == "lm" else "critic"
    check_model(path, CONFIG, parse_allocation("sglang.d1+d1"), role=role, head=case.head)


def embedded_engine(path):
    build_engine(path, CONFIG.generation, lambda *_: pytest.fail("no update was asked for"), context=4)


def sglang_builder(path):
    config = changed("generation.backend=sglang", "allocation=sglang.d1+d1")
    build_sglang_engine(path, config, lambda *_: pytest.fail("no update was asked for"), print)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return [case.write(root / str(number)) for number, case in enumerate(CASES)]


@pytest.fixture(scope="module")
def trainer_verdicts(directories):
    """A trainer's rank loads every directory, as far as it gets."""

    def body(rank, device):
        found = []
        for case, path in zip(CASES, directories, strict=True):
            settings = role_settings(Config(), ACTOR if case.head == "lm" else "critic")
            engine = MegatronEngine(Config(), settings, FORMED[ACTOR], device, trainable=False)
            found.append(verdict(lambda engine=engine, path=path: engine.load(path)))  # type: ignore[misc]
        return found

    verdicts: list[list[str | None]] = run_ranks(1, body, Config(), ParallelLayout())
    return verdicts[0]


@pytest.mark.parametrize("number", range(len(CASES)), ids=[name_of(case) for case in CASES])
def test_all_readers_give_the_same_verdict(number, directories, trainer_verdicts):
    case, path = CASES[number], directories[number]
    found = {"launcher": verdict(lambda: launcher(path, case)), "trainer": trainer_verdicts[number]}
    if case.head == "lm":  # servers serve the actor only
        found["embedded"] = verdict(lambda: embedded_engine(path))
        found["sglang"] = verdict(lambda: sglang_builder(path))
    said = found["launcher"]
    assert found == dict.fromkeys(found, said)
    if case.problem is None:
        assert said is None
    else:
        assert said is not None and said.startswith(f"{path}/config.json: ") and "\n" not in said
        with pytest.raises(ModelError, match=case.problem):
            raise ModelError(said)


@pytest.mark.parametrize("head_dim", [2, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("theta", [500.0, 1e4, 5e5, 1e6])
def test_frequencies_equal_those_of_transformers(theta, head_dim):
    """Bit for bit, on sizes of real models."""
    long = LLAMA3 | {"factor": 8.0, "original_max_position_embeddings": 8192}
    ropes: dict[Rope, dict[str, Any]] = {
        Rope(theta): {"rope_type": "default"},
        Rope(theta, "linear", 3.0): LINEAR | {"factor": 3.0},
        Rope(theta, "llama3", 8.0, 1.0, 4.0, 8192): long,
        Rope(theta, "llama3", 4.0, 1.0, 4.0, 16): LLAMA3,
        Rope(theta, "yarn", 4.0, original_positions=32768): YARN | {"original_max_position_embeddings": 32768},
        Rope(theta, "yarn", 2.5, original_positions=16, beta_fast=3.0): YARN | {"factor": 2.5, "beta_fast": 3.0},
    }
    for rope, parameters in ropes.items():
        config = LlamaConfig(head_dim=head_dim, rope_parameters=parameters | {"rope_theta": theta})
        theirs = LlamaRotaryEmbedding(config)
        assert torch.equal(inverse_frequencies(rope, head_dim), theirs.inv_freq)
        assert rope.magnitude == theirs.attention_scaling


def run_in_transformers(path, case):
    kind: Any = AutoModelForSequenceClassification if case.score else AutoModelForCausalLM
    model = kind.from_config(AutoConfig.from_pretrained(path))
    model(torch.tensor([[1]]))
    return model


@pytest.mark.parametrize("number", range(len(CASES)), ids=[name_of(case) for case in CASES])
def test_verdict_follows_transformers(number, directories):
    case, path = CASES[number], directories[number]
    if case.runs is None:
        return
    if not case.runs:
        with pytest.raises(Exception):  # noqa: B017  transformers has no common base of its errors
            run_in_transformers(path, case)
        return
    theirs = run_in_transformers(path, case)
    if case.problem is not None:
        return
    ours = read_model(path, "value" if case.score else "lm")
    skipped = {"lm_head.weight"} if ours.tied else set()
    shapes = {name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items() if name not in skipped}
    assert ours.tensor_shapes() == shapes
    assert torch.equal(inverse_frequencies(ours.rope, ours.head_dim), theirs.model.rotary_emb.inv_freq)
    assert ours.rope.magnitude == theirs.model.rotary_emb.attention_scaling
    stated = theirs.config.max_position_embeddings
    expected = {
        "linear": stated * ours.rope.factor,
        "yarn": max(stated, ours.rope.original_positions * ours.rope.factor),
    }
    assert ours.positions == expected.get(ours.rope.kind, stated)
