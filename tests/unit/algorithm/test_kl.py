"""KL estimators: their numbers, what their gradients estimate, and the controller of the coefficient."""

import math
import re
import subprocess
import sys

import pytest
import torch

from realsys.algorithm.kl import MAX_K3, AdaptiveKL, kl_estimate
from realsys.algorithm.loss import actor_loss, finish_stats, should_stop
from realsys.algorithm.loss_tokens import Segments
from realsys.config.schema_train import PPOConfig


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("k1", [math.log(2), 0.0, -math.log(4)]),
        ("k2", [math.log(2) ** 2 / 2, 0.0, math.log(4) ** 2 / 2]),
        ("k3", [0.5 - 1 + math.log(2), 0.0, 4 - 1 - math.log(4)]),  # ref / policy = 1/2, 1, 4
    ],
)
def test_estimators(kind, expected):
    policy, ref = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.25, 0.3, 0.8]).log()
    assert kl_estimate(policy, ref, kind).tolist() == pytest.approx(expected, rel=1e-5, abs=1e-7)


REFERENCE = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log()


def gradient(loss):
    """Of a function of the policy's log-probs over its vocabulary of 4, with respect to the logits."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    loss(logits.log_softmax(0)).backward()
    return logits.grad.tolist()


def divergence(p, q):
    return (p.exp() * (p - q)).sum()


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_unbiased_estimators_have_the_divergence_as_their_mean(kind):
    log_p = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64).log_softmax(0)
    mean = (log_p.exp() * kl_estimate(log_p, REFERENCE, kind)).sum()
    assert mean.item() == pytest.approx(divergence(log_p, REFERENCE).item())


@pytest.mark.parametrize(
    ("kind", "objective"),
    [
        ("k1", lambda log_p: 0.0 * log_p.sum()),  # nothing at all
        ("k2", lambda log_p: divergence(log_p, REFERENCE)),
        ("k3", lambda log_p: divergence(REFERENCE, log_p)),  # the other way round
    ],
)
def test_mean_gradient_of_an_estimator_in_the_loss(kind, objective):
    """Tokens are drawn by the policy, then the estimator is differentiated (docs/algorithms.md)."""
    found = gradient(lambda log_p: (log_p.exp().detach() * kl_estimate(log_p, REFERENCE, kind)).sum())
    assert found == pytest.approx(gradient(objective), abs=1e-12)


@pytest.mark.parametrize(("kind", "exact"), [("k1", True), ("k2", False), ("k3", False)])
def test_policy_gradient_of_estimator_in_reward(kind, exact):
    """In the reward the estimator is a number that weighs the gradient of the log-prob: only k1 is right there."""
    found = gradient(lambda log_p: (log_p.exp().detach() * kl_estimate(log_p, REFERENCE, kind).detach() * log_p).sum())
    right = gradient(lambda log_p: divergence(log_p, REFERENCE))
    assert (found == pytest.approx(right, abs=1e-12)) is exact


def test_k3_of_a_hopeless_token_stays_finite():
    theta = torch.tensor([-400.0, 0.0], requires_grad=True)
    loss = kl_estimate(theta, torch.tensor([0.0, -400.0]), "k3").sum()
    loss.backward()
    assert theta.grad is not None and torch.isfinite(theta.grad).all() and torch.isfinite(loss)


# --- the controller


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.1, 0.05),  # on target
        (0.11, 0.05 * (1 + 0.1 * 0.3)),
        (0.09, 0.05 * (1 - 0.1 * 0.3)),
        (10.0, 0.05 * (1 + 0.2 * 0.3)),  # the error is clipped at 0.2 on either side
        (-1.0, 0.05 * (1 - 0.2 * 0.3)),
    ],
)
def test_coefficient_follows_the_clipped_error(kl, expected):
    controller = AdaptiveKL(0.05, target=0.1, horizon=10_000)
    controller.update(kl, 3_000)
    assert controller.coef == pytest.approx(expected)


def test_coefficient_reaches_the_target_of_a_simple_plant():
    controller = AdaptiveKL(0.01, target=0.1, horizon=1000)
    for _ in range(400):
        controller.update(0.02 / controller.coef, 200)  # the more it costs, the smaller the KL
    assert controller.coef == pytest.approx(0.2, rel=1e-3)


@pytest.mark.parametrize("answers", [8_000, 1_000_000])
def test_batch_beyond_horizon_keeps_coefficient_positive(answers):
    controller = AdaptiveKL(0.05, target=0.1, horizon=1_000)
    controller.update(0.0, answers)
    assert controller.coef == pytest.approx(0.05 * 0.8)


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_a_step_that_measured_nothing_changes_nothing(kl):
    controller = AdaptiveKL(0.05, target=0.1, horizon=1_000)
    controller.update(kl, 500)
    assert controller.coef == 0.05


def test_controller_continues_from_its_state():
    first = AdaptiveKL(0.05, target=0.1, horizon=1_000)
    first.update(1.0, 500)
    second = AdaptiveKL(0.9, target=0.1, horizon=1_000)
    second.load_state_dict(first.state_dict())
    assert second.coef == first.coef == pytest.approx(0.055)


@pytest.mark.processes
def test_the_controller_needs_no_torch():
    """The master's process has none."""
    code = "import sys, realsys.algorithm.kl; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


