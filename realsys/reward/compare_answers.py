"""Comparison of final answers with each other, for majority votes: by the verifier itself, if it declares that."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol, Self

from realsys.config.doors import VERIFIER
from realsys.config.evaluation_sets import verifier_arguments
from realsys.config.schema import Config
from realsys.errors import NoVerifierError, RewardError, WaitTimeout
from realsys.reward.pool import ItemLimits, VerifierPool
from realsys.reward.verifiers.contract import Item

#: Limit for all comparisons of an evaluation: n samples of a problem may need n * n / 2 of them.
COMPARING_S = 300.0


class Answered(Protocol):
    """The part of a stored completion that this module needs."""

    @property
    def prompt(self) -> str: ...

    @property
    def completion(self) -> str: ...

    @property
    def answer(self) -> str | None: ...


class AnswerComparer:
    """Compares final answers in a process of the verifier: ``with AnswerComparer(config, name) as comparer: ...``

    The process starts with the first comparison. Must not be used in an event loop. A comparison raises WaitTimeout
    ``limit_s`` after the start.
    """

    def __init__(self, config: Config, verifier: str, limit_s: float = COMPARING_S) -> None:
        self._name = verifier
        self._limit_s = limit_s
        self._ends = time.monotonic() + limit_s
        self._pool = VerifierPool(1, ItemLimits.of(config.rollout.reward), verifier_arguments(config))
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._runner:
            self._runner.run(self._pool.close())

    def same_of(self, samples: Sequence[Answered]) -> Callable[[str, str], bool] | None:
        """Return the comparison of the final answers of one problem's completions; None: by their texts."""
        if not getattr(VERIFIER.load(self._name), "compares_answers", False):
            return None
        by_answer = {sample.answer: sample for sample in samples}

        def same(first: str, second: str) -> bool:
            if time.monotonic() > self._ends:
                raise WaitTimeout(f"comparing the final answers took more than {self._limit_s:g} s")
            item = Item(by_answer[first].prompt, by_answer[first].completion, second)
            try:
                return self._runner.run(self._pool.verify(self._name, item)).correct is True
            except (RewardError, NoVerifierError):  # an answer that is no reference is equal to no other
                return False

        return same
