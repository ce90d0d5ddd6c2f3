"""Majority vote over the final answers of a problem's completions (self-consistency, arXiv 2203.11171). Pure.

The answer that most completions agree on is the vote. With a tie, each of the tied answers counts in part: the result
is the expected value of a random choice among them. A completion without a final answer votes for nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

#: Tells whether two final answers are the same; called only for different texts.
Same = Callable[[str, str], bool]


class Vote(NamedTuple):
    """The final answer of one completion, None if it has none, and its verdict."""

    answer: str | None
    correct: bool


def majority(votes: Sequence[Vote], same: Same | None = None) -> float:
    """Return the probability, from 0 to 1, that the majority vote is right. Without any final answer it is wrong.

    All right answers agree with each other, because each equals the reference. So ``same`` compares the wrong ones
    only, and only if they could win or tie. Without ``same`` different texts are different answers.
    """
    right = sum(vote.correct and vote.answer is not None for vote in votes)
    wrong = [vote.answer for vote in votes if vote.answer is not None and not vote.correct]
    if not right:
        return 0.0
    if right > len(wrong):
        return 1.0
    counts = _groups(Counter(wrong), same)
    largest = max(counts)
    if right != largest:
        return float(right > largest)
    return 1.0 / (1 + counts.count(largest))


def _groups(texts: Counter[str], same: Same | None) -> list[int]:
    """Return the size of each group of equal answers."""
    if same is None:
        return list(texts.values())
    groups: dict[str, int] = {}
    for text, count in texts.items():
        first = next((first for first in groups if same(text, first)), text)
        groups[first] = groups.get(first, 0) + count
    return list(groups.values())