# ---- KL and entropy in the loss, and the rule that ends a step early, by hand


ALL = torch.ones(4, dtype=torch.bool)


def config(**fields):
    return PPOConfig.model_validate(fields)


def segments(*lengths):
    return Segments(torch.tensor(lengths, dtype=torch.int64))


def penalised(cfg, *, kl_coef=0.0, **inputs):
    """Two answers of 1 and 3 tokens, no advantages: what is left is the penalties."""
    theta = torch.tensor([-1.0, -1.5, -2.0, -0.5], requires_grad=True)
    old = theta.detach().clone()
    loss, stats = actor_loss(
        theta, old, old, torch.zeros(4), ALL, 2, cfg, segments=segments(1, 3), kl_coef=kl_coef, **inputs
    )
    loss.backward()
    assert theta.grad is not None
    return loss, theta.grad, finish_stats({name: value.item() for name, value in stats.items()})


REF = [-1.5, -1.5, -1.0, -1.5]  # theta - ref = 0.5, 0, -1, 1


@pytest.mark.parametrize(
    ("estimator", "values", "gradients"),
    [
        ("k1", [0.5, 0.0, -1.0, 1.0], [1.0, 1.0, 1.0, 1.0]),
        ("k2", [0.125, 0.0, 0.5, 0.5], [0.5, 0.0, -1.0, 1.0]),
        # e^-d - 1 + d and 1 - e^-d
        ("k3", [0.1065307, 0.0, 0.7182818, 0.3678794], [0.3934693, 0.0, -1.7182818, 0.6321206]),
    ],
)
def test_kl_term(estimator, values, gradients):
    cfg = config(kl={"coef": 0.1, "estimator": estimator}, aggregation="sequence")
    loss, gradient, stats = penalised(cfg, kl_coef=0.3, ref=torch.tensor(REF))
    weights = [1 / 2, 1 / 6, 1 / 6, 1 / 6]
    assert loss.item() == pytest.approx(0.3 * sum(v * w for v, w in zip(values, weights, strict=True)), rel=1e-5)
    assert gradient.tolist() == pytest.approx([0.3 * g * w for g, w in zip(gradients, weights, strict=True)], rel=1e-5)
    assert stats["kl_ref_mean"] == pytest.approx(sum(values) / 4, rel=1e-5)


def test_k3_of_a_collapsed_token_is_bounded():
    policy = torch.tensor([-30.0], requires_grad=True)
    estimate = kl_estimate(policy, torch.tensor([-1.0]), "k3")
    estimate.backward()
    assert (estimate.item(), policy.grad.item()) == (MAX_K3, 0.0)


