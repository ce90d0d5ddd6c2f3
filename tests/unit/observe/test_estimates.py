"""Numbers of evaluations: unbiased pass@k, intervals with the problems as clusters."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realsys.observe.evaluation_records import Tally, effective_size, estimate, pass_at_k, pooled, summarize, wilson

TALLIES = st.lists(st.integers(0, 4).map(lambda right: Tally(4, right)), min_size=1, max_size=40)


@given(st.integers(1, 9), st.data())
def test_pass_at_k_counts_all_choices(n, data):
    """The mean over every choice of k of the n completions: at least one of them is right."""
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    choices = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, choices)) / len(choices))


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (10, 3, 1, 0.3),
        (10, 3, 5, 1 - 21 / 252),
        (200, 1, 100, 0.5),
        (5, 0, 5, 0.0),
        (5, 5, 1, 1.0),
        (4, 2, 3, 1.0),
        (100_000, 3, 40_000, 1 - math.prod((60_000 - i) / (100_000 - i) for i in range(3))),
    ],
)
def test_pass_at_k_has_known_values(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(3, 4, 1), (3, -1, 1), (3, 1, 0), (3, 1, 4), (0, 0, 1)])
def test_impossible_pass_at_k_is_refused(n, c, k):
    with pytest.raises(ValueError, match="must be in"):
        pass_at_k(n, c, k)


@pytest.mark.parametrize(
    ("right", "size", "low", "high"),
    [
        (8, 10, 0.4902, 0.9433),  # Newcombe 1998, Statistics in Medicine 17, method 3 (Wilson)
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (29, 29, 0.8830, 1.0),
    ],
)
def test_wilson_interval_has_published_values(right, size, low, high):
    assert wilson(right / size, size) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 60), st.data())
def test_one_completion_per_problem_is_wilson(count, data):
    right = data.draw(st.integers(0, count))
    values = [1.0] * right + [0.0] * (count - right)
    found = estimate(values, count)
    assert (found.low, found.high) == pytest.approx(wilson(right / count, count))


@given(TALLIES)
def test_interval_holds_the_mean(tallies):
    found = summarize(tallies, [2, 4])
    for value in found.pass_at.values():
        assert 0.0 <= value.low <= value.value + 1e-12 and value.value <= value.high + 1e-12 <= 1.0 + 1e-9
        assert value.high > value.low, "no number of problems proves anything exactly"
    values = [found.pass_at[k].value for k in (1, 2, 4)]
    assert values == sorted(values)


@given(TALLIES)
def test_repeated_completions_prove_no_more(tallies):
    """Completions that all agree with each other are worth as much as one of each problem."""
    agreeing = [Tally(4, 4 * (tally.right > 1)) for tally in tallies]
    once = [Tally(1, int(tally.right > 1)) for tally in tallies]
    for_four, for_one = summarize(agreeing).accuracy, summarize(once).accuracy
    assert for_four is not None and for_one is not None
    assert (for_four.low, for_four.high) == pytest.approx((for_one.low, for_one.high))


def test_spread_within_problems_narrows_the_interval():
    """Four completions that are independent of their problem count like four problems."""
    mixed = summarize([Tally(4, 2)] * 100).accuracy
    assert mixed is not None
    assert (mixed.low, mixed.high) == pytest.approx(wilson(0.5, 400))
    assert mixed.stderr == 0.0 and mixed.margin == pytest.approx(0.0488, abs=1e-4)


def test_standard_error_is_the_one_of_problem_means():
    found = estimate([1.0, 0.5, 0.0, 0.5], 8)
    assert found.value == 0.5 and found.stderr == pytest.approx(math.sqrt((0.25 + 0.25) / 3 / 4))


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 100), st.integers(1, 16))
def test_effective_size_is_bounded(mean, variance, problems, samples):
    assert problems <= effective_size(mean, variance, problems, problems * samples) <= problems * samples


def test_problems_without_verdict_do_not_count():
    found = summarize([Tally(0, 0), Tally(2, 1)], [2])
    assert (found.problems, found.completions) == (1, 2) and found.pass_at[1].value == 0.5
    assert summarize([Tally(0, 0)]).accuracy is None


def test_pass_at_k_needs_k_verdicts_everywhere():
    assert list(summarize([Tally(4, 1), Tally(3, 1)], [2, 3, 4]).pass_at) == [1, 2, 3]


@given(TALLIES)
def test_pooled_share_of_equal_problems_is_their_mean(tallies):
    of_problems = summarize(tallies).pass_at[1]
    together = pooled([*tallies, Tally(0, 0)])
    assert together is not None
    for name in ("value", "low", "high", "stderr"):
        assert getattr(together, name) == pytest.approx(getattr(of_problems, name), abs=1e-12)


def test_pooled_share_counts_completions():
    """A problem with more completions has more weight; nothing judged has no share."""
    together = pooled([Tally(1, 1), Tally(9, 0)])
    assert together is not None and together.value == 0.1
    assert pooled([Tally(0, 0)]) is None
