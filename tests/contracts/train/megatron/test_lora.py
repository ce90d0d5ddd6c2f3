"""Low-rank adapters against plain torch: the same model in transformers, with W + (alpha / rank) B A in its matrices.

qkv and gate_up are adapters of Megatron's fused matrices, so q, k and v share one A, and gate and up another.
"""

import math
import shutil
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from realsys.config.allocation import ACTOR, ParallelLayout, parse_allocation
from realsys.config.dataflow import role_settings
from realsys.config.schema import Config, ModelConfig
from realsys.train.megatron.lora import base_of, merge
from realsys.train.megatron.train_engine import MegatronEngine
from realsys.train.worker.packing import MicroBatch
from tests.support.serving.hf_models import SIZES, VOCAB, make_model
from tests.support.training.sample_records import make_ref
from tests.support.training.train_ranks import FORMED, cat_exports, coordinates, run_ranks

RANK, ALPHA = 3, 6.0
SCALE = 2.0  # alpha / rank
HIDDEN, FFN, LAYERS, HEAD_DIM = 32, 48, 4, 8
SPLIT_INPUT = ("linear_proj", "linear_fc2")
LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")

#: (sequence, length of its prompt), for each of two data ranks; tokens of a rank are even for sequence parallelism
PROMPTS = [[(9, 3), (5, 1)], [(6, 2), (4, 3)]]
Tensors = dict[str, torch.Tensor]


def sequences_of(part):
    generators = [torch.Generator().manual_seed(100 * part + place) for place in range(len(PROMPTS[part]))]
    return [torch.randint(0, VOCAB, (n,), generator=g) for (n, _), g in zip(PROMPTS[part], generators, strict=True)]


ANSWER_TOKENS = sum(length - prompt for part in PROMPTS for length, prompt in part)


def micro_batch(part):
    refs = [make_ref(f"s{part}/{k}", *sizes, 0.0, False, part) for k, sizes in enumerate(PROMPTS[part])]
    tokens = torch.cat(sequences_of(part))
    in_loss = torch.cat([torch.arange(length) >= prompt for length, prompt in PROMPTS[part]])
    return MicroBatch(refs, [ref.length for ref in refs], in_loss.nonzero()[:, 0] - 1, tokens, tokens[in_loss])


def loss_of(_batch, outputs):
    """The mean negative log-prob of all answer tokens."""
    return -outputs.logprobs.sum() / ANSWER_TOKENS, {}


def make_config(**train):
    lora = {"rank": RANK, "alpha": ALPHA}
    settings = {"optimizer": {"clip_grad": 1e9, "weight_decay": 0.0}, "lora": lora, **train}
    return Config.model_validate({"seed": 7, "train": settings})


def load_engine(path, device, config):
    engine = MegatronEngine(config, role_settings(config, ACTOR), FORMED[ACTOR], device)
    engine.load(path)
    return engine


def batches_of(layout, rank):
    parts = [coordinates(layout, rank)[0]] if layout.data == 2 else [0, 1]
    return [micro_batch(part) for part in parts]


def adapters_of(engine):
    """By name, with layers counted over the whole model: layers.2.mlp.linear_fc1.a"""
    module: Any = engine.module
    return {
        f"layers.{layer.layer_number - 1}.{linear}.{which}": getattr(layer.get_submodule(f"{linear}.adapter"), which)
        for layer in module.decoder.layers
        for linear in LINEARS
        for which in "ab"
    }


def frozen_of(engine):
    """The weights that are not trained; under an adapter, the one that it began with."""
    parameters = [(name, p) for name, p in engine.module.named_parameters() if not p.requires_grad]
    return {name: base_of(engine.module, name, parameter) for name, parameter in parameters}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen2")
    made = make_model("qwen2", tied=True)
    made.save_pretrained(path)
    return made, path


# ---- the same adapters in plain torch


def random_b():
    """B of every projection of every layer, [out, rank]: B = 0 would give A no gradient."""
    torch.manual_seed(3)
    sizes = {"q": 32, "k": 16, "v": 16, "o": HIDDEN, "gate": FFN, "up": FFN, "down": HIDDEN}
    return {f"{layer}.{x}": torch.randn(size, RANK) * 0.1 for layer in range(LAYERS) for x, size in sizes.items()}


def fuse_qkv(q, k, v):
    """Each key-value head after the two query heads that read it."""
    groups = zip(q.split(2 * HEAD_DIM), k.split(HEAD_DIM), v.split(HEAD_DIM), strict=True)
    return torch.cat([part for group in groups for part in group])