def test_kl_without_coefficient_is_reported_only():
    """Without a coefficient the KL is a metric and adds no term to the loss."""
    loss, _, stats = penalised(config(), ref=torch.tensor(REF))
    assert loss.item() == 0.0
    assert stats["kl_ref_mean"] == pytest.approx(1.1926919 / 4, rel=1e-5)


def test_entropy_bonus_pulls_the_loss_down():
    entropy = torch.tensor([1.0, 2.0, 0.5, 4.0], requires_grad=True)
    loss, gradient, stats = penalised(config(entropy_coef=0.01), entropy=entropy)
    assert loss.item() == pytest.approx(-0.01 * 7.5 / 2, rel=1e-6)
    assert gradient.tolist() == [0.0] * 4, "the gradient goes through the entropy"
    assert entropy.grad.tolist() == pytest.approx([-0.005] * 4, rel=1e-6)
    assert stats["entropy_mean"] == pytest.approx(7.5 / 4)


def test_entropy_is_reported_without_a_bonus():
    loss, _, stats = penalised(config(), entropy=torch.tensor([1.0, 2.0, 0.5, 4.0]))
    assert loss.item() == 0.0
    assert stats["entropy_mean"] == pytest.approx(7.5 / 4)


def test_penalties_of_a_capped_token_stay():
    """Its weight says nothing of how far the policy is from the reference."""
    theta = torch.tensor([-1.0], requires_grad=True)
    loss, _ = actor_loss(
        theta,
        torch.tensor([-1.0]),
        torch.tensor([-3.0]),
        torch.tensor([1.0]),
        torch.ones(1, dtype=torch.bool),
        1,
        config(behav_imp_weight_cap=2.0, kl={"coef": 1.0, "estimator": "k1"}),
        ref=torch.tensor([-1.5]),
        kl_coef=1.0,
    )
    assert loss.item() == pytest.approx(0.5)


def test_missing_inputs_are_named():
    x = torch.zeros(4)
    with pytest.raises(ValueError, match=r"kl_coef is 0\.1: pass the log-probs of the reference"):
        actor_loss(x, x, x, x, ALL, 1, config(), kl_coef=0.1)
    with pytest.raises(ValueError, match=r"entropy_coef is 0\.2: pass the entropy"):
        actor_loss(x, x, x, x, ALL, 1, config(entropy_coef=0.2))
    with pytest.raises(ValueError, match=r"ref has shape \[1\]"):
        actor_loss(x, x, x, x, ALL, 1, config(), ref=torch.zeros(1))


def test_garbage_behind_the_mask_reaches_no_penalty():
    bad = torch.tensor([0.5, math.nan])
    theta = torch.tensor([-1.0, math.nan], requires_grad=True)
    entropy = bad.clone().requires_grad_()
    mask = torch.tensor([True, False])
    cfg = config(loss="gspo", aggregation="sequence", entropy_coef=0.1)
    loss, stats = actor_loss(
        theta, bad, bad, bad, mask, 1, cfg, segments=segments(1, 1), entropy=entropy, ref=bad, kl_coef=1.0
    )
    loss.backward()
    assert theta.grad is not None and entropy.grad is not None
    assert torch.isfinite(loss) and torch.isfinite(theta.grad).all() and torch.isfinite(entropy.grad).all()
    assert all(torch.isfinite(value) for value in stats.values())


# --- early stop


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"early_stop_ratio": 1.5}, r"u_mean 2 is above train\.ppo\.early_stop_ratio=1\.5"),
        ({"early_stop_ratio": 2.0}, None),  # equal is not above
        ({"early_stop_kl": 0.05}, r"kl_prox_theta_mean 0\.1 is above train\.ppo\.early_stop_kl=0\.05"),
        ({"early_stop_kl": 0.2, "early_stop_ratio": 3.0}, None),
    ],
)
def test_early_stop(fields, reason):
    found = should_stop({"u_mean": 2.0, "kl_prox_theta_mean": 0.1}, config(**fields))
    if reason is None:
        assert found is None
    else:
        assert found is not None and re.fullmatch(reason, found)
