"""The critic's loss, the statistics of returns that it is normalised with, and the filter of groups."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realsys.algorithm.loss import finish_stats, merge_stats
from realsys.algorithm.value import RunningMoments, critic_loss, explained_variance
from realsys.config.schema_train import CriticConfig

# Within the clip; beyond it away from the return; beyond it towards the return; beyond the huber's delta of 2.
VALUES = [1.1, 2.0, 3.0, 0.0]
OLD = [1.0, 1.0, 2.0, 0.1]
RETURNS = [2.0, 0.0, 4.0, 5.0]
ALL = torch.ones(4, dtype=torch.bool)


def run(cfg, denominator=4.0):
    values = torch.tensor(VALUES, requires_grad=True)
    loss, stats = critic_loss(values, torch.tensor(OLD), torch.tensor(RETURNS), ALL, denominator, cfg)
    loss.backward()
    return loss.item(), values.grad.tolist(), {name: value.item() for name, value in stats.items()}


def test_squared_error_without_a_clip():
    loss, gradient, stats = run(CriticConfig(eps_clip=0.0))
    assert loss == pytest.approx((0.81 + 4 + 1 + 25) / 2 / 4)
    assert gradient == pytest.approx([-0.9 / 4, 2 / 4, -1 / 4, -5 / 4])
    assert stats["clip_count"] == 0


def test_value_clip_takes_the_larger_loss():
    loss, gradient, stats = run(CriticConfig(eps_clip=0.2))
    # token 1: 2 to 1.2, nearer to its return, so the loss stays 2. Token 2: 3 to 2.2, loss 1.8^2 / 2, no gradient
    assert loss == pytest.approx((0.405 + 2 + 1.62 + 12.5) / 4)
    assert gradient == pytest.approx([-0.9 / 4, 2 / 4, 0, -5 / 4])
    assert stats["clip_count"] == 1


def test_huber_is_linear_far_from_the_return():
    loss, gradient, _ = run(CriticConfig(eps_clip=0.0, huber_delta=2.0))
    # 2 * (5 - 1)
    assert loss == pytest.approx((0.405 + 2 + 0.5 + 8) / 4)
    assert gradient == pytest.approx([-0.9 / 4, 2 / 4, -1 / 4, -2 / 4])


def test_explained_variance():
    _, _, stats = run(CriticConfig())
    means = finish_stats(stats)
    # returns 2 0 4 5: mean 2.75, variance 14.75/4; errors 0.9 -2 1 5: mean 1.225, variance 30.81/4 - 1.225^2
    assert means["value_mean"] == pytest.approx(6.1 / 4)
    assert means["return_mean"] == pytest.approx(2.75)
    assert explained_variance(means) == pytest.approx(1 - 6.201875 / 3.6875, rel=1e-6)


@pytest.mark.parametrize("constant", [0.0, 0.1, 1e4])
def test_equal_returns_leave_nothing_to_explain(constant):
    values, returns = torch.rand(1000), torch.full((1000,), constant)
    _, stats = critic_loss(values, values, returns, torch.ones(1000, dtype=torch.bool), 1, CriticConfig())
    assert explained_variance(finish_stats({name: value.item() for name, value in stats.items()})) == 0.0


def test_a_perfect_critic_explains_everything():
    values = torch.tensor([1.0, -2.0, 3.5])
    _, stats = critic_loss(values, values, values, torch.ones(3, dtype=torch.bool), 1, CriticConfig())
    assert explained_variance(finish_stats({name: value.item() for name, value in stats.items()})) == 1.0


def test_garbage_behind_the_mask_reaches_nothing():
    values = torch.tensor([1.0, math.nan], requires_grad=True)
    bad = torch.tensor([2.0, math.inf])
    loss, stats = critic_loss(values, bad, bad, torch.tensor([True, False]), 1, CriticConfig(eps_clip=2.0))
    loss.backward()
    assert loss.item() == 0.5
    assert values.grad is not None and values.grad.tolist() == [-1.0, 0.0]
    assert all(math.isfinite(value.item()) for value in stats.values())


def test_a_tensor_that_would_broadcast_is_refused():
    with pytest.raises(ValueError, match=r"returns has shape \[1\]"):
        critic_loss(torch.zeros(4), torch.zeros(4), torch.zeros(1), ALL, 1, CriticConfig())


number = st.floats(-5, 5, width=32)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(number, number, number, st.booleans()), min_size=1, max_size=12), st.integers(0, 12))
def test_shares_of_micro_batches_add_up(rows, cut):
    columns = [torch.tensor(column) for column in zip(*rows, strict=True)]
    cfg = CriticConfig(huber_delta=1.0)
    whole, stats = critic_loss(*columns, 3.0, cfg)
    parts = [critic_loss(*(x[part] for x in columns), 3.0, cfg) for part in (slice(0, cut), slice(cut, None))]
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(whole.item(), rel=1e-4, abs=1e-5)
    merged = merge_stats(found for _, found in parts)
    for name, value in stats.items():
        assert merged[name].item() == pytest.approx(value.item(), rel=1e-4, abs=1e-4), name


# --- running statistics of returns


def update(norm, *returns):
    norm.update(len(returns), sum(returns), sum(x * x for x in returns))


def running(kind, beta=0.9):
    return RunningMoments(CriticConfig.model_validate({"value_norm": kind}), beta)


def test_none_is_the_identity():
    norm = running("none")
    update(norm, 100.0, 300.0)
    assert (norm.mean, norm.std) == (0.0, 1.0)
    assert norm.normalise([3.0, -1.0]).tolist() == [3.0, -1.0]


@pytest.mark.parametrize("kind", ["exponential", "moving"])
def test_identity_before_the_first_return(kind):
    norm = running(kind)
    norm.update(0, 0.0, 0.0)
    assert (norm.mean, norm.std) == (0.0, 1.0)
    assert norm.denormalise([2.0]).tolist() == [2.0]


@pytest.mark.parametrize("kind", ["exponential", "moving"])
def test_the_first_batch_counts_in_full(kind):
    """Bias correction: no pull towards 0."""
    norm = running(kind, beta=0.99)
    update(norm, 1.0, 3.0)
    assert (norm.mean, norm.std) == pytest.approx((2.0, 1.0))


def test_moving_is_over_all_returns_seen():
    norm = running("moving")
    for batch in ([1.0, 2.0, 3.0], [10.0], [-4.0, 0.0]):
        update(norm, *batch)
    everything = [1.0, 2.0, 3.0, 10.0, -4.0, 0.0]
    assert norm.mean == pytest.approx(np.mean(everything))
    assert norm.std == pytest.approx(np.std(everything))


def test_exponential_weighs_batches_by_age_not_by_size():
    norm = running("exponential", beta=0.9)
    update(norm, 1.0, 3.0)  # mean 2, mean square 5
    update(norm, 5.0, 5.0, 5.0, 9.0)  # mean 6, mean square 39
    # weights 0.09 and 0.1 of 0.19
    mean, square = (0.09 * 2 + 0.1 * 6) / 0.19, (0.09 * 5 + 0.1 * 39) / 0.19
    assert norm.mean == pytest.approx(mean)
    assert norm.std == pytest.approx(math.sqrt(square - mean**2))


def test_exponential_forgets():
    norm = running("exponential", beta=0.9)
    update(norm, -500.0, 500.0)
    for _ in range(300):
        update(norm, 1.0, 3.0)
    assert (norm.mean, norm.std) == pytest.approx((2.0, 1.0), rel=1e-3)


def test_equal_returns_keep_the_next_ones_finite():
    norm = running("moving")
    update(norm, -5.0, -5.0, -5.0)
    assert norm.mean == -5.0
    assert abs(norm.normalise([5.0])[0]) < 1e4


@pytest.mark.parametrize("kind", ["none", "exponential", "moving"])
def test_denormalise_undoes_normalise(kind):
    norm = running(kind)
    update(norm, 3.0, 8.0, -1.0)
    x = np.array([[1.5, -2.0], [0.0, 7.0]], np.float32)
    there = norm.normalise(x)
    assert there.dtype == np.float32 and there.shape == x.shape
    assert np.allclose(norm.denormalise(there), x, atol=1e-5)


def test_statistics_continue_from_their_state():
    first, second = running("exponential"), running("exponential")
    update(first, 3.0, 8.0)
    second.load_state_dict(first.state_dict())
    for norm in (first, second):
        update(norm, -1.0, 2.0)
    assert (second.mean, second.std) == (first.mean, first.std)
    with pytest.raises(KeyError, match="total"):
        second.load_state_dict({"weight": 1.0})
