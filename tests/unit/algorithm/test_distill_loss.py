"""The loss distill against divergences over a whole vocabulary, in float64."""

import numpy as np
import pytest
import torch

from realsys.algorithm.loss import actor_loss, finish_stats
from realsys.config.schema_train import PPOConfig

TOKENS, VOCAB = 7, 12
MASK = torch.arange(TOKENS) != 2


def logits():
    generator = torch.Generator().manual_seed(3)
    return (2 * torch.randn(TOKENS, VOCAB, generator=generator, dtype=torch.float64) for _ in range(2))


def divergence(p, q, beta):
    """Of log-probs [t, events], as in section 3 of GKD: p is the student, q the teacher."""
    if beta in (0.0, 1.0):
        p, q = (p, q) if beta else (q, p)
        return (p.exp() * (p - q)).sum(-1)
    mixture = (beta * q.exp() + (1 - beta) * p.exp()).log()
    return beta * (q.exp() * (q - mixture)).sum(-1) + (1 - beta) * (p.exp() * (p - mixture)).sum(-1)


def of_loss(student, teacher, k, beta):
    """Mean over the counted tokens, gradient of the student's logits, and the statistics."""
    student = student.clone().requires_grad_()
    chosen = teacher.topk(k).indices
    p, q = (each.log_softmax(-1).gather(1, chosen) for each in (student, teacher))
    cfg = PPOConfig.model_validate(
        {"loss": "distill", "loss_args": {"top_k": k, "beta": beta}, "use_decoupled_loss": False}
    )
    own = torch.full((TOKENS,), -1.0)
    p, q = (torch.where(MASK[:, None], each.float(), torch.nan) for each in (p, q))
    loss, stats = actor_loss(own.requires_grad_(), own, own, own, MASK, float(MASK.sum()), cfg, top=(p, q))
    loss.backward()
    return loss.item(), student.grad, finish_stats({name: value.item() for name, value in stats.items()})


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_all_but_one_token_give_the_whole_divergence(beta):
    """The rest is then the last token. A masked token has neither loss nor gradient."""
    student, teacher = logits()
    loss, gradient, stats = of_loss(student, teacher, VOCAB - 1, beta)
    student.requires_grad_()
    whole = divergence(student.log_softmax(-1), teacher.log_softmax(-1), beta)[MASK].mean()
    whole.backward()
    assert loss == pytest.approx(whole.item(), rel=1e-4)
    torch.testing.assert_close(gradient, student.grad, atol=1e-4, rtol=1e-3)
    assert not gradient[2].any() and stats["loss"] == pytest.approx(loss)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("k", [1, 4])
def test_top_tokens_and_rest_are_a_lower_bound(k, beta):
    student, teacher = logits()
    loss, gradient, stats = of_loss(student, teacher, k, beta)
    student.requires_grad_()
    p, q = student.softmax(-1), teacher.softmax(-1)
    chosen = teacher.topk(k).indices
    events = [torch.cat([x.gather(1, chosen), 1 - x.gather(1, chosen).sum(-1, keepdim=True)], 1).log() for x in (p, q)]
    exact = divergence(*events, beta)[MASK].mean()
    exact.backward()
    whole = divergence(p.log(), q.log(), beta)[MASK].mean().item()
    assert loss == pytest.approx(exact.item(), rel=1e-4) and 0 < loss < whole
    torch.testing.assert_close(gradient, student.grad, atol=1e-5, rtol=1e-3)
    mass = teacher.softmax(-1).topk(k).values.sum(-1)[MASK].mean().item()
    assert stats["teacher_mass_mean"] == pytest.approx(mass, rel=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_extreme_log_probs_have_finite_gradients(beta):
    """Certain models, a teacher whose engine writes -9999 for -inf, and a token that the student does not have."""
    student = torch.tensor([[-1e-9, -30.0], [-0.1, -torch.inf], [-20.0, -25.0]], requires_grad=True)
    teacher = torch.tensor([[-1e-9, -9999.0], [-0.1, -3.0], [-0.0, -40.0]])
    cfg = PPOConfig.model_validate(
        {"loss": "distill", "loss_args": {"top_k": 2, "beta": beta}, "use_decoupled_loss": False}
    )
    own = torch.full((3,), -1.0)
    loss, _ = actor_loss(own, own, own, own, torch.ones(3, dtype=torch.bool), 3.0, cfg, top=(student, teacher))
    loss.backward()
    assert loss.isfinite() and student.grad.isfinite().all()
    assert student.grad[1, 1] == 0


def test_equal_models_have_no_divergence():
    student, _ = logits()
    for beta in np.linspace(0, 1, 5):
        loss, gradient, _ = of_loss(student, student, 4, float(beta))
        assert abs(loss) < 1e-6 and gradient.abs().max() < 1e-5
