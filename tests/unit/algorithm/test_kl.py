"""KL estimators: their numbers, what their gradients estimate, and the controller of the coefficient."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor

from realsys.algorithm.kl import AdaptiveKL, kl_estimate

Kind = Literal["k1", "k2", "k3"]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("k1", [math.log(2), 0.0, -math.log(4)]),
        ("k2", [math.log(2) ** 2 / 2, 0.0, math.log(4) ** 2 / 2]),
        ("k3", [0.5 - 1 + math.log(2), 0.0, 4 - 1 - math.log(4)]),  # ref / policy = 1/2, 1, 4
    ],
)
def test_estimators(kind: Kind, expected: list[float]) -> None:
    policy, ref = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.25, 0.3, 0.8]).log()
    assert kl_estimate(policy, ref, kind).tolist() == pytest.approx(expected, rel=1e-5, abs=1e-7)


REFERENCE = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log()


def gradient(loss: Callable[[Tensor], Tensor]) -> list[float]:
    """Of a function of the policy's log-probs over its vocabulary of 4, with respect to the logits."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    loss(logits.log_softmax(0)).backward()
    assert logits.grad is not None
    return logits.grad.tolist()


def divergence(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum()


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_unbiased_estimators_have_the_divergence_as_their_mean(kind: Kind) -> None:
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
def test_mean_gradient_of_an_estimator_in_the_loss(kind: Kind, objective: Callable[[Tensor], Tensor]) -> None:
    """Tokens are drawn by the policy, then the estimator is differentiated (docs/algorithms.md)."""
    found = gradient(lambda log_p: (log_p.exp().detach() * kl_estimate(log_p, REFERENCE, kind)).sum())
    assert found == pytest.approx(gradient(objective), abs=1e-12)


@pytest.mark.parametrize(("kind", "exact"), [("k1", True), ("k2", False), ("k3", False)])
def test_policy_gradient_of_estimator_in_reward(kind: Kind, exact: bool) -> None:
    """In the reward the estimator is a number that weighs the gradient of the log-prob: only k1 is right there."""
    found = gradient(lambda log_p: (log_p.exp().detach() * kl_estimate(log_p, REFERENCE, kind).detach() * log_p).sum())
    right = gradient(lambda log_p: divergence(log_p, REFERENCE))
    assert (found == pytest.approx(right, abs=1e-12)) is exact


def test_k3_of_a_hopeless_token_stays_finite() -> None:
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
def test_coefficient_follows_the_clipped_error(kl: float, expected: float) -> None:
    controller = AdaptiveKL(0.05, target=0.1, horizon=10_000)
    controller.update(kl, 3_000)
    assert controller.coef == pytest.approx(expected)


def test_coefficient_reaches_the_target_of_a_simple_plant() -> None:
    controller = AdaptiveKL(0.01, target=0.1, horizon=1000)
    for _ in range(400):
        controller.update(0.02 / controller.coef, 200)  # the more it costs, the smaller the KL
    assert controller.coef == pytest.approx(0.2, rel=1e-3)


@pytest.mark.parametrize("answers", [8_000, 1_000_000])
def test_batch_beyond_horizon_keeps_coefficient_positive(answers: int) -> None:
    controller = AdaptiveKL(0.05, target=0.1, horizon=1_000)
    controller.update(0.0, answers)
    assert controller.coef == pytest.approx(0.05 * 0.8)


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_a_step_that_measured_nothing_changes_nothing(kl: float) -> None:
    controller = AdaptiveKL(0.05, target=0.1, horizon=1_000)
    controller.update(kl, 500)
    assert controller.coef == 0.05


def test_controller_continues_from_its_state() -> None:
    first = AdaptiveKL(0.05, target=0.1, horizon=1_000)
    first.update(1.0, 500)
    second = AdaptiveKL(0.9, target=0.1, horizon=1_000)
    second.load_state_dict(first.state_dict())
    assert second.coef == first.coef == pytest.approx(0.055)


@pytest.mark.processes
def test_the_controller_needs_no_torch() -> None:
    """The master's process has none."""
    code = "import sys, realsys.algorithm.kl; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
