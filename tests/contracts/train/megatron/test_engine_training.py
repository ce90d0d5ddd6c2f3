"""Gradients and optimizer steps: sums over micro-batches and ranks, bfloat16 with fp32 masters, each optimizer."""

import math

import pytest
import torch

from realsys.config.schema_train import OptimizerConfig
from realsys.errors import ModelError
from tests.support.serving.hf_models import make_model
from tests.support.training.engine_ranks import (
    ANSWER_TOKENS,
    NLL,
    REFS,
    assert_gradients,
    last_stage_heads,
    make_config,
    make_settings,
    on_ranks,
    plain_answers,
)
from tests.support.training.train_ranks import cat_exports


@pytest.fixture(scope="module")
def actor(tmp_path_factory):
    torch.set_num_threads(1)
    model, path = make_model(), tmp_path_factory.mktemp("actor")
    model.save_pretrained(path)
    return model, path


def gradients_of(path, text, micro_batches, dtype="float32"):
    """Loss and gradient of the whole batch."""

    def body(rank):
        stats = rank.engine.accumulate(rank.micro_batches(micro_batches), NLL)
        return sum(s["loss"].item() for s in stats), rank.gradients()

    found = on_ranks(text, path, body, make_config(dtype), make_settings())
    return sum(loss for loss, _ in last_stage_heads(text, found)), cat_exports([part for _, part in found])


