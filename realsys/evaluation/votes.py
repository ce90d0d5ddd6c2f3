"""Majority vote over the final answers of a problem's completions (self-consistency, arXiv 2203.11171). Pure.

The answer that most completions agree on is the vote. With a tie, each of the tied answers counts in part: the result
is the expected value of a random choice among them. A completion without a final answer votes for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

#: Tells whether two final answers are the same; called only for different texts.
Same = Callable[[str, str], bool]


class Vote(NamedTuple):
    """The final answer of one completion, None if it has none, and its verdict."""

    answer: str | None
    correct: bool


def by_text(first: str, second: str) -> bool:
    """Take different texts for different answers."""
    return False


def majority(votes: Sequence[Vote], same: Same = by_text) -> float:
    """Return the probability, from 0 to 1, that the majority vote is right. Without any final answer it is wrong.

    All right answers agree with each other, because each equals the reference. So ``same`` compares the wrong ones
    only, and only if they could win or tie.
    """
    right = sum(vote.correct and vote.answer is not None for vote in votes)
    wrong = [vote.answer for vote in votes if vote.answer is not None and not vote.correct]
    if not right:
        return 0.0
    if right > len(wrong):
        return 1.0
    groups: list[tuple[str, int]] = []
    for text in dict.fromkeys(wrong):
        count = wrong.count(text)
        at = next((i for i, (first, _) in enumerate(groups) if same(text, first)), None)
        if at is None:
            groups.append((text, count))
        else:
            groups[at] = groups[at][0], groups[at][1] + count
    largest = max(count for _, count in groups)
    if right != largest:
        return float(right > largest)
    return 1.0 / (1 + sum(count == largest for _, count in groups))
