"""Sampled tokens that are not trained, by reason, and the bias of the lengths that are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realsys.algorithm.token_losses import WINDOW_STEPS, TokenLosses, ks_distance
from realsys.types import SampleMeta


def row(ticket: str, tokens: int, episode: int = 0) -> SampleMeta:
    return SampleMeta(f"{ticket}.0/{episode}.0", ticket, 0, tokens, tokens, 0.0, False, 0, 0, 0, episode=episode)


def test_shares_are_of_trained_and_discarded_tokens() -> None:
    losses = TokenLosses()
    losses.lose("stale", [row("t1", 10)])
    losses.lose("success_rate", [row("t2", 20)])
    losses.train([row("t3", 40), row("t4", 30)], [row("t3", 40), row("t4", 10)])
    step = losses.close_step()
    assert step.tokens == 100 and step.untrained == {"masked": 0.2, "stale": 0.1, "success_rate": 0.2}
    assert step.too_old == pytest.approx(0.3) and step.warning
    assert losses.close_step().untrained == {}, "a step counts what ended since the one before"


def test_nothing_lost_means_no_distance() -> None:
    losses = TokenLosses()
    losses.train([row("t1", 10), row("t2", 99)], [row("t1", 10), row("t2", 99)])
    assert (losses.close_step().length_ks, losses.close_step().too_old) == (0.0, 0.0)


def test_starved_length_shows_as_distance() -> None:
    losses = TokenLosses()
    losses.train([row("t1", 10), row("t2", 20), row("t3", 30)], [row("t1", 10), row("t2", 20), row("t3", 30)])
    losses.lose("stale", [row("t4", 500)])
    losses.lose("copy", [row("t5", 500)])  # its ticket has another end
    assert losses.close_step().length_ks == pytest.approx(0.25)


def test_window_forgets_old_steps() -> None:
    losses = TokenLosses()
    losses.lose("stale", [row("t1", 10)])
    steps = [losses.close_step() for _ in range(WINDOW_STEPS + 1)]
    assert [step.too_old for step in steps] == [1.0] * WINDOW_STEPS + [0.0]


def test_distance_matches_worked_examples() -> None:
    assert ks_distance([1, 2, 3, 4], [1, 2, 3, 4]) == 0.0
    assert ks_distance([1, 2], [3, 4]) == 1.0
    assert ks_distance([1, 2, 3, 4], [3, 4, 5, 6]) == 0.5
    assert ks_distance([1, 1, 2], [1, 2, 2]) == pytest.approx(1 / 3)
    assert ks_distance([], [1]) == 0.0


@given(st.lists(st.integers(0, 20), min_size=1), st.lists(st.integers(0, 20), min_size=1))
def test_distance_is_largest_gap_of_distributions(a: list[int], b: list[int]) -> None:
    gaps = [abs(np.mean(np.array(a) <= x) - np.mean(np.array(b) <= x)) for x in range(21)]
    assert ks_distance(a, b) == pytest.approx(max(gaps))
