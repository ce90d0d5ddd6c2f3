"""Comparison of final answers with each other, for majority votes: by the verifier itself, if it declares that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, Self

from realsys.config.doors import VERIFIER
from realsys.config.evaluation_sets import verifier_arguments
from realsys.config.schema import Config
from realsys.errors import NoVerifierError, RewardError
from realsys.reward.pool import VerifierPool
from realsys.reward.verifier_process import Limits
from realsys.reward.verifiers.base import Item


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

    The process starts with the first comparison. Must not be used in an event loop.
    """

    def __init__(self, config: Config, verifier: str) -> None:
        self._name = verifier
        self._compares: bool | None = None
        self._pool = VerifierPool(1, Limits.of(config.rollout.reward), verifier_arguments(config))
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._runner:
            self._runner.run(self._pool.close())

    def same_of(self, samples: Sequence[Answered]) -> Callable[[str, str], bool]:
        """Return the comparison of the final answers of one problem's completions."""
        by_answer = {sample.answer: sample for sample in samples}

        def same(first: str, second: str) -> bool:
            if self._compares is None:
                self._compares = bool(getattr(VERIFIER.load(self._name), "compares_answers", False))
            if not self._compares:
                return False
            item = Item(by_answer[first].prompt, by_answer[first].completion, second)
            try:
                return self._runner.run(self._pool.verify(self._name, item)).correct is True
            except (RewardError, NoVerifierError):  # an answer that is no reference is equal to no other
                return False

        return same