def test_gradient_is_the_same_for_every_split(actor):
    """Neither micro-batches nor data-parallel ranks change it."""
    loss, gradients = gradients_of(actor[1], "d1", 1)
    for text, micro_batches in (("d1", 3), ("d2", 1), ("d2", 4), ("d2p2", 5)):
        other_loss, other = gradients_of(actor[1], text, micro_batches)
        assert other_loss == pytest.approx(loss, rel=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(other[name], gradient, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("text", "train"), [("d2", {}), ("d2m2", {"sequence_parallel": True}), ("d2p2", {})])
@pytest.mark.parametrize("head", ["lm", "value"])
def test_rank_without_a_sequence_adds_nothing(text, train, head, actor):
    """It takes part in every collective."""

    def loss(batch, outputs):
        if outputs.values is None:
            return NLL(batch, outputs)
        share = (outputs.values - 1).square().sum() / ANSWER_TOKENS
        return share, {"loss": share.detach()}

    def body(rank):
        data, first = rank.layout.data, rank.engine.groups.data_rank == 0
        batches = [rank.packer.pack(refs if data == 1 or first else []) for refs in (REFS[:4], REFS[4:])]
        rank.engine.accumulate(batches, loss)
        gradients = rank.gradients()
        read = rank.engine.logprobs if head == "lm" else rank.engine.values
        return [len(part) for part in read(batches)], gradients

    config, settings = make_config(**train), make_settings(head)
    ((_, expected),) = on_ranks("d1", actor[1], body, make_config(), settings)
    found = on_ranks(text, actor[1], body, config, settings)
    assert last_stage_heads(text, found)[1][0] == [0, 0]
    assert_gradients([gradients for _, gradients in found], expected)


def test_bfloat16_agrees_with_fp32_to_its_precision(actor):
    loss, gradients = gradients_of(actor[1], "d1", 2)
    low_loss, low = gradients_of(actor[1], "d1", 2, "bfloat16")
    assert low_loss == pytest.approx(loss, rel=0.02)
    flat, low_flat = (torch.cat([part[name].reshape(-1) for name in gradients]) for part in (gradients, low))
    assert torch.nn.functional.cosine_similarity(flat, low_flat, 0) > 0.999
    assert low_flat.norm().item() == pytest.approx(flat.norm().item(), rel=0.02)

    def body(rank):
        engine = rank.engine
        logprobs = engine.logprobs(rank.micro_batches(1))
        parameters = {parameter.dtype for parameter in engine.module.parameters()}
        buffers = {buffer.grad_data.dtype for buffer in engine.ddp_model.buffers}
        engine.use_optimizer("train", OptimizerConfig())
        stepped = {parameter.dtype for group in engine.optimizer.param_groups for parameter in group["params"]}
        return logprobs[0].dtype, parameters, buffers, stepped

    ((scored, parameters, buffers, stepped),) = on_ranks("d1", actor[1], body, make_config("bfloat16"), make_settings())
    assert scored is torch.float32
    assert parameters == {torch.bfloat16}
    assert buffers == {torch.float32}
    assert stepped == {torch.float32}


SGD, ADAM = OptimizerConfig(name="sgd", beta1=0.0), OptimizerConfig(eps=1e-12)


@pytest.mark.parametrize(
    ("optimizer", "distributed"), [(SGD, False), (ADAM, False), (ADAM, True)], ids=["sgd", "adam", "adam-distributed"]
)
def test_steps_too_small_for_bfloat16_add_up(optimizer, distributed, actor):
    """Each moves the weight by 1e-4 of itself, a fortieth of what bfloat16 can tell apart: 100 of them by 1 %."""
    steps, relative = 100, 1e-4
    name = "model.layers.0.self_attn.o_proj.weight"

    def body(rank):
        engine = rank.engine
        settings = optimizer.model_copy(update={"weight_decay": 0.0, "clip_grad": 0.0})
        weight = engine.module.decoder.layers[0].self_attention.linear_proj.weight
        with torch.no_grad():
            weight.fill_(1.0)
        engine.use_optimizer("train", settings)
        before = rank.weights().get(name)
        for _ in range(steps):
            engine.ddp_model.zero_grad_buffer()
            weight.main_grad.fill_(-1.0)  # sgd steps by lr * 1, Adam by lr * sign: both by relative
            engine.step(relative)
        after = rank.weights().get(name)
        assert before is not None and after is not None
        return before, after

    config = make_config("bfloat16", distributed_optimizer=distributed)
    ((before, after),) = on_ranks("d1", actor[1], body, config, make_settings())
    assert (before == 1).all()
    expected = torch.full_like(after.float(), 1 + steps * relative).bfloat16()
    assert torch.equal(after, expected)


def torch_optimizer(settings, model):
    """Weight decay on matrices alone."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    if settings.name == "sgd":
        return torch.optim.SGD(groups, settings.lr, settings.beta1)
    return torch.optim.AdamW(groups, settings.lr, (settings.beta1, settings.beta2), settings.eps)


OPTIMIZERS = [
    # eps of the size of gradients: with a small one Adam turns gradients near zero into steps of either sign
    OptimizerConfig(eps=0.1, weight_decay=0.3, clip_grad=0.5),
    OptimizerConfig(eps=0.1, weight_decay=0.3, clip_grad=0.0),
    OptimizerConfig(name="sgd", beta1=0.8, weight_decay=0.3, clip_grad=0.5),
]


@pytest.mark.parametrize("settings", OPTIMIZERS, ids=["adamw", "adamw-unclipped", "sgd"])
@pytest.mark.parametrize("text", ["d1", "d2m2"])
def test_three_steps_are_those_of_torch(settings, text, actor):
    rates = [0.1, 0.05, 0.02]

    def body(rank):
        rank.engine.use_optimizer("train", settings)
        norms = []
        for lr in rates:
            rank.engine.accumulate(rank.micro_batches(), NLL)
            norms.append(rank.engine.step(lr).grad_norm)
        return norms, rank.weights()

    found = on_ranks(text, actor[1], body, make_config(), make_settings())

    model = make_model()
    optimizer = torch_optimizer(settings, model)
    norms = []
    for lr in rates:
        optimizer.zero_grad()
        (-plain_answers(model)[0].sum() / ANSWER_TOKENS).backward()
        clip = settings.clip_grad or math.inf
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    assert norms[0] > settings.clip_grad, "else nothing is clipped"
    for rank_norms, _ in found:
        assert rank_norms == pytest.approx(norms, rel=1e-4)
    weights = cat_exports([part for _, part in found])
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weights[name], weight, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("text", ["d1", "d2m2"])
def test_norm_just_above_limit_is_clipped(text, actor):
    """The gradient's norm is 1.2 times the limit, so a step of SGD is the gradient divided by 1.2."""
    lr, model = 0.1, make_model()
    (-plain_answers(model)[0].sum() / ANSWER_TOKENS).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()
    settings = OptimizerConfig(name="sgd", beta1=0.0, weight_decay=0.0, clip_grad=norm / 1.2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= lr * parameter.grad / 1.2

    def body(rank):
        rank.engine.use_optimizer("train", settings)
        rank.engine.accumulate(rank.micro_batches(), NLL)
        return rank.engine.step(lr).grad_norm, rank.weights()

    results = on_ranks(text, actor[1], body, make_config(), make_settings())
    assert [rank_norm for rank_norm, _ in results] == pytest.approx([norm] * len(results), rel=1e-4)
    weights = cat_exports([part for _, part in results])
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weights[name], weight, atol=1e-6, rtol=1e-5)


def test_step_that_is_not_finite_is_skipped_everywhere(actor):
    """No rank takes the step."""

    def poisoned(batch, outputs):
        share, stats = NLL(batch, outputs)
        return share * (math.inf if REFS[0] in batch.refs else 1.0), stats

    def body(rank):
        engine = rank.engine
        engine.use_optimizer("train", OptimizerConfig())
        before = rank.weights()
        engine.accumulate(rank.micro_batches(), poisoned)
        bad = engine.step(0.1)
        engine.accumulate(rank.micro_batches(), NLL)
        skipped = engine.step(0.1, skip=True)
        after = rank.weights()
        return bad.applied, skipped.applied, engine.step(0.1).applied, before, after

    for bad, skipped, good, before, after in on_ranks("d2p2", actor[1], body, make_config(), make_settings()):
        assert (bad, skipped, good) == (False, False, True)
        assert all(torch.equal(after[name], weight) for name, weight in before.items())


def test_optimizer_state_is_fresh_in_another_phase(actor):
    """The same phase keeps its state."""

    def body(rank):
        engine = rank.engine
        engine.use_optimizer("warmup", OptimizerConfig())
        first = engine.optimizer
        engine.use_optimizer("warmup", OptimizerConfig())
        assert engine.optimizer is first
        assert engine.phase == ("warmup", OptimizerConfig())
        engine.use_optimizer("train", OptimizerConfig())
        assert engine.optimizer is not first

    on_ranks("d1", actor[1], body, make_config(), make_settings())


def test_unsupported_distributed_optimizer_is_refused(actor):
    """Megatron cannot shard the state of these optimizers."""

    def body(rank):
        with pytest.raises(ModelError, match="distributed_optimizer supports only AdamW"):
            rank.engine.use_optimizer("train", OptimizerConfig(name="sgd"))

    on_ranks("d1", actor[1], body, make_config(distributed_optimizer=True), make_settings())