def fused_b(parts, name, tensor_rank, tensor_ranks):
    """B of a Megatron linear on one tensor rank, of the B (or their gradients) of its projections."""
    layer, linear = name.split(".")[1], name.split(".")[3]
    if linear == "linear_qkv":
        whole = fuse_qkv(*(parts[f"{layer}.{x}"] for x in "qkv"))
        return whole.chunk(tensor_ranks)[tensor_rank]
    if linear == "linear_fc1":
        return torch.cat([parts[f"{layer}.{x}"].chunk(tensor_ranks)[tensor_rank] for x in ("gate", "up")])
    return parts[f"{layer}.{'o' if linear == 'linear_proj' else 'down'}"]


@dataclass
class Reference:
    logprobs: list[torch.Tensor]  # per data part
    gradients_a: Tensors  # whole, by the adapter's name
    gradients_b: Tensors  # key: layer and projection
    norm: float


def reference(model, whole_a):
    a = {name: tensor.clone().requires_grad_() for name, tensor in whole_a.items()}
    b = {name: tensor.clone().requires_grad_() for name, tensor in random_b().items()}
    weights: Tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    projections = {
        "self_attention.linear_qkv": [("q", "self_attn.q_proj"), ("k", "self_attn.k_proj"), ("v", "self_attn.v_proj")],
        "self_attention.linear_proj": [("o", "self_attn.o_proj")],
        "mlp.linear_fc1": [("gate", "mlp.gate_proj"), ("up", "mlp.up_proj")],
        "mlp.linear_fc2": [("down", "mlp.down_proj")],
    }
    for layer in range(LAYERS):
        for linear, members in projections.items():
            for short, long in members:
                key = f"model.layers.{layer}.{long}.weight"
                weights[key] = weights[key] + SCALE * b[f"{layer}.{short}"] @ a[f"layers.{layer}.{linear}.a"]
    per_part = []
    for part in range(2):
        found = []
        for ids, (_, prompt) in zip(sequences_of(part), PROMPTS[part], strict=True):
            logits = torch.func.functional_call(model, weights, (ids[None],)).logits[0]
            found.append(logits.log_softmax(-1)[prompt - 1 : -1].gather(1, ids[prompt:, None])[:, 0])
        per_part.append(torch.cat(found))
    (-torch.cat(per_part).sum() / ANSWER_TOKENS).backward()
    gradients_a, gradients_b = ({k: t.grad for k, t in x.items() if t.grad is not None} for x in (a, b))
    every = [*gradients_a.values(), *gradients_b.values()]
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in every))
    return Reference([found.detach() for found in per_part], gradients_a, gradients_b, norm)


@dataclass
class Found:
    """Report of one rank: A as drawn, log-probs, gradients by the adapter's name, their global norm."""

    drawn: Tensors
    logprobs: list[torch.Tensor]
    gradients: Tensors
    norm: float


def one_rank(rank, device, path, config, layout):
    engine = load_engine(path, device, config)
    adapters = adapters_of(engine)
    drawn = {name: p.detach().clone() for name, p in adapters.items() if name.endswith(".a")}
    for name, parameter in adapters.items():
        if name.endswith(".b"):
            parameter.data.copy_(fused_b(random_b(), name, engine.groups.tensor_rank, layout.tensor))
    merge(engine.module)
    batches = batches_of(layout, rank)
    logprobs = engine.logprobs(batches)
    engine.accumulate(batches, loss_of)
    gradients: Tensors = {name: p.main_grad.clone() for name, p in adapters.items()}  # type: ignore[attr-defined]
    engine.use_optimizer("train", config.train.optimizer)
    return Found(drawn, logprobs, gradients, engine.step(0.0).grad_norm)


def whole(name, parts):
    """A of a layer whose input is split over tensor ranks, from all of them; other A are whole on each."""
    return torch.cat(parts, 1) if name.split(".")[3] in SPLIT_INPUT else parts[0]


