"""Which groups are worth training on, and which of their episodes."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realsys.config.schema_rollout import KeepConfig
from realsys.config.schema_train import FilterConfig
from realsys.rollout.episodes import kept_episodes, reason_to_drop
from realsys.types import Episode

DAPO = FilterConfig(min=0.001, max=0.999)
EQUAL = FilterConfig(equal_rewards=True)
QUARTERS = FilterConfig(min=0.25, max=0.75)


def episodes(*correct):
    return [Episode([], 5.0 if each else -5.0, each) for each in correct]


@pytest.mark.parametrize(
    ("correct", "config", "reason"),
    [
        ([True, False, False, False], DAPO, ""),
        ([False] * 4, DAPO, "success_rate"),
        ([True] * 4, DAPO, "success_rate"),
        ([True] * 4, FilterConfig(), ""),
        ([None] * 4, FilterConfig(), ""),
        ([True, False, False, False], QUARTERS, ""),  # both ends belong
        ([True, True, True, False], QUARTERS, ""),
        ([True, False, False, False, False], QUARTERS, "success_rate"),
        ([True] * 4, EQUAL, "equal_rewards"),
        ([None] * 4, EQUAL, "equal_rewards"),  # correctness is not needed
        ([True, False], EQUAL, ""),
    ],
)
def test_filter_names_its_reason(correct, config, reason):
    assert reason_to_drop(episodes(*correct), config) == reason


def test_all_episodes_are_kept_by_default():
    assert kept_episodes([1.0, 0.0, 1.0], KeepConfig(), 7) == [0, 1, 2]
    assert kept_episodes([1.0, 0.0], KeepConfig(episodes=3), 7) == [0, 1], "fewer than asked for have ended"


def test_spread_splits_binary_rewards_evenly():
    kept = kept_episodes([0, 0, 1, 0, 0, 1, 1, 0], KeepConfig(episodes=4), 7)
    assert [[0, 0, 1, 0, 0, 1, 1, 0][k] for k in kept] == [0, 1, 1, 0] or sum(k in (2, 5, 6) for k in kept) == 2


REWARDS = st.lists(st.sampled_from([-1.0, 0.0, 0.25, 1.0]), min_size=2, max_size=8)


@given(REWARDS, st.integers(1, 7), st.integers(0, 1000))
def test_spread_has_the_largest_variance_of_all_subsets(rewards, wanted, seed):
    kept = kept_episodes(rewards, KeepConfig(episodes=wanted), seed)
    assert kept == sorted(set(kept)) and len(kept) == min(wanted, len(rewards))
    variances = [np.var(subset) for subset in itertools.combinations(rewards, len(kept))]
    assert np.var([rewards[k] for k in kept]) == pytest.approx(max(variances))


@given(REWARDS, st.integers(1, 7), st.integers(0, 1000))
def test_best_has_the_highest_rewards(rewards, wanted, seed):
    kept = kept_episodes(rewards, KeepConfig(episodes=wanted, by="best"), seed)
    assert sorted(rewards[k] for k in kept) == sorted(rewards)[-len(kept) :]


def test_ties_are_broken_by_the_seed():
    """Not by the number of an episode: the same would always win."""
    config = KeepConfig(episodes=2, by="best")
    choices = [tuple(kept_episodes([1.0] * 6, config, seed)) for seed in range(200)]
    assert choices == [tuple(kept_episodes([1.0] * 6, config, seed)) for seed in range(200)]
    counts = [sum(k in choice for choice in choices) for k in range(6)]
    assert min(counts) > 35, counts
