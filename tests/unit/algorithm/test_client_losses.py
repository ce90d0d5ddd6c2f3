"""Losses of the Tinker protocol: sums and gradients against numbers made with numpy, token by token."""

import math

import numpy as np
import pytest
import torch

from realsys.algorithm.client_loss_settings import CONFIGS, problem_of
from realsys.algorithm.client_losses import client_loss
from realsys.algorithm.loss_tokens import Segments

LENGTHS = [4, 1, 3]
RNG = np.random.default_rng(5)
OLD = RNG.uniform(-3, -0.1, sum(LENGTHS))
THETA = OLD + RNG.normal(0, 0.5, sum(LENGTHS))
ADVANTAGES = RNG.normal(0, 1, sum(LENGTHS))


def clip(x, low, high):
    return min(max(x, low), high)


def sequence_ratio(theta, old, token):
    ends = np.cumsum(LENGTHS)
    row = int(np.searchsorted(ends, token, side="right"))
    own = slice(ends[row] - LENGTHS[row], ends[row])
    kept = np.isfinite(old[own])
    return math.exp((theta[own] - old[own])[kept].mean())


def by_token(name, token, theta, old, low=None, high=None, beta=None):
    """(loss, its derivative by theta) of one token."""
    a, r = ADVANTAGES[token], math.exp(theta[token] - old[token])
    if name == "cross_entropy":
        return -a * theta[token], -a
    if name == "importance_sampling":
        return -r * a, -r * a
    if name == "dro":
        difference = theta[token] - old[token]
        return -(a * theta[token] - beta / 2 * difference**2), -(a - beta * difference)
    if name == "cispo":
        return -clip(r, low, high) * a * theta[token], -clip(r, low, high) * a
    r = sequence_ratio(theta, old, token) if name == "gspo" else r
    bounded = clip(r, low, high)
    held = bounded * a < r * a  # the clipped objective is the smaller one
    return -min(r * a, bounded * a), 0.0 if held else -r * a


def computed(name, old=OLD, config=None):
    theta = torch.tensor(THETA, requires_grad=True)
    old, advantages = torch.tensor(old), torch.tensor(ADVANTAGES)
    loss, stats = client_loss(name, theta, old, advantages, Segments(torch.tensor(LENGTHS)), config or {})
    loss.backward()
    assert theta.grad is not None
    return loss.item(), theta.grad.tolist(), {key: value.item() for key, value in stats.items()}


@pytest.mark.parametrize(
    ("name", "config", "settings"),
    [
        ("cross_entropy", {}, {}),
        ("importance_sampling", {}, {}),
        ("ppo", {}, {"low": 0.8, "high": 1.2}),
        ("ppo", {"clip_high_threshold": 1.1}, {"low": 0.8, "high": 1.1}),
        ("cispo", {}, {"low": 0.0, "high": 4.0}),
        ("cispo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3}, {"low": 0.9, "high": 1.3}),
        ("dro", {}, {"beta": 0.05}),
        ("dro", {"beta": 2.0}, {"beta": 2.0}),
        ("gspo", {}, {"low": 0.8, "high": 1.2}),
        ("gspo", {"clip_low_threshold": 0.5, "clip_high_threshold": 1.01}, {"low": 0.5, "high": 1.01}),
    ],
)
def test_loss_and_gradient_are_sums_over_tokens(name, config, settings):
    losses, gradients = zip(*(by_token(name, t, THETA, OLD, **settings) for t in range(len(OLD))), strict=True)
    loss, gradient, stats = computed(name, config=config)
    assert loss == pytest.approx(sum(losses)) and stats["loss_sum"] == loss
    assert gradient == pytest.approx(gradients)
    assert stats["tokens"] == len(OLD)


def test_the_cases_above_clip_some_tokens_and_not_all():
    for name in ("ppo", "gspo"):
        _, gradient, stats = computed(name)
        assert 0 < stats["clip_count"] < len(OLD) and 0 < gradient.count(0.0) < len(OLD)


@pytest.mark.parametrize("name", CONFIGS)
def test_token_without_old_logprob_has_no_loss(name):
    """Nor is it in the ratio of its sequence."""
    old = OLD.copy()
    old[[1, 4]] = -np.inf
    settings = {"low": CONFIGS[name].get("clip_low_threshold"), "high": CONFIGS[name].get("clip_high_threshold")}
    settings = {**settings, "beta": CONFIGS[name].get("beta")}
    expected = [by_token(name, t, THETA, old, **settings) if np.isfinite(old[t]) else (0, 0) for t in range(len(old))]
    loss, gradient, stats = computed(name, old)
    assert loss == pytest.approx(sum(each for each, _ in expected))
    assert gradient == pytest.approx([each for _, each in expected])
    assert stats["tokens"] == len(old) - 2


def test_statistics_are_those_of_tokens_with_an_advantage():
    theta, old = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -1.0, 0.0])
    _, stats = client_loss("ppo", theta, old, torch.tensor([1.0, -1.0, 0.0]), Segments(torch.tensor([3])), {})
    assert {key: value.item() for key, value in stats.items()} == pytest.approx(
        {
            "tokens": 2,
            "clip_count": 2,
            "ratio_sum": math.exp(0.5) + math.exp(-1),
            "kl_sum": -0.5 + 1.0,
            "loss_sum": -1.2 + 0.8,
        }
    )


def test_no_ratio_overflows():
    theta, old = torch.tensor([-1.0, -1.0], requires_grad=True), torch.tensor([-2000.0, -1.0])
    for name in CONFIGS:
        loss, _ = client_loss(name, theta, old, torch.tensor([0.0, 1.0]), Segments(torch.tensor([2])), {})
        (gradient,) = torch.autograd.grad(loss, theta)
        assert loss.isfinite() and gradient.isfinite().all(), name


@pytest.mark.parametrize(
    ("name", "config", "problem"),
    [
        ("dro", {"beta": 1.0}, ""),
        ("dro", {"clip_low_threshold": 0.5}, "loss dro has no setting clip_low_threshold: it has beta"),
        ("cross_entropy", {"a": 1, "b": 2}, "loss cross_entropy has no setting a, b: it has none"),
        ("nll", {}, "unknown loss 'nll': use one of cross_entropy, importance_sampling, ppo, cispo, dro, gspo"),
    ],
)
def test_unknown_loss_or_setting_is_refused(name, config, problem):
    assert problem_of(name, config) == problem
    if problem:
        with pytest.raises(ValueError, match=problem):
            computed(name, config=config)