@pytest.mark.parametrize(
    ("text", "train"),
    [
        ("d1", {}),
        ("d2", {}),
        ("m2", {}),
        ("m2", {"sequence_parallel": True}),
        ("p2", {"recompute": True}),
        ("d2", {"distributed_optimizer": True}),
        ("p2m2", {"sequence_parallel": True, "recompute": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_log_probs_and_gradients_match_plain_torch(text, train, model):
    layout = parse_allocation(f"sglang.d1+{text}").actor
    config = make_config(**train)
    found = run_ranks(
        layout.world_size, lambda rank, device: one_rank(rank, device, model[1], config, layout), config, layout
    )
    places = {coordinates(layout, rank): one for rank, one in enumerate(found)}
    tensor_ranks = range(layout.tensor)
    drawn: Tensors = {}
    for stage in range(layout.pipeline):
        for name in places[0, 0, stage].drawn:
            drawn[name] = whole(name, [places[0, t, stage].drawn[name] for t in tensor_ranks])
    expected = reference(model[0], drawn)
    for (data, tensor, stage), one in places.items():
        assert one.norm == pytest.approx(expected.norm, rel=1e-4)
        if stage == layout.pipeline - 1:
            parts = [expected.logprobs[data]] if layout.data == 2 else expected.logprobs
            for values, part in zip(one.logprobs, parts, strict=True):
                torch.testing.assert_close(values, part, atol=1e-5, rtol=0)
        if config.train.distributed_optimizer:
            continue  # a gradient is reduced only where the optimizer owns it; the norm is over those
        for name, gradient in one.gradients.items():
            if name.endswith(".b"):
                wanted = fused_b(expected.gradients_b, name, tensor, layout.tensor)
            else:
                wanted = expected.gradients_a[name]
                if name.split(".")[3] in SPLIT_INPUT:
                    wanted = wanted.chunk(layout.tensor, 1)[tensor]
            assert wanted.abs().max() > 1e-4
            torch.testing.assert_close(gradient, wanted, atol=2e-6, rtol=2e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_a_is_drawn_alike_on_every_layout(model):
    drawn: list[Tensors] = []
    for layout in (ParallelLayout(), ParallelLayout(pipeline=2, tensor=2)):
        config = make_config()

        def body(rank, device, config=config):
            adapters = adapters_of(load_engine(model[1], device, config))
            assert all(not p.any() for name, p in adapters.items() if name.endswith(".b"))
            return {name: p.detach().clone() for name, p in adapters.items() if name.endswith(".a")}

        found = run_ranks(layout.world_size, body, config, layout)
        merged: Tensors = {}
        for stage in range(layout.pipeline):
            ranks = [found[rank] for rank in range(layout.world_size) if coordinates(layout, rank)[2] == stage]
            merged |= {name: whole(name, [one[name] for one in ranks]) for name in ranks[0]}
        drawn.append(merged)
    alone, sharded = drawn
    assert alone.keys() == sharded.keys() and len(alone) == 4 * LAYERS
    assert all(torch.equal(alone[name], sharded[name]) for name in alone)
    assert len({float(tensor[0, 0]) for tensor in alone.values()}) == 4 * LAYERS  # no two alike
    for name, tensor in alone.items():
        bound = tensor.shape[1] ** -0.5
        assert tensor.shape == (RANK, FFN if "fc2" in name else HIDDEN)
        assert 0.8 * bound < float(tensor.abs().max()) <= bound


# ---- training, and the served weights


def serve(weights, source, path, config, layout):
    """Return the log-probs, by rank, of engines that load ``weights`` with the config.json of ``source``."""
    save_file(weights, path / "model.safetensors")
    shutil.copy(source / "config.json", path)
    return run_ranks(
        layout.world_size, lambda r, d: load_engine(path, d, config).logprobs(batches_of(layout, r)), config, layout
    )


@pytest.mark.parametrize("text", ["d1", "p2m2"])
def test_only_adapters_train_and_the_export_merges_them(text, model, tmp_path):
    layout = parse_allocation(f"sglang.d1+{text}").actor
    config = make_config()
    plain = Config.model_validate({"seed": 7})

    def before_and_after(rank, device):
        untouched = load_engine(model[1], device, plain)
        engine = load_engine(model[1], device, config)
        batches = batches_of(layout, rank)
        frozen = {name: tensor.detach().clone() for name, tensor in frozen_of(engine).items()}
        adapters = {name: p.detach().clone() for name, p in adapters_of(engine).items()}
        found: dict[str, Any] = {"plain": untouched.logprobs(batches), "attached": engine.logprobs(batches)}
        found["first export"] = {name: tensor.clone() for name, tensor in engine.export()}
        engine.use_optimizer("train", config.train.optimizer)
        for _ in range(3):
            engine.accumulate(batches, loss_of)
            assert engine.step(0.01).applied
        assert all(torch.equal(tensor, frozen[name]) for name, tensor in frozen_of(engine).items())
        assert all(not torch.equal(p, adapters[name]) for name, p in adapters_of(engine).items())
        found["trained"] = engine.logprobs(batches)
        found["export"] = {name: tensor.clone() for name, tensor in engine.export()}
        assert list(engine.export("gradients")) == []
        return found

    ranks = run_ranks(layout.world_size, before_and_after, config, layout)
    last = ranks[-1]
    for attached, untouched in zip(last["attached"], last["plain"], strict=True):
        torch.testing.assert_close(attached, untouched, atol=1e-6, rtol=0)
    weights = {k: v for k, v in model[0].state_dict().items() if k != "lm_head.weight"}
    first = cat_exports([found["first export"] for found in ranks])
    assert first.keys() == weights.keys() and all(torch.equal(first[name], weights[name]) for name in weights)
    served = cat_exports([found["export"] for found in ranks])
    changed = {name for name in served if not torch.equal(served[name], weights[name])}
    assert changed == {name for name in weights if name.endswith("_proj.weight")}

    (again,) = serve(served, model[1], tmp_path, plain, ParallelLayout())
    for values, trained, untouched in zip(again, last["trained"], last["plain"], strict=True):
        torch.testing.assert_close(values, trained, atol=1e-5, rtol=0)
        assert (values - untouched).abs().max() > 0.01


@pytest.mark.parametrize(
    ("text", "train"), [("d1", {}), ("m2", {"sequence_parallel": True}), ("d2", {"offload": "all"})]
)
def test_served_policy_is_the_trained_one_in_bf16(text, train, model, tmp_path):
    layout = parse_allocation(f"sglang.d1+{text}").actor
    low = {"dtype": "bfloat16"}
    config = make_config(**train).model_copy(update={"model": ModelConfig.model_validate(low)})
    plain = Config.model_validate({"seed": 7, "model": low})

    def train_and_export(rank, device):
        engine = load_engine(model[1], device, config)
        batches = batches_of(layout, rank)
        before = engine.logprobs(batches)
        engine.use_optimizer("train", config.train.optimizer)
        for _ in range(5):
            engine.accumulate(batches, loss_of)
            assert engine.step(1e-3).applied
            engine.offload()
            engine.onload()
        return before, engine.logprobs(batches), {name: tensor.clone() for name, tensor in engine.export()}

    ranks = run_ranks(layout.world_size, train_and_export, config, layout)
    served = serve(cat_exports([exported for _, _, exported in ranks]), model[1], tmp_path, plain, layout)
    for (before, trained, _), again in zip(ranks, served, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(trained, again, strict=True))
        assert sum(x.sum() - y.sum() for x, y in zip(trained, before, strict=True)) > 0.5  # nats that training gained


# By hand, per layer: A of qkv, proj and gate_up 3 x 32, of down 3 x 48; B of qkv 64 x 3, proj 32 x 3, gate_up 96 x 3,
# down 32 x 3. With m2 each split matrix has half of it: B of qkv and gate_up, A of proj and down.
PER_LAYER = {1: 96 * 3 + 144 + 192 + 96 + 288 + 96, 2: 96 * 2 + 48 + 72 + 96 + 96 + 144 + 96}


@pytest.mark.parametrize("tensor", [1, 2])
def test_gradients_and_optimizer_cover_only_the_adapters(tensor, model):
    layout, config = ParallelLayout(tensor=tensor), make_config()

    def body(rank, device):
        engine = load_engine(model[1], device, config)
        engine.accumulate(batches_of(layout, rank), loss_of)
        engine.use_optimizer("train", config.train.optimizer)
        engine.step(0.01)
        trained = sum(p.numel() for p in engine.module.parameters() if p.requires_grad)
        gradients = sum(buffer.grad_data.numel() for buffer in engine.ddp_model.buffers)
        states = [s for part in engine.optimizer.chained_optimizers for s in part.optimizer.state.values()]
        moments = sum(state[key].numel() for state in states for key in ("exp_avg", "exp_avg_sq"))
        return trained, gradients, moments, len(states)

    expected = PER_LAYER[tensor] * LAYERS
    for trained, gradients, moments, count in run_ranks(tensor, body, config, layout):
        assert (trained, moments, count) == (expected, 2 * expected, 2 * 4 * LAYERS)
        assert gradients == expected


def test_only_the_targets_get_adapters(model):
    config = make_config(lora={"rank": RANK, "targets": ["proj", "gate_up"]})

    def body(rank, device):
        module = load_engine(model[1], device, config).module
        return [name for name, p in module.named_parameters() if p.requires_grad]

    (names,) = run_ranks(1, body, config, ParallelLayout())
    assert len(names) == 2 * 2 * LAYERS
    assert all(".linear_proj.adapter." in name or ".linear_fc1.adapter." in name for name in names)


def test_sizes_of_this_file():
    """The numbers written out above are those of the model."""
    heads, kv_heads = SIZES["num_attention_heads"], SIZES["num_key_value_heads"]
    assert (SIZES["hidden_size"], SIZES["intermediate_size"], SIZES["num_hidden_layers"]) == (HIDDEN, FFN, LAYERS)
    assert (heads, kv_heads, HIDDEN // heads) == (4, 2, HEAD_DIM)
