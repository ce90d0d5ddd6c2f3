"""Majority vote over final answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realsys.observe.evaluation_records import Vote, majority


def votes(text):
    """Return the votes of a text: ``R`` is the right answer, ``-`` none, any other letter a wrong one."""
    return [Vote(None if letter == "-" else letter, letter == "R") for letter in text]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("RRa", 1.0),
        ("Raa", 0.0),
        ("Rab", 1 / 3),
        ("RRaa", 0.5),
        ("RRaab", 0.5),
        ("---", 0.0),
        ("R--", 1.0),
        ("ab", 0.0),
    ],
)
def test_most_frequent_answer_wins(text, expected):
    assert majority(votes(text)) == pytest.approx(expected)


def test_equal_answers_of_different_text_vote_together():
    asked = []

    def same(first, second):
        asked.append((first, second))
        return first.casefold() == second.casefold()

    assert majority(votes("RRaAa"), same) == 0.0 and asked == [("A", "a")]


def test_clear_majority_needs_no_comparison():
    def same(first, second):
        raise AssertionError("compared")

    assert majority(votes("RRRab"), same) == 1.0 and majority(votes("abc"), same) == 0.0


@given(st.text("Rab-", min_size=1, max_size=9), st.randoms())
def test_order_of_votes_does_not_matter(text, random):
    shuffled = "".join(random.sample(text, len(text)))
    assert majority(votes(text)) == majority(votes(shuffled))
