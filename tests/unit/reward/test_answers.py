"""Final answers compared with each other, for majority votes."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from realsys.config.schema import Config
from realsys.errors import WaitTimeout
from realsys.reward.pool import AnswerComparer


class Completion(NamedTuple):
    """A completion with its final answer in a box."""

    answer: str
    prompt: str = "how much?"

    @property
    def completion(self) -> str:
        return f"so it is \\boxed{{{self.answer}}}"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("first", "second", "agree"),
    [(r"\frac{1}{2}", "0.5", True), ("50\\%", "1/2", True), ("7", "8", False), ("7", "it depends", False)],
)
def test_mathematical_answers_agree_by_value(first: str, second: str, agree: bool):
    with AnswerComparer(Config(), "math") as comparer:
        same = comparer.same_of([Completion(first), Completion(second)])
        assert same is not None and same(first, second) is agree


def test_verifier_without_comparison_compares_texts():
    with AnswerComparer(Config(), "exact") as comparer:
        assert comparer.same_of([Completion("7"), Completion("7.0")]) is None
        assert comparer._pool.restarts == 0 and not comparer._pool._running, "no process was needed"


def test_comparison_after_its_time_limit_raises():
    with AnswerComparer(Config(), "math", limit_s=-1.0) as comparer:
        same = comparer.same_of([Completion("7"), Completion("8")])
        assert same is not None
        with pytest.raises(WaitTimeout, match="comparing the final answers took more than -1 s"):
            same("7", "8")
        assert not comparer._pool._running, "no process was needed"
