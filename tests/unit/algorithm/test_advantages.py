"""Reward shaping, the normaliser and its settings, and GAE against a plain loop."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realsys.algorithm.advantages import (
    Moments,
    gae,
    moments,
    normalise,
    normalise_tokens,
    outcome_advantages,
    outcome_rewards,
    shape_rewards,
    token_advantages,
    token_rewards,
)
from realsys.algorithm.minibatches import rows_left_out
from realsys.config.schema_train import NormalisationConfig, PPOConfig
from realsys.errors import ConfigError
from realsys.types import SequenceRef
from tests.support.training.sample_records import make_ref

GRPO = NormalisationConfig(mean="group", std="group")
DR_GRPO = NormalisationConfig(mean="group", std="none")
RLOO = NormalisationConfig(mean="group", std="none", leave_one_out=True)
PAPER = NormalisationConfig(mean="batch", std="batch")
RAW = NormalisationConfig(mean="none", std="none")


def ref(reward, *, group=0, answer=1, truncated=False):
    return make_ref(f"{group}/0", answer + 5, 5, reward, truncated, group)


def ppo(advantage, **fields):
    return PPOConfig.model_validate({"advantage": advantage, **fields})


def outcome(refs, cfg):
    return outcome_advantages(refs, cfg, max_new_tokens=100)


def test_batch_norm_weighs_completions_by_their_tokens():
    # +5 on 1 token, -5 on 3: mean -2.5, variance (7.5^2 + 3 * 2.5^2) / 4 = 18.75
    found = outcome([ref(5.0, answer=1), ref(-5.0, answer=3)], ppo(PAPER))
    assert found.dtype == np.float32
    assert found.tolist() == pytest.approx([1.7320508, -0.5773503], rel=1e-5)


def test_batch_norm_weighs_episode_by_all_of_its_rows():
    rows = [SequenceRef(f"t/{k}", 9, tokens, 5.0, False, 0, 7, 4) for k, tokens in enumerate((1, 3))]
    assert outcome([*rows, ref(-5.0, answer=4)], ppo(PAPER)).tolist() == pytest.approx([1.0, 1.0, -1.0], rel=1e-5)


def test_batch_norm_ignores_groups():
    together = [ref(5.0), ref(-5.0), ref(5.0)]
    apart = [ref(5.0, group=0), ref(-5.0, group=1), ref(5.0, group=2)]
    assert outcome(together, ppo(PAPER)).tolist() == outcome(apart, ppo(PAPER)).tolist()


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        # group 0: 1 0 0 0, mean 1/4, std sqrt(3)/4; group 1: 4 2, mean 3, std 1
        (GRPO, [1.7320508, -0.5773503, -0.5773503, -0.5773503, 1.0, -1.0]),
        (DR_GRPO, [0.75, -0.25, -0.25, -0.25, 1.0, -1.0]),
        # others' mean: 0, 1/3, 1/3, 1/3; 2, 4
        (RLOO, [1.0, -0.3333333, -0.3333333, -0.3333333, 2.0, -2.0]),
        (RAW, [1.0, 0.0, 0.0, 0.0, 4.0, 2.0]),
    ],
)
def test_group_settings(advantage, expected):
    # answer lengths must not matter within a group
    refs = [ref(r, answer=a) for r, a in zip([1.0, 0.0, 0.0, 0.0], [9, 1, 1, 2], strict=True)]
    refs += [ref(4.0, group=1, answer=7), ref(2.0, group=1)]
    assert outcome(refs, ppo(advantage)).tolist() == pytest.approx(expected, rel=1e-5)


def test_batch_std_is_of_group_centred_rewards():
    """REINFORCE++-baseline. Rewards 1 0 | 1 1 are 1/2 -1/2 | 0 0 when centred; their std is sqrt(1/8)."""
    refs = [ref(1.0), ref(0.0), ref(1.0, group=1), ref(1.0, group=1)]
    found = outcome(refs, ppo(NormalisationConfig(mean="group", std="batch")))
    assert found.tolist() == pytest.approx([2**0.5, -(2**0.5), 0.0, 0.0], rel=1e-5)


def test_recentred_advantages_are_whitened_over_the_tokens_of_the_batch():
    """REINFORCE++ with a baseline: group-centred rewards 1/2 on 3 tokens, -1/2 on 1 have mean 1/4, variance 3/16."""
    cfg = NormalisationConfig(mean="group", std="batch", recentre=True)
    found = outcome([ref(1.0, answer=3), ref(0.0, answer=1)], ppo(cfg))
    assert found.tolist() == pytest.approx([3**-0.5, -(3**0.5)], rel=1e-5)


@pytest.mark.parametrize(("std", "recentre"), [("group", False), ("batch", False), ("batch", True), ("none", True)])
def test_episode_and_token_advantages_agree(std, recentre):
    """One setting is one algorithm, whether advantages are those of episodes or of tokens."""
    cfg = ppo(NormalisationConfig(mean="group", std=std, recentre=recentre))
    refs = [ref(1.0, answer=3), ref(0.0, answer=5), ref(2.0, group=1, answer=2), ref(1.5, group=1, answer=7)]
    lengths = np.array([r.loss_tokens for r in refs])
    rewards = token_rewards(outcome_rewards(refs, cfg, 100), lengths)
    raw, _ = token_advantages(rewards, lengths, np.zeros(4, bool), cfg)
    tokens = normalise_tokens(raw, moments(raw), cfg.advantage)
    assert tokens.tolist() == pytest.approx(np.repeat(outcome(refs, cfg), lengths).tolist(), rel=1e-5)


@pytest.mark.parametrize(("mean", "std"), [("batch", "group"), ("none", "group"), ("none", "batch")])
def test_std_without_spread_gives_zero(mean, std):
    """Without the rule, a reward of 5 over a std of 0 is an advantage of 5e6."""
    refs = [ref(5.0), ref(5.0), ref(5.0, group=1), ref(5.0 if std == "batch" else 1.0, group=1)]
    found = outcome(refs, ppo(NormalisationConfig(mean=mean, std=std)))
    assert found.tolist()[:2] == [0.0, 0.0]
    assert abs(found).max() < 10


def test_tokens_without_spread_give_zero():
    cfg = NormalisationConfig(mean="none", std="batch")
    assert normalise_tokens([0.1] * 7, moments([0.1] * 7), cfg).tolist() == [0.0] * 7


@pytest.mark.parametrize("advantage", [GRPO, DR_GRPO, RLOO, PAPER])
@pytest.mark.parametrize("reward", [0.1, 5.0, -1 / 3])
def test_equal_rewards_give_exactly_zero(advantage, reward):
    """skip_zero_advantage relies on it: rounding noise divided by eps would look like an advantage."""
    refs = [ref(reward, answer=a) for a in (3, 7, 11, 13, 17, 19)]
    assert outcome(refs, ppo(advantage)).tolist() == [0.0] * 6


@pytest.mark.parametrize("advantage", [GRPO, DR_GRPO, RLOO])
def test_a_group_of_one_has_no_advantage(advantage):
    assert outcome([ref(5.0, group=0), ref(-5.0, group=1)], ppo(advantage)).tolist() == [0.0, 0.0]


def test_rewards_are_scaled_then_shifted_then_clipped():
    cfg = ppo(RAW, reward_scale=2.0, reward_bias=-1.0, reward_clip=4.0)
    assert shape_rewards([ref(1.0), ref(3.0), ref(-5.0)], cfg, 100).tolist() == [1.0, 4.0, -4.0]


def test_truncated_answers_get_zero_only_when_asked():
    refs = [ref(-5.0, truncated=True), ref(-5.0)]
    assert outcome(refs, ppo(RAW)).tolist() == [-5.0, -5.0]
    masked = ppo(RAW, truncated_answers="zero_reward", reward_bias=1.0)
    assert outcome(refs, masked).tolist() == [0.0, -4.0], "zero after bias, not bias"


def test_overlong_punishment_grows_over_the_buffer():
    # DAPO's numbers in small: 100 tokens at most, the last 20 punished
    cfg = ppo(RAW, overlong={"buffer": 20, "penalty": 2.0})
    refs = [ref(1.0, answer=a) for a in (5, 80, 85, 95, 100)] + [ref(-1.0, answer=90)]
    assert shape_rewards(refs, cfg, 100).tolist() == pytest.approx([1.0, 1.0, 0.5, -0.5, -1.0, -2.0])


def test_overlong_punishment_counts_masked_tokens():
    """Tokens that are too old to be trained were sampled all the same."""
    long = SequenceRef("t/0", 30, 10, 1.0, False, 0, 0, 10, sampled_tokens=95)
    cfg = ppo(RAW, overlong={"buffer": 10, "penalty": 1.0})
    assert shape_rewards([long], cfg, 100).tolist() == [0.5]


def test_overlong_punishment_falls_on_truncated_answers_too():
    """Otherwise running into the limit would beat ending just before it."""
    cfg = ppo(RAW, overlong={"buffer": 20, "penalty": 2.0}, truncated_answers="zero_reward", reward_clip=1.5)
    refs = [ref(-5.0, answer=100, truncated=True), ref(-5.0, answer=100)]
    assert shape_rewards(refs, cfg, 100).tolist() == [-2.0, -3.5], "the clip bounds the reward, not the punishment"


def test_masked_answers_stay_in_the_statistics():
    refs = [ref(1.0), ref(0.0, truncated=True), ref(0.0, group=1), ref(0.0, group=1)]
    for advantage in (PAPER, GRPO, RLOO):
        masked = outcome(refs, ppo(advantage, truncated_answers="mask"))
        assert masked.tolist() == outcome(refs, ppo(advantage)).tolist()
        assert masked[0] > 0


@pytest.mark.parametrize("field", ["gamma", "lam"])
def test_discounting_without_a_critic_is_refused(field):
    with pytest.raises(ConfigError, match=rf"train\.ppo\.{field}=0\.9"):
        outcome([ref(1.0)], ppo(RAW, **{field: 0.9}))


def test_empty_batch():
    assert outcome([], ppo(PAPER)).tolist() == []


rewards_of_groups = st.lists(
    st.tuples(st.integers(-8, 8), st.integers(0, 3), st.integers(1, 50)), min_size=1, max_size=30
)


@settings(max_examples=60, deadline=None)
@given(rewards_of_groups)
def test_batch_norm_gives_weighted_mean_zero_std_one(rows):
    values, groups, weights = (np.array(column, np.float64) for column in zip(*rows, strict=True))
    found = normalise(values, groups.astype(int), weights, NormalisationConfig(), eps=1e-12)
    repeated = np.repeat(found, weights.astype(int))
    assert abs(repeated.mean()) < 1e-9
    assert np.isclose(repeated.std(), 0.0 if len(set(values)) == 1 else 1.0)


@settings(max_examples=60, deadline=None)
@given(rewards_of_groups)
def test_leave_one_out_is_the_group_mean_stretched(rows):
    """r - mean of the others = (r - mean of all) * n / (n - 1)."""
    values, groups, weights = (np.array(column, np.float64) for column in zip(*rows, strict=True))
    plain = normalise(values, groups, weights, DR_GRPO)
    sizes = np.array([(groups == g).sum() for g in groups])
    stretched = np.where(sizes > 1, plain * sizes / np.maximum(sizes - 1, 1), 0.0)
    assert np.allclose(normalise(values, groups, weights, RLOO), stretched)


@settings(max_examples=40, deadline=None)
@given(rewards_of_groups, st.integers(-5, 5))
def test_a_shift_of_all_rewards_changes_nothing(rows, shift):
    values, groups, weights = (np.array(column, np.float64) for column in zip(*rows, strict=True))
    for cfg in (PAPER, GRPO, DR_GRPO, RLOO):
        whole = normalise(values, groups, weights, cfg)
        assert np.allclose(normalise(values + shift, groups, weights, cfg), whole, atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(rewards_of_groups, st.randoms(use_true_random=False))
def test_normalisation_does_not_depend_on_the_order(rows, random):
    order = list(range(len(rows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    values, groups, weights = (np.array(column, np.float64) for column in zip(*rows, strict=True))
    for cfg in (PAPER, GRPO, RLOO):
        whole = normalise(values, groups, weights, cfg)
        assert np.allclose(normalise(values[order], groups[order], weights[order], cfg), whole[order], atol=1e-9)


def naive_gae(rewards, values, bootstrap, gamma, lam):
    """The definition as a double sum: A_k = sum_j (gamma*lam)^j delta_{k+j}."""
    following = [*values, bootstrap][1:]
    deltas = [r + gamma * nxt - v for r, v, nxt in zip(rewards, values, following, strict=True)]
    advantages = [sum((gamma * lam) ** (j - k) * deltas[j] for j in range(k, len(deltas))) for k in range(len(deltas))]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


finite = st.floats(-5, 5, width=32)
sequences = st.lists(
    st.tuples(st.lists(st.tuples(finite, finite), max_size=8), finite), max_size=6
)  # per sequence: (reward, value) of each token, bootstrap


@settings(max_examples=80, deadline=None)
@given(sequences, st.sampled_from([1.0, 0.9, 0.0]), st.sampled_from([1.0, 0.95, 0.0]))
def test_gae_agrees_with_the_definition(rows, gamma, lam):
    rewards = [r for tokens, _ in rows for r, _ in tokens]
    values = [v for tokens, _ in rows for _, v in tokens]
    found, targets = gae(rewards, values, [len(t) for t, _ in rows], [b for _, b in rows], gamma, lam)
    expected: list[float] = []
    expected_targets: list[float] = []
    for tokens, bootstrap in rows:
        a, t = naive_gae([r for r, _ in tokens], [v for _, v in tokens], bootstrap, gamma, lam)
        expected += a
        expected_targets += t
    assert found.dtype == targets.dtype == np.float32
    assert np.allclose(found, expected, atol=1e-4)
    assert np.allclose(targets, expected_targets, atol=1e-4)


@pytest.mark.parametrize("lengths", [[2, 2], [1, 1, 1], [4, -1]])
def test_gae_refuses_sizes_that_do_not_agree(lengths):
    with pytest.raises(ValueError, match="gae: 3 rewards"):
        gae([0.0] * 3, [0.0] * 3, lengths, [0.0, 0.0], 1.0, 1.0)


# ---- Rewards, advantages and returns of tokens, and their normalisation over a batch that is spread over ranks


def token_ppo(mean="batch", std="batch", *, leave_one_out=False, **fields):
    advantage = {"mean": mean, "std": std, "leave_one_out": leave_one_out}
    return PPOConfig.model_validate({"advantage": advantage, **fields})


# --- outcomes

GROUPS = [ref(1.0), ref(0.0), ref(0.0), ref(0.0), ref(4.0, group=1), ref(2.0, group=1)]


@pytest.mark.parametrize(
    ("cfg", "expected"),
    [
        # batch level waits for the tokens
        (token_ppo("batch", "batch"), [1, 0, 0, 0, 4, 2]),
        (token_ppo("none", "none"), [1, 0, 0, 0, 4, 2]),
        (token_ppo("group", "batch"), [0.75, -0.25, -0.25, -0.25, 1, -1]),
        (token_ppo("group", "none", leave_one_out=True), [1, -1 / 3, -1 / 3, -1 / 3, 2, -2]),
        (token_ppo("group", "group"), [1.7320508, -0.5773503, -0.5773503, -0.5773503, 1, -1]),
        (token_ppo("batch", "group"), [1 / 0.4330127, 0, 0, 0, 4, 2]),  # group std sqrt(3)/4 and 1
    ],
)
def test_group_level_acts_on_the_outcome(cfg, expected):
    assert outcome_rewards(GROUPS, cfg, 100).tolist() == pytest.approx(expected, rel=1e-5)


def test_outcomes_are_shaped_first():
    refs = [ref(5.0, answer=100, truncated=True), ref(-5.0)]
    cfg = token_ppo(reward_scale=0.2, truncated_answers="zero_reward", overlong={"buffer": 10, "penalty": 0.5})
    assert outcome_rewards(refs, cfg, 100).tolist() == [-0.5, -1.0]


# --- rewards of tokens


def test_last_token_gets_outcome_each_token_pays_kl():
    kl = [1.0, 2.0, -1.0, 0.5, 4.0]
    found = token_rewards([5.0, -5.0], [3, 2], kl, 0.1)
    assert found.tolist() == pytest.approx([-0.1, -0.2, 5.1, -0.05, -5.4])
    assert token_rewards([5.0, -5.0], [3, 2]).tolist() == [0, 0, 5, 0, -5]


def test_an_answer_without_tokens_earns_nothing():
    assert token_rewards([1.0, 2.0, 3.0], [2, 0, 1]).tolist() == [0, 1, 3]
    assert token_rewards([1.0], [0]).tolist() == []
    assert token_rewards([], []).tolist() == []


def test_kl_of_another_size_is_refused():
    with pytest.raises(ValueError, match="kl has 1 tokens: it must have 3"):
        token_rewards([1.0, 2.0], [2, 1], [0.1], 1.0)


# --- advantages


def test_reward_to_go_without_a_critic():
    """REINFORCE++: rewards -1, -2, 5 | -0.5, -6."""
    rewards, lengths, truncated = [-1.0, -2.0, 5.0, -0.5, -6.0], [3, 2], [False, True]
    advantages, returns = token_advantages(rewards, lengths, truncated, token_ppo())
    assert advantages.tolist() == returns.tolist() == [2.0, 3.0, 5.0, -6.5, -6.0]
    discounted, _ = token_advantages(rewards, lengths, truncated, token_ppo(gamma=0.5))
    # -1 + 0.5 * (-2 + 0.5 * 5), -2 + 0.5 * 5, 5 | -0.5 + 0.5 * -6, -6
    assert discounted.tolist() == [-0.75, 0.5, 5.0, -3.5, -6.0]


def test_gae_uses_end_value_of_truncated_completions_only():
    # values: 1, 2 and 9 behind | 3 and 9 behind; gamma 0.5, lam 0.5
    rewards, values = [0.0, 4.0, 1.0], [1.0, 2.0, 9.0, 3.0, 9.0]
    cfg = token_ppo(gamma=0.5, lam=0.5)
    advantages, returns = token_advantages(rewards, [2, 1], [False, True], cfg, values)
    # ended: delta_1 = 4 - 2 = 2, delta_0 = 0.5 * 2 - 1 = 0, A_0 = 0 + 0.25 * 2; truncated: 1 + 0.5 * 9 - 3
    assert advantages.tolist() == [0.5, 2.0, 2.5]
    assert returns.tolist() == [1.5, 4.0, 5.5]
    advantages, _ = token_advantages(rewards, [2, 1], [True, False], cfg, values)
    # delta_1 = 4 + 4.5 - 2 = 6.5, A_0 = 0 + 0.25 * 6.5; ended: 1 - 3
    assert advantages.tolist() == [1.625, 6.5, -2.0]


def test_a_critic_that_is_right_leaves_no_advantage():
    advantages, returns = token_advantages(
        token_rewards([5.0], [3]), [3], [False], token_ppo(lam=0.9), values=[5.0, 5.0, 5.0, 123.0]
    )
    assert advantages.tolist() == [0.0, 0.0, 0.0]
    assert returns.tolist() == [5.0, 5.0, 5.0]


def test_values_without_the_end_are_refused():
    with pytest.raises(ValueError, match="3 values for lengths"):
        token_advantages([0.0] * 3, [2, 1], [False, False], token_ppo(), values=[0.0] * 3)


def test_a_rank_without_answers():
    advantages, returns = token_advantages([], [], [], token_ppo(), values=[])
    assert advantages.tolist() == returns.tolist() == []
    assert moments(advantages) == (0.0, 0.0, 0.0)


# --- normalisation


def test_batch_level_over_the_tokens_of_all_ranks():
    first, second = np.array([1.0, 3.0], np.float32), np.array([3.0, 9.0], np.float32)
    batch = Moments(*(a + b for a, b in zip(moments(first), moments(second), strict=True)))
    assert (batch.number, batch.mean, batch.std) == (4, 4.0, 3.0)  # deviations -3, -1, -1, 5
    both = NormalisationConfig(mean="batch", std="batch")
    assert normalise_tokens(first, batch, both, eps=1e-12).tolist() == pytest.approx([-1.0, -1 / 3])
    assert normalise_tokens(second, batch, both, eps=1e-12).tolist() == pytest.approx([-1 / 3, 5 / 3])
    only_std = NormalisationConfig(mean="group", std="batch")
    assert normalise_tokens(first, batch, only_std, eps=1e-12).tolist() == pytest.approx([1 / 3, 1.0])
    only_mean = NormalisationConfig(mean="batch", std="none")
    assert normalise_tokens(second, batch, only_mean).tolist() == [-1.0, 5.0]
    neither = NormalisationConfig(mean="group", std="group")
    assert normalise_tokens(second, batch, neither).tolist() == [3.0, 9.0]


def test_equal_advantages_become_zero_not_noise():
    x = np.full(1000, 0.1, np.float32)
    found = normalise_tokens(x, moments(x), NormalisationConfig())
    assert np.abs(found).max() < 1e-3
    assert normalise_tokens([], Moments(0, 0, 0), NormalisationConfig()).tolist() == []


def test_mean_far_from_zero_keeps_the_spread():
    x = np.array([1000.0, 1000.25, 1000.5, 1000.25], np.float32)
    assert moments(x).std == pytest.approx(math.sqrt(0.03125), rel=1e-6)


rows = st.lists(st.tuples(st.integers(-8, 8), st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(rows, st.sampled_from([("batch", "batch"), ("group", "group"), ("group", "none"), ("none", "none")]))
def test_tokens_have_advantage_of_their_completion(batch, levels):
    """The two ways to an advantage agree where both apply."""
    refs = [ref(float(r), group=g, answer=a) for r, g, a in batch]
    cfg = token_ppo(*levels)
    lengths = [r.loss_tokens for r in refs]
    advantages, _ = token_advantages(
        token_rewards(outcome_rewards(refs, cfg, 100), lengths), lengths, [False] * len(refs), cfg
    )
    found = normalise_tokens(advantages, moments(advantages), cfg.advantage)
    expected = np.repeat(outcome_advantages(refs, cfg, 100), lengths)
    assert np.allclose(found, expected, atol=1e-4)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.floats(-5, 5, width=32), max_size=5), min_size=1, max_size=6))
def test_moments_do_not_depend_on_the_split(parts):
    whole = [x for part in parts for x in part]
    summed = Moments(*(sum(column) for column in zip(*(moments(part) for part in parts), strict=True)))
    assert summed.mean == pytest.approx(np.mean(whole) if whole else 0.0, abs=1e-9)
    assert summed.std == pytest.approx(np.std(whole) if whole else 0.0, abs=1e-6)


# ---- The rows that the actor does not compute


GRPO_FIELDS = {"mean": "group", "std": "group"}
# group 0: equal rewards; group 1: different rewards, one episode cut off
REFS = [
    make_ref("same/0", 8, 3, 1.0, False, 0),
    make_ref("same/1", 8, 3, 1.0, False, 0),
    make_ref("differ/0", 8, 3, 1.0, False, 1),
    make_ref("differ/1", 8, 3, 0.0, True, 1),
]


def left_out(*, by_token=False, **fields):
    cfg = PPOConfig.model_validate({"advantage": GRPO_FIELDS, **fields})
    return rows_left_out(REFS, cfg, 100, by_token=by_token)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, set()),
        ({"skip_zero_advantage": True}, {"same/0", "same/1"}),
        ({"truncated_answers": "mask"}, {"differ/1"}),
        ({"skip_zero_advantage": True, "entropy_coef": 0.1}, set()),
        ({"skip_zero_advantage": True, "kl": {"coef": 0.1}}, set()),
        ({"truncated_answers": "mask", "entropy_coef": 0.1}, {"differ/1"}),
    ],
)
def test_rows_without_gradient_are_left_out(fields, expected):
    assert left_out(**fields) == expected


def test_token_advantages_leave_nothing_out():
    assert left_out(by_token=True, skip_zero_advantage=True, truncated_answers="mask") == set()
