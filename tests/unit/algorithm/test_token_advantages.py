"""Rewards, advantages and returns of tokens, and their normalisation over a batch that is spread over ranks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realsys.algorithm.advantages import (
    Moments,
    moments,
    normalise_tokens,
    outcome_advantages,
    outcome_rewards,
    token_advantages,
    token_rewards,
)
from realsys.config.schema_train import NormalisationConfig, PPOConfig
from realsys.types import SequenceRef
from tests.support.training.sample_records import make_ref


def ref(reward: float, *, group: int = 0, answer: int = 1, truncated: bool = False) -> SequenceRef:
    return make_ref(f"{group}/0", answer + 5, 5, reward, truncated, group)


def ppo(mean: str = "batch", std: str = "batch", *, leave_one_out: bool = False, **fields: object) -> PPOConfig:
    advantage = {"mean": mean, "std": std, "leave_one_out": leave_one_out}
    return PPOConfig.model_validate({"advantage": advantage, **fields})


# --- outcomes

GROUPS = [ref(1.0), ref(0.0), ref(0.0), ref(0.0), ref(4.0, group=1), ref(2.0, group=1)]


@pytest.mark.parametrize(
    ("cfg", "expected"),
    [
        # batch level waits for the tokens
        (ppo("batch", "batch"), [1, 0, 0, 0, 4, 2]),
        (ppo("none", "none"), [1, 0, 0, 0, 4, 2]),
        (ppo("group", "batch"), [0.75, -0.25, -0.25, -0.25, 1, -1]),
        (ppo("group", "none", leave_one_out=True), [1, -1 / 3, -1 / 3, -1 / 3, 2, -2]),
        (ppo("group", "group"), [1.7320508, -0.5773503, -0.5773503, -0.5773503, 1, -1]),
        (ppo("batch", "group"), [1 / 0.4330127, 0, 0, 0, 4, 2]),  # group std sqrt(3)/4 and 1
    ],
)
def test_group_level_acts_on_the_outcome(cfg: PPOConfig, expected: list[float]) -> None:
    assert outcome_rewards(GROUPS, cfg, 100).tolist() == pytest.approx(expected, rel=1e-5)


def test_outcomes_are_shaped_first() -> None:
    refs = [ref(5.0, answer=100, truncated=True), ref(-5.0)]
    cfg = ppo(reward_scale=0.2, truncated_answers="zero_reward", overlong={"buffer": 10, "penalty": 0.5})
    assert outcome_rewards(refs, cfg, 100).tolist() == [-0.5, -1.0]


# --- rewards of tokens


def test_last_token_gets_outcome_each_token_pays_kl() -> None:
    kl = [1.0, 2.0, -1.0, 0.5, 4.0]
    found = token_rewards([5.0, -5.0], [3, 2], kl, 0.1)
    assert found.tolist() == pytest.approx([-0.1, -0.2, 5.1, -0.05, -5.4])
    assert token_rewards([5.0, -5.0], [3, 2]).tolist() == [0, 0, 5, 0, -5]


def test_an_answer_without_tokens_earns_nothing() -> None:
    assert token_rewards([1.0, 2.0, 3.0], [2, 0, 1]).tolist() == [0, 1, 3]
    assert token_rewards([1.0], [0]).tolist() == []
    assert token_rewards([], []).tolist() == []


def test_kl_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="kl has 1 tokens: it must have 3"):
        token_rewards([1.0, 2.0], [2, 1], [0.1], 1.0)


# --- advantages


def test_reward_to_go_without_a_critic() -> None:
    """REINFORCE++: rewards -1, -2, 5 | -0.5, -6."""
    rewards, lengths, truncated = [-1.0, -2.0, 5.0, -0.5, -6.0], [3, 2], [False, True]
    advantages, returns = token_advantages(rewards, lengths, truncated, ppo())
    assert advantages.tolist() == returns.tolist() == [2.0, 3.0, 5.0, -6.5, -6.0]
    discounted, _ = token_advantages(rewards, lengths, truncated, ppo(gamma=0.5))
    # -1 + 0.5 * (-2 + 0.5 * 5), -2 + 0.5 * 5, 5 | -0.5 + 0.5 * -6, -6
    assert discounted.tolist() == [-0.75, 0.5, 5.0, -3.5, -6.0]


def test_gae_uses_end_value_of_truncated_completions_only() -> None:
    # values: 1, 2 and 9 behind | 3 and 9 behind; gamma 0.5, lam 0.5
    rewards, values = [0.0, 4.0, 1.0], [1.0, 2.0, 9.0, 3.0, 9.0]
    cfg = ppo(gamma=0.5, lam=0.5)
    advantages, returns = token_advantages(rewards, [2, 1], [False, True], cfg, values)
    # ended: delta_1 = 4 - 2 = 2, delta_0 = 0.5 * 2 - 1 = 0, A_0 = 0 + 0.25 * 2; truncated: 1 + 0.5 * 9 - 3
    assert advantages.tolist() == [0.5, 2.0, 2.5]
    assert returns.tolist() == [1.5, 4.0, 5.5]
    advantages, _ = token_advantages(rewards, [2, 1], [True, False], cfg, values)
    # delta_1 = 4 + 4.5 - 2 = 6.5, A_0 = 0 + 0.25 * 6.5; ended: 1 - 3
    assert advantages.tolist() == [1.625, 6.5, -2.0]


def test_a_critic_that_is_right_leaves_no_advantage() -> None:
    advantages, returns = token_advantages(
        token_rewards([5.0], [3]), [3], [False], ppo(lam=0.9), values=[5.0, 5.0, 5.0, 123.0]
    )
    assert advantages.tolist() == [0.0, 0.0, 0.0]
    assert returns.tolist() == [5.0, 5.0, 5.0]


def test_values_without_the_end_are_refused() -> None:
    with pytest.raises(ValueError, match="3 values for lengths"):
        token_advantages([0.0] * 3, [2, 1], [False, False], ppo(), values=[0.0] * 3)


def test_a_rank_without_answers() -> None:
    advantages, returns = token_advantages([], [], [], ppo(), values=[])
    assert advantages.tolist() == returns.tolist() == []
    assert moments(advantages) == (0.0, 0.0, 0.0)


# --- normalisation


def test_batch_level_over_the_tokens_of_all_ranks() -> None:
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


def test_equal_advantages_become_zero_not_noise() -> None:
    x = np.full(1000, 0.1, np.float32)
    found = normalise_tokens(x, moments(x), NormalisationConfig())
    assert np.abs(found).max() < 1e-3
    assert normalise_tokens([], Moments(0, 0, 0), NormalisationConfig()).tolist() == []


def test_mean_far_from_zero_keeps_the_spread() -> None:
    x = np.array([1000.0, 1000.25, 1000.5, 1000.25], np.float32)
    assert moments(x).std == pytest.approx(math.sqrt(0.03125), rel=1e-6)


rows = st.lists(st.tuples(st.integers(-8, 8), st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(rows, st.sampled_from([("batch", "batch"), ("group", "group"), ("group", "none"), ("none", "none")]))
def test_tokens_have_advantage_of_their_completion(batch: list[tuple[int, int, int]], levels: tuple[str, str]) -> None:
    """The two ways to an advantage agree where both apply."""
    refs = [ref(float(r), group=g, answer=a) for r, g, a in batch]
    cfg = ppo(*levels)
    lengths = [r.loss_tokens for r in refs]
    advantages, _ = token_advantages(
        token_rewards(outcome_rewards(refs, cfg, 100), lengths), lengths, [False] * len(refs), cfg
    )
    found = normalise_tokens(advantages, moments(advantages), cfg.advantage)
    expected = np.repeat(outcome_advantages(refs, cfg, 100), lengths)
    assert np.allclose(found, expected, atol=1e-4)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.floats(-5, 5, width=32), max_size=5), min_size=1, max_size=6))
def test_moments_do_not_depend_on_the_split(parts: list[list[float]]) -> None:
    whole = [x for part in parts for x in part]
    summed = Moments(*(sum(column) for column in zip(*(moments(part) for part in parts), strict=True)))
    assert summed.mean == pytest.approx(np.mean(whole) if whole else 0.0, abs=1e-9)
    assert summed.std == pytest.approx(np.std(whole) if whole else 0.0, abs=1e-6)
