"""Which groups are worth training on, and which of their episodes."""

import asyncio
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realsys.config.schema_rollout import KeepConfig
from realsys.config.schema_train import FilterConfig
from realsys.errors import AgentError
from realsys.generation.completion import Completion
from realsys.rollout.episodes import RowBuilder, kept_episodes, reason_to_drop
from realsys.types import Episode

DAPO = FilterConfig(min=0.001, max=0.999)
EQUAL = FilterConfig(accept="unequal_rewards")
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


async def waits(episodes):
    """A filter that counts wrong episodes."""
    await asyncio.sleep(0)
    return f"wrong: {sum(not episode.correct for episode in episodes)}\n\ud800"


ACCEPTS = {
    "yes": (lambda episodes: np.True_, ""),
    "no": (lambda episodes: False, "refused"),
    "empty": (lambda episodes: " ", "refused"),
    "waits": (waits, r"wrong: 3 \ud800"),
}


@pytest.mark.parametrize("name", ACCEPTS)
def test_function_of_the_user_names_its_reason(name, monkeypatch):
    accept, reason = ACCEPTS[name]
    monkeypatch.setattr(sys.modules[__name__], "accept", accept, raising=False)
    group = episodes(True, False, False, False)
    assert reason_to_drop(group, FilterConfig(accept=f"{__name__}:accept")) == reason
    bounded = FilterConfig(accept=f"{__name__}:accept", min=0.5)
    assert reason_to_drop(group, bounded) == "success_rate", "the bounds come first"


def forgets(episodes):
    """A filter without a result."""


def test_function_without_a_verdict_is_an_error_with_its_place():
    place = rf"it returned None: it must return .* \({__file__}:{forgets.__code__.co_firstlineno}\)"
    with pytest.raises(AgentError, match=place):
        reason_to_drop(episodes(True), FilterConfig(accept=f"{__name__}:forgets"))


def test_example_filter_names_both_of_its_reasons(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[3] / "docs" / "examples"))

    def reason(*rewards, cut=0):
        rows = [RowBuilder([1]) for _ in rewards]
        for number, row in enumerate(rows):
            end = "length" if number < cut else "stop"
            row.completion(Completion(np.ones(1, np.int32), np.zeros(1, np.float32), np.ones(1, np.int32), end))
        group = [Episode([row.row()], reward) for row, reward in zip(rows, rewards, strict=True)]
        return reason_to_drop(group, FilterConfig(accept="filter:should_accept"))

    assert [reason(0, 1), reason(1, 1.05)] == ["", "similar rewards"]
    assert reason(0, 1, 1, 1, cut=2) == "cut off: 2 of 4 episodes" and reason(0, 1, 1, 1, cut=1) == ""


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
