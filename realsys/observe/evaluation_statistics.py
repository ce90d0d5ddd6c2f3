"""Numbers of an evaluation from the verdicts of its completions. Pure.

    n completions of each problem, c of them right ──> pass@1 = mean of c / n over the problems
                                                   ──> pass@k, unbiased (Chen et al. 2021, arXiv 2107.03374, eq. 1)
                                                   ──> interval, with the problems as clusters

The completions of a problem depend on each other, so the problem is the unit of every error: the variance is that of
the means over problems (Miller 2024, arXiv 2411.00640, section 2.2).

The interval is the one of Wilson (1927) with an effective sample size, p (1 - p) / s^2, where s^2 is the variance of
the mean over clusters (Franco et al. 2019, Journal of Survey Statistics and Methodology 7(3), section 2). With one
completion per problem that is exactly Wilson's interval. Unlike p +- 1.96 s it stays in [0, 1], and it has a width if
all problems are right.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

Z95 = 1.959963984540054  # 97.5 % quantile of the normal distribution


class Tally(NamedTuple):
    """Verdicts on one problem: ``right`` of ``judged`` completions."""

    judged: int
    right: int


class Estimate(msgspec.Struct, frozen=True):
    """A share with its 95 % interval and the standard error over problems, all in [0, 1]."""

    value: float
    low: float
    high: float
    stderr: float

    @property
    def margin(self) -> float:
        """Return half of the interval's width."""
        return (self.high - self.low) / 2


class Statistics(msgspec.Struct, frozen=True):
    """Numbers of one evaluation. ``pass_at``: k -> estimate, with k = 1; empty if no completion is right or wrong."""

    problems: int
    completions: int
    pass_at: dict[int, Estimate]

    @property
    def accuracy(self) -> Estimate | None:
        return self.pass_at.get(1)


def summarize(tallies: Iterable[Tally], k: Sequence[int] = ()) -> Statistics:
    """Return pass@1 and pass@k of the problems with verdicts. A k is left out if a problem has fewer verdicts."""
    judged = [tally for tally in tallies if tally.judged]
    completions = sum(tally.judged for tally in judged)
    fewest = min((tally.judged for tally in judged), default=0)
    values = {
        size: [pass_at_k(tally.judged, tally.right, size) for tally in judged]
        for size in sorted({1, *k})
        if size <= fewest
    }
    pass_at = {size: estimate(of_problems, completions) for size, of_problems in values.items()}
    return Statistics(len(judged), completions, pass_at)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Estimate the probability that one of k completions is right, without bias, from c right ones of n.

    It is 1 - C(n - c, k) / C(n, k), as a product, which has no large numbers. Raises ValueError unless
    0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k of n={n}, c={c}, k={k}: c must be in 0..n, and k in 1..n")
    if k == 1:
        return c / n
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def estimate(values: Sequence[float], completions: int) -> Estimate:
    """Return the mean of one value in [0, 1] per problem, with its error. Raises ValueError without a value.

    ``completions``: their number bounds the effective sample size.
    """
    count = len(values)
    if not count:
        raise ValueError("an estimate needs at least one problem")
    mean = math.fsum(values) / count
    variance = math.fsum((value - mean) ** 2 for value in values) / count**2
    return _estimate(mean, variance, count, completions)


def pooled(tallies: Iterable[Tally]) -> Estimate | None:
    """Return the share of right ones among all judged completions, with the problems as clusters; None without any.

    A problem counts by its completions. With as many of each problem this is the mean over problems.
    """
    judged = [tally for tally in tallies if tally.judged]
    completions = sum(tally.judged for tally in judged)
    if not completions:
        return None
    share = sum(tally.right for tally in judged) / completions
    variance = math.fsum((tally.right - share * tally.judged) ** 2 for tally in judged) / completions**2
    return _estimate(share, variance, len(judged), completions)


def _estimate(share: float, variance: float, problems: int, completions: int) -> Estimate:
    low, high = wilson(share, effective_size(share, variance, problems, completions))
    stderr = math.sqrt(variance * problems / (problems - 1)) if problems > 1 else 0.0
    return Estimate(share, low, high, stderr)


def effective_size(mean: float, variance: float, problems: int, completions: int) -> float:
    """Return how many independent completions have the same ``variance`` of their mean.

    At least the number of problems, and at most that of completions: equal means of few problems prove little.
    """
    spread = mean * (1.0 - mean)
    if spread <= 0.0:
        return float(problems)
    most = float(max(problems, completions))
    return min(most, max(float(problems), spread / variance)) if variance > 0.0 else most


def wilson(share: float, size: float, z: float = Z95) -> tuple[float, float]:
    """Return Wilson's score interval of ``share`` of ``size`` trials."""
    z2 = z * z
    centre = (share + z2 / (2 * size)) / (1 + z2 / size)
    half = z / (1 + z2 / size) * math.sqrt(share * (1 - share) / size + z2 / (4 * size * size))
    low = 0.0 if share == 0.0 else max(0.0, centre - half)
    return low, 1.0 if share == 1.0 else min(1.0, centre + half)


# ---- majority vote over the final answers of a problem's completions (self-consistency, arXiv 2203.11171). Pure
#
# The answer that most completions agree on is the vote. With a tie, each of the tied answers counts in part: the result
# is the expected value of a random choice among them. A completion without a final answer votes for nothing.


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
