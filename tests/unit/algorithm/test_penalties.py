"""KL and entropy in the loss, and the rule that ends a step early, by hand."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor

from realsys.algorithm.kl import MAX_K3, kl_estimate
from realsys.algorithm.loss import actor_loss, finish_stats, should_stop
from realsys.algorithm.loss_tokens import Segments
from realsys.config.schema_train import PPOConfig

ALL = torch.ones(4, dtype=torch.bool)


def config(**fields: object) -> PPOConfig:
    return PPOConfig.model_validate(fields)


def segments(*lengths: int) -> Segments:
    return Segments(torch.tensor(lengths, dtype=torch.int64))


def penalised(cfg: PPOConfig, *, kl_coef: float = 0.0, **inputs: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
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
def test_kl_term(estimator: str, values: list[float], gradients: list[float]) -> None:
    cfg = config(kl={"coef": 0.1, "estimator": estimator}, aggregation="sequence")
    loss, gradient, stats = penalised(cfg, kl_coef=0.3, ref=torch.tensor(REF))
    weights = [1 / 2, 1 / 6, 1 / 6, 1 / 6]
    assert loss.item() == pytest.approx(0.3 * sum(v * w for v, w in zip(values, weights, strict=True)), rel=1e-5)
    assert gradient.tolist() == pytest.approx([0.3 * g * w for g, w in zip(gradients, weights, strict=True)], rel=1e-5)
    assert stats["kl_ref_mean"] == pytest.approx(sum(values) / 4, rel=1e-5)


def test_k3_of_a_collapsed_token_is_bounded() -> None:
    policy = torch.tensor([-30.0], requires_grad=True)
    estimate = kl_estimate(policy, torch.tensor([-1.0]), "k3")
    estimate.backward()
    assert policy.grad is not None
    assert (estimate.item(), policy.grad.item()) == (MAX_K3, 0.0)


def test_kl_without_coefficient_is_reported_only() -> None:
    """Without a coefficient the KL is a metric and adds no term to the loss."""
    loss, _, stats = penalised(config(), ref=torch.tensor(REF))
    assert loss.item() == 0.0
    assert stats["kl_ref_mean"] == pytest.approx(1.1926919 / 4, rel=1e-5)


def test_entropy_bonus_pulls_the_loss_down() -> None:
    entropy = torch.tensor([1.0, 2.0, 0.5, 4.0], requires_grad=True)
    loss, gradient, stats = penalised(config(entropy_coef=0.01), entropy=entropy)
    assert loss.item() == pytest.approx(-0.01 * 7.5 / 2, rel=1e-6)
    assert gradient.tolist() == [0.0] * 4, "the gradient goes through the entropy"
    assert entropy.grad is not None
    assert entropy.grad.tolist() == pytest.approx([-0.005] * 4, rel=1e-6)
    assert stats["entropy_mean"] == pytest.approx(7.5 / 4)


def test_entropy_is_reported_without_a_bonus() -> None:
    loss, _, stats = penalised(config(), entropy=torch.tensor([1.0, 2.0, 0.5, 4.0]))
    assert loss.item() == 0.0
    assert stats["entropy_mean"] == pytest.approx(7.5 / 4)


def test_penalties_of_a_capped_token_stay() -> None:
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


def test_missing_inputs_are_named() -> None:
    x = torch.zeros(4)
    with pytest.raises(ValueError, match=r"kl_coef is 0\.1: pass the log-probs of the reference"):
        actor_loss(x, x, x, x, ALL, 1, config(), kl_coef=0.1)
    with pytest.raises(ValueError, match=r"entropy_coef is 0\.2: pass the entropy"):
        actor_loss(x, x, x, x, ALL, 1, config(entropy_coef=0.2))
    with pytest.raises(ValueError, match=r"ref has shape \[1\]"):
        actor_loss(x, x, x, x, ALL, 1, config(), ref=torch.zeros(1))


def test_garbage_behind_the_mask_reaches_no_penalty() -> None:
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
def test_early_stop(fields: dict[str, float], reason: str | None) -> None:
    found = should_stop({"u_mean": 2.0, "kl_prox_theta_mean": 0.1}, config(**fields))
    if reason is None:
        assert found is None
    else:
        assert found is not None and re.fullmatch(reason, found)
