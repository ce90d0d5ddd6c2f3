"""Rows of an epoch of a mixture, and the order in which the ledger takes them."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realsys.data.prompts import copies_in_epoch, epoch_of_mixture
from realsys.errors import DataError
from realsys.manager.ledger.prompt_order import PromptOrder


def sources(*sizes):
    ends = np.cumsum([0, *sizes])
    return [np.arange(start, end) for start, end in pairwise(ends)]


def test_shares_are_those_of_the_weights():
    assert copies_in_epoch([100, 30], [1.0, 1.0]) == [100, 100]
    assert copies_in_epoch([100, 30], [3.0, 1.0]) == [100, 33]
    assert copies_in_epoch([10, 30], [0.5, 0.1]) == [150, 30]
    assert copies_in_epoch([7], [2.0]) == [7]


def test_small_source_is_repeated_evenly():
    counts = Counter(epoch_of_mixture(sources(100, 30), [1.0, 1.0], seed=1).tolist())
    assert all(counts[i] == 1 for i in range(100))
    assert sorted(counts[i] for i in range(100, 130)) == [3] * 20 + [4] * 10


def test_epoch_depends_on_the_seed_alone():
    first = epoch_of_mixture(sources(100, 30), [1.0, 1.0], seed=1)
    assert (first == epoch_of_mixture(sources(100, 30), [1.0, 1.0], seed=1)).all()
    assert (first != epoch_of_mixture(sources(100, 30), [1.0, 1.0], seed=2)).any()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.floats(0.05, 20)), min_size=1, max_size=4),
    st.integers(0, 5),
    st.integers(0, 400),
)
def test_cursor_continues_without_loss_or_repeat(parts, seed, cut):
    """A run that stops at any position and starts again takes every copy of an epoch exactly once."""
    sizes, weights = [size for size, _ in parts], [weight for _, weight in parts]
    rows = epoch_of_mixture(sources(*sizes), weights, seed)
    assert set(rows.tolist()) == set(range(sum(sizes)))
    cut = min(cut, len(rows))
    before, after = PromptOrder(seed, len(rows)), PromptOrder(seed, len(rows))
    taken = [before.at(p) for p in range(cut)] + [after.at(p) for p in range(cut, len(rows))]
    again = epoch_of_mixture(sources(*sizes), weights, seed)
    assert Counter(again[taken].tolist()) == Counter(rows.tolist())


@pytest.mark.parametrize(
    ("rows", "weights", "problem"),
    [
        ([10**8, 10], [1.0, 1.0], "source 1 with weight"),
        ([10**6, 10], [1e-6, 1.0], "source 1 with weight"),
        ([10, 0], [1.0, 1.0], "no rows to train on"),
    ],
)
def test_impossible_epoch_is_refused(rows, weights, problem):
    with pytest.raises(DataError, match=problem):
        copies_in_epoch(rows, weights)
