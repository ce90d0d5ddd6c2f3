"""Both heads of the engine, on every layout, against plain torch on the hidden states of transformers."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from realsys.errors import ModelError
from realsys.train.megatron.heads import projected_logprobs
from realsys.train.megatron.train_engine import LossFunction
from realsys.train.worker.packing import split_rows
from tests.support.serving.hf_models import make_model
from tests.support.training.engine_ranks import (
    ANSWER_TOKENS,
    NLL,
    REFS,
    TOKENS,
    assert_gradients,
    last_stage_heads,
    make_config,
    make_settings,
    on_ranks,
    plain_answers,
)
from tests.support.training.sample_records import prompt_len

SEQUENCE_PARALLEL = {"sequence_parallel": True}
CHUNKS = {"head_chunk_tokens": 5}
LAYOUTS: list[Any] = [
    pytest.param("d1", {}, id="d1"),
    pytest.param("m2", {}, id="m2"),
    pytest.param("m2", SEQUENCE_PARALLEL, id="m2-sp"),
    pytest.param("p2", {}, id="p2"),
    pytest.param("d2p2m2", SEQUENCE_PARALLEL, id="d2p2m2-sp"),
]


def plain_gradients(model, loss):
    """HF name -> gradient of ``loss``; of tied weights once."""
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def critic(tmp_path_factory):
    """Its embedding is tied in config.json, which must not matter without an output layer."""
    torch.set_num_threads(1)
    model, path = make_model(tied=True, value=True), tmp_path_factory.mktemp("critic")
    model.save_pretrained(path)
    return model, path


@pytest.fixture(scope="module", params=["tied", "untied"])
def actor(request, tmp_path_factory):
    torch.set_num_threads(1)
    model, path = make_model(tied=request.param == "tied"), tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    return model, path


def plain_values(model):
    """Sample -> the value of every one of its tokens."""
    backbone: Any = model.model
    score: Any = model.score
    ids = {name: torch.from_numpy(tokens).long()[None] for name, tokens in TOKENS.items()}
    return {name: (backbone(x).last_hidden_state[0] @ score.weight.t())[:, 0] for name, x in ids.items()}


def to_target(batch, outputs):
    """Half the squared distance of the values to a target that differs from token to token."""
    assert outputs.values is not None
    targets = torch.cat([torch.linspace(-1, 1, ref.loss_tokens) for ref in batch.refs] + [torch.zeros(0)])
    share = (outputs.values - targets).square().sum() / (2 * ANSWER_TOKENS)
    return share, {"loss": share.detach()}


@pytest.mark.parametrize(("text", "train"), LAYOUTS)
def test_values_scores_and_their_gradients(text, train, critic):
    model, path = critic

    def body(rank):
        batches = rank.micro_batches()
        values: dict[str, Any] = {}
        scores: dict[str, Any] = {}
        for batch, found in zip(batches, rank.engine.values(batches), strict=rank.engine.groups.last_stage):
            assert found.dtype is torch.float32
            values |= split_rows(batch, found, end=True)
        for batch, found in zip(batches, rank.engine.scores(batches), strict=rank.engine.groups.last_stage):
            scores |= {ref.sample_id: score for ref, score in zip(batch.refs, found.tolist(), strict=True)}
        loss = sum(stats["loss"].item() for stats in rank.engine.accumulate(batches, to_target))
        return values, scores, loss, rank.gradients()

    found = on_ranks(text, path, body, make_config(**train), make_settings("value"))

    expected = plain_values(model)
    loss = torch.zeros(())
    for ref in REFS:
        states = expected[ref.sample_id][prompt_len(ref) - 1 : -1]
        loss = loss + (states - torch.linspace(-1, 1, ref.loss_tokens)).square().sum() / (2 * ANSWER_TOKENS)
    heads = last_stage_heads(text, found)
    values: dict[str, Any] = {name: array for head in heads for name, array in head[0].items()}
    scores: dict[str, float] = {name: score for head in heads for name, score in head[1].items()}
    for ref in REFS:
        every = expected[ref.sample_id].detach()
        torch.testing.assert_close(torch.from_numpy(values[ref.sample_id]), every[prompt_len(ref) - 1 :])
        assert scores[ref.sample_id] == pytest.approx(every[-1].item(), rel=1e-5, abs=1e-6)
    assert sum(head[2] for head in heads) == pytest.approx(loss.item(), rel=1e-5)
    gradients = plain_gradients(model, loss)
    assert "score.weight" in gradients
    assert_gradients([f[3] for f in found], gradients)


def with_bonus(batch, outputs):
    """Likelihood and, weighted alike, the entropy: both have a gradient."""
    share = -(outputs.logprobs.sum() + outputs.entropy.sum()) / ANSWER_TOKENS
    return share, {"loss": share.detach()}


@pytest.mark.parametrize(
    ("text", "train"),
    [
        *LAYOUTS,
        pytest.param("d1", CHUNKS, id="d1-chunks"),
        pytest.param("m2", CHUNKS, id="m2-chunks"),
        pytest.param("d2p2m2", CHUNKS | SEQUENCE_PARALLEL, id="d2p2m2-sp-chunks"),
    ],
)
def test_log_probs_and_an_entropy_bonus(text, train, actor):
    model, path = actor

    def body(rank):
        batches = rank.micro_batches()
        logprobs: dict[str, Any] = {}
        for batch, found in zip(batches, rank.engine.logprobs(batches), strict=rank.engine.groups.last_stage):
            logprobs |= split_rows(batch, found)
        loss = sum(stats["loss"].item() for stats in rank.engine.accumulate(batches, with_bonus))
        return logprobs, loss, rank.gradients()

    config = make_config(**train, ppo={"entropy_coef": 0.1})
    found = on_ranks(text, path, body, config, make_settings())

    logprobs, entropies = plain_answers(model)
    loss = -(logprobs.sum() + entropies.sum()) / ANSWER_TOKENS
    heads = last_stage_heads(text, found)
    by_name: dict[str, Any] = {name: array for head in heads for name, array in head[0].items()}
    got = torch.cat([torch.from_numpy(by_name[ref.sample_id]) for ref in REFS])
    torch.testing.assert_close(got, logprobs.detach(), atol=5e-6, rtol=1e-5)
    assert sum(head[1] for head in heads) == pytest.approx(loss.item(), rel=1e-5)
    assert_gradients([f[2] for f in found], plain_gradients(model, loss))


def test_without_a_bonus_the_entropy_has_no_gradient(actor):
    _, path = actor

    def loss(batch, outputs):
        assert outputs.entropy is not None and not outputs.entropy.requires_grad
        return NLL(batch, outputs)

    def body(rank):
        return len(rank.engine.accumulate(rank.micro_batches(), loss))

    assert on_ranks("d1", path, body, make_config(), make_settings()) == [2]


def test_inference_computes_no_entropy(actor, monkeypatch):
    """It would read the logits of every token once more."""
    score = Mock(wraps=projected_logprobs)
    monkeypatch.setattr("realsys.train.megatron.heads.projected_logprobs", score)

    def body(rank):
        rank.engine.logprobs(rank.micro_batches())
        rank.engine.accumulate(rank.micro_batches(1), NLL)
        return [call.args[3].entropy for call in score.call_args_list]

    assert on_ranks("d1", actor[1], body, make_config(), make_settings()) == [[False, False, True]]


def test_frozen_engine_refuses_to_train(actor):
    """It has no gradients either."""
    model, path = actor

    def body(rank):
        engine = rank.engine
        batches = rank.micro_batches()
        with pytest.raises(ModelError, match="role actor is frozen, without gradients"):
            engine.accumulate(batches, NLL)
        with pytest.raises(ModelError, match="role actor has head=lm: this call needs head=value"):
            engine.values(batches)
        assert engine.ddp_model is None and engine.module is not None
        parameters = list(engine.module.parameters())
        return engine.logprobs(batches), [p.requires_grad or hasattr(p, "main_grad") for p in parameters]

    ((logprobs, marks),) = on_ranks("d1", path, body, make_config(), make_settings(), trainable=False)
    assert not any(marks)
    expected, _ = plain_answers(model)
    assert sum(part.sum().item() for part in logprobs) == pytest.approx(expected.sum().item(), rel=1e-5)


def test_a_value_engine_does_not_score_tokens(critic):
    def body(rank):
        with pytest.raises(ModelError, match="role actor has head=value: this call needs head=lm"):
            rank.engine.logprobs(rank.micro_batches())

    on_ranks("d1", critic[1], body, make_config(), make_settings("value"))


def test_value_head_starts_at_zero(actor):
    """Over a language model."""
    loss: LossFunction = to_target

    def body(rank):
        batches = rank.micro_batches()
        values = rank.engine.values(batches)
        rank.engine.accumulate(batches, loss)
        return values, rank.gradients()

    ((values, gradients),) = on_ranks("d1", actor[1], body, make_config(), make_settings("value"))
    assert all((part == 0).all() for part in values)
    assert gradients["score.weight"].abs().max() > 0, "it could never learn"
