"""The decoupled PPO loss against numbers worked out by hand, a scalar loop, and its limits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realsys.algorithm.loss import actor_loss, finish_stats, interpolated_prox, loss_denominator, merge_stats
from realsys.config.schema_train import PPOConfig
from realsys.types import SequenceRef

# Four tokens: clipped above with w > 1, clipped below with A < 0, unclipped with w = 1, unbounded with A < 0.
# u = e^0.2, e^-0.5, e^-0.5, e^1;  w = e^0.3, e^-0.1, 1, e^-0.2
THETA = [-1.0, -2.0, -2.0, -0.5]
PROX = [-1.2, -1.5, -1.5, -1.5]
BEHAV = [-1.5, -1.4, -1.5, -1.3]
ADVANTAGES = [2.0, -1.0, 2.0, -3.0]
# -e^0.3*1.2*2 + e^-0.1*0.8 - e^-0.5*2 + e^-0.2*e*3
TOKEN_LOSSES = [-3.2396611, 0.7238699, -1.2130613, 6.6766228]


def tensors(*columns):
    return [torch.tensor(column, dtype=torch.float32) for column in columns]


def loss_and_gradient(cfg, denominator=5.0):
    theta, prox, behav, advantages = tensors(THETA, PROX, BEHAV, ADVANTAGES)
    theta.requires_grad_()
    loss, stats = actor_loss(theta, prox, behav, advantages, torch.ones(4, dtype=torch.bool), denominator, cfg)
    loss.backward()
    return loss.item(), theta.grad.tolist(), {name: value.item() for name, value in stats.items()}


def test_interpolated_prox_follows_the_staleness_of_each_token():
    """A-3PO: prox = behav^(1/d) theta^(1 - 1/d), where d counts the update that is under way."""
    theta = torch.tensor([-1.0, -1.0, -1.0, -1.0], requires_grad=True)
    behav = torch.tensor([-3.0, -3.0, -3.0, -3.0])
    prox = interpolated_prox(theta, behav, torch.tensor([7.0, 6.0, 4.0, 8.0]), version=7)
    # d = 1, 2, 4, and a token that is newer than the step (it cannot be, and is not extrapolated)
    assert prox.tolist() == [-3.0, -2.0, -1.5, -3.0]
    assert not prox.requires_grad


def test_decoupled_loss_is_the_formula_of_the_paper():
    loss, gradient, stats = loss_and_gradient(PPOConfig())
    assert loss == pytest.approx(2.9477703 / 5, rel=1e-6)
    # a clipped token has no gradient; the others have d/dtheta(-w*u*A) = -w*u*A
    assert gradient == pytest.approx([0.0, 0.0, -1.2130613 / 5, 6.6766228 / 5], rel=1e-6)
    assert stats == pytest.approx(
        {
            "tokens": 4,
            "loss_sum": 2.9477703,
            "u_sum": 5.1527459,
            "u_max": 2.7182818,
            "w_sum": 4.0734270,
            "w_max": 1.3498588,
            "w_squared_sum": 4.3111696,
            "clip_count": 2,
            "dual_clip_count": 0,
            "capped_count": 0,
            "kl_behav_prox_sum": 0.0734270,
            "kl_prox_theta_sum": 0.9527459,  # sum of u - 1 - log u; the log ratios sum to 0.2
        },
        rel=1e-5,
    )


def test_capped_token_counts_in_the_denominator_only():
    loss, gradient, stats = loss_and_gradient(PPOConfig(behav_imp_weight_cap=1.1))
    assert loss == pytest.approx((2.9477703 + 3.2396611) / 5, rel=1e-6)
    assert gradient[0] == 0.0
    assert (stats["capped_count"], stats["tokens"]) == (1, 4)
    assert stats["w_max"] == pytest.approx(1.3498588, rel=1e-6), "w is reported as it was before the cap"


@pytest.mark.parametrize("decoupled", [True, False])
def test_token_that_was_impossible_weighs_nothing(decoupled):
    """Its ratio would be infinite: with log w clamped at 20 it would outweigh every other token."""
    theta, prox, behav, advantages = tensors([-1.15, -1.15], [-1.2, -1.2], [-1.3, -math.inf], [2.0, 2.0])
    theta.requires_grad_()
    cfg = PPOConfig(use_decoupled_loss=decoupled, behav_imp_weight_cap=0.0)
    loss, stats = actor_loss(theta, prox, behav, advantages, torch.ones(2, dtype=torch.bool), 2, cfg)
    loss.backward()
    assert theta.grad[0] != 0.0 and theta.grad[1] == 0.0
    assert math.isfinite(loss.item()) and stats["w_max"].item() < 2


def test_cap_on_the_weight_is_on_by_default():
    """One token with prox - behav = 6 nats would carry 85 % of the gradient of 64,000 tokens."""
    theta, prox, behav, advantages = tensors([-1.0], [-1.0], [-7.0], [2.0])
    loss, stats = actor_loss(theta, prox, behav, advantages, torch.ones(1, dtype=torch.bool), 1, PPOConfig())
    assert (loss.item(), stats["capped_count"].item()) == (0.0, 1.0)


def test_weight_equal_to_the_cap_is_kept():
    _, gradient, stats = loss_and_gradient(PPOConfig(behav_imp_weight_cap=1.0))
    assert stats["capped_count"] == 1  # only w = e^0.3; w = 1 is not larger than 1
    assert gradient[2] != 0.0


def test_dual_clip_bounds_the_loss_of_negative_advantages():
    loss, gradient, stats = loss_and_gradient(PPOConfig(c_clip=2.0))
    # last token: w * min(e*3, 2*3)
    assert loss == pytest.approx((sum(TOKEN_LOSSES[:3]) + 0.8187308 * 6) / 5, rel=1e-6)
    assert gradient[3] == 0.0
    assert stats["dual_clip_count"] == 1


def test_plain_ppo_never_looks_at_prox():
    theta, behav, advantages = tensors(THETA, BEHAV, ADVANTAGES)
    mask, cfg = torch.ones(4, dtype=torch.bool), PPOConfig(use_decoupled_loss=False)
    with_nan, _ = actor_loss(theta, torch.full((4,), math.nan), behav, advantages, mask, 4, cfg)
    with_behav, _ = actor_loss(theta, behav, behav, advantages, mask, 4, cfg)
    assert with_nan.item() == with_behav.item()


log_prob = st.floats(-8, 0, width=32)
token = st.tuples(log_prob, log_prob, log_prob, st.floats(-3, 3, width=32), st.booleans())
configs = st.builds(
    PPOConfig,
    use_decoupled_loss=st.booleans(),
    eps_clip=st.sampled_from([0.03, 0.2]),
    eps_clip_higher=st.sampled_from([0.0, 0.28]),
    c_clip=st.sampled_from([0.0, 1.5, 3.0]),
    behav_imp_weight_cap=st.sampled_from([0.0, 1.0, 5.0]),
)


def scalar_loss(tokens, cfg):
    """The formula once more, one token at a time in Python floats."""
    total = 0.0
    for theta, prox, behav, advantage, counted in tokens:
        if not counted:
            continue
        reference = prox if cfg.use_decoupled_loss else behav
        ratio, weight = math.exp(theta - reference), math.exp(reference - behav)
        high = cfg.eps_clip_higher if cfg.eps_clip_higher > 0 else cfg.eps_clip
        bounded = min(max(ratio, 1 - cfg.eps_clip), 1 + high)
        objective = min(ratio * advantage, bounded * advantage)
        if cfg.c_clip > 0 and advantage < 0:
            objective = max(objective, cfg.c_clip * advantage)
        if cfg.use_decoupled_loss and 0 < cfg.behav_imp_weight_cap < weight:
            continue
        total -= weight * objective
    return total


@settings(max_examples=80, deadline=None)
@given(st.lists(token, max_size=12), configs)
def test_loss_agrees_with_a_scalar_loop(tokens, cfg):
    columns = [list(c) for c in zip(*tokens, strict=True)] if tokens else [[], [], [], [], []]
    theta, prox, behav, advantages = tensors(*columns[:4])
    mask = torch.tensor(columns[4], dtype=torch.bool)
    # a weight within rounding of the cap may fall on either side in float32
    weights = [math.exp(t[1] - t[2]) for t in tokens]
    if any(abs(w - cfg.behav_imp_weight_cap) < 1e-4 and w != 1.0 for w in weights):
        return
    loss, stats = actor_loss(theta, prox, behav, advantages, mask, 7.0, cfg)
    assert loss.item() == pytest.approx(scalar_loss(tokens, cfg) / 7, rel=1e-4, abs=1e-5)
    assert stats["tokens"].item() == sum(t[4] for t in tokens)


@settings(max_examples=40, deadline=None)
@given(st.lists(token, min_size=2, max_size=12), st.integers(1, 11))
def test_shares_of_micro_batches_add_up(tokens, cut):
    """Loss and merged statistics do not depend on how the tokens are packed."""
    cfg = PPOConfig(c_clip=2.0, behav_imp_weight_cap=3.0)
    columns = [list(c) for c in zip(*tokens, strict=True)]
    whole = [*tensors(*columns[:4]), torch.tensor(columns[4], dtype=torch.bool)]
    loss, stats = actor_loss(*whole, 3.0, cfg)
    parts = [actor_loss(*(x[piece] for x in whole), 3.0, cfg) for piece in (slice(0, cut), slice(cut, None))]
    assert sum(part.item() for part, _ in parts) == pytest.approx(loss.item(), rel=1e-4, abs=1e-4)
    merged = merge_stats(part for _, part in parts)
    for name, value in stats.items():
        assert merged[name].item() == pytest.approx(value.item(), rel=1e-4, abs=1e-4), name


def test_on_policy_gradient_is_minus_the_advantage():
    theta = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    old = theta.detach().clone()
    advantages = torch.tensor([1.5, -0.5, 0.0])
    loss, stats = actor_loss(theta, old, old, advantages, torch.ones(3, dtype=torch.bool), 3, PPOConfig())
    loss.backward()
    assert theta.grad.tolist() == pytest.approx((-advantages / 3).tolist())
    assert stats["clip_count"].item() == 0


def test_gradient_agrees_with_finite_differences():
    _, gradient, _ = loss_and_gradient(PPOConfig(c_clip=3.0, eps_clip_higher=0.3))
    for i in range(4):
        sides = []
        for step in (1e-3, -1e-3):
            moved = [t + step * (i == j) for j, t in enumerate(THETA)]
            tokens = list(zip(moved, PROX, BEHAV, ADVANTAGES, [True] * 4, strict=True))
            sides.append(scalar_loss(tokens, PPOConfig(c_clip=3.0, eps_clip_higher=0.3)) / 5)
        assert gradient[i] == pytest.approx((sides[0] - sides[1]) / 2e-3, rel=1e-4, abs=1e-6)


def test_garbage_behind_the_mask_reaches_nothing():
    bad = math.nan
    theta = torch.tensor([-1.0, bad, math.inf, -2.0], requires_grad=True)
    others = tensors([-1.2, bad, 0.0, bad], [-1.5, 0.0, bad, 0.0], [2.0, bad, bad, -math.inf])
    mask = torch.tensor([True, False, False, False])
    loss, stats = actor_loss(theta, *others, mask, 1.0, PPOConfig(c_clip=2.0, behav_imp_weight_cap=5.0))
    loss.backward()
    assert loss.item() == pytest.approx(TOKEN_LOSSES[0], rel=1e-6)
    assert theta.grad is not None and torch.isfinite(theta.grad).all()
    assert all(math.isfinite(value.item()) for value in stats.values())


def test_nan_among_counted_tokens_shows_in_the_loss():
    theta, prox, behav, advantages = tensors([-1.0, math.nan], [-1.0, -1.0], [-1.0, -1.0], [1.0, 1.0])
    loss, _ = actor_loss(theta, prox, behav, advantages, torch.ones(2, dtype=torch.bool), 2, PPOConfig())
    assert math.isnan(loss.item())


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_huge_ratios_leave_loss_and_gradient_finite(advantage):
    theta = torch.tensor([0.0, -200.0], requires_grad=True)
    prox, behav, advantages = tensors([-200.0, 0.0], [-400.0, 0.0], [advantage, advantage])
    loss, stats = actor_loss(theta, prox, behav, advantages, torch.ones(2, dtype=torch.bool), 2, PPOConfig())
    loss.backward()
    assert theta.grad is not None and torch.isfinite(theta.grad).all()
    assert math.isfinite(loss.item())
    assert all(math.isfinite(value.item()) for value in stats.values())


def test_no_tokens_give_differentiable_zero_loss():
    empty = torch.zeros(0)
    theta = torch.zeros(0, requires_grad=True)
    loss, stats = actor_loss(theta, empty, empty, empty, torch.zeros(0, dtype=torch.bool), 5, PPOConfig())
    loss.backward()
    assert loss.item() == 0.0
    assert stats["u_max"].item() == 0.0


def test_a_tensor_that_would_broadcast_is_refused():
    one = torch.zeros(3)
    with pytest.raises(ValueError, match=r"advantages has shape \[1\]"):
        actor_loss(one, one, one, torch.zeros(1), torch.ones(3, dtype=torch.bool), 1, PPOConfig())
    with pytest.raises(ValueError, match="it must be bool"):
        actor_loss(one, one, one, one, torch.ones(3), 1, PPOConfig())


def test_effective_sample_size_falls_with_one_weight():
    equal = finish_stats({"tokens": 4.0, "w_sum": 2.0, "w_squared_sum": 1.0})
    one = finish_stats({"tokens": 4.0, "w_sum": 8.0, "w_squared_sum": 64.0})
    assert (equal["w_ess"], one["w_ess"]) == (1.0, 0.25)
    assert "w_ess" not in finish_stats({"tokens": 0.0, "w_sum": 0.0, "w_squared_sum": 0.0})


def test_denominator_counts_episodes_not_their_rows():
    rows = [SequenceRef(f"t/{k}", 9, tokens, 1.0, False, 0, k // 2, 7) for k, tokens in enumerate((3, 4, 7))]
    found = [loss_denominator(rows, PPOConfig(aggregation=how), 100) for how in ("token", "sequence", "constant")]
    assert found == [14.0, 2.0, 200.0]


def test_finish_stats_divides_by_tokens_and_renames():
    totals = {"tokens": 4.0, "loss_sum": 2.0, "u_sum": 6.0, "u_max": 9.0, "clip_count": 1.0}
    assert finish_stats(totals) == {"tokens": 4.0, "loss": 0.5, "u_mean": 1.5, "u_max": 9.0, "clip_fraction": 0.25}
    empty = finish_stats({"tokens": 0.0, "u_sum": 0.0, "entropy_sum": 0.0, "u_max": 0.0})
    assert math.isnan(empty["u_mean"]) and math.isnan(empty["entropy_mean"]), (
        "an entropy of 0 would look like a collapse"
    )
