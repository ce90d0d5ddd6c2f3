"""Environments judge what agents produced. A judgement that cannot be made is a RewardError, never a reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from realsys.config.schema import RewardConfig
from realsys.data.prompts import Prompt
from realsys.data.tokenizer import TextTokenizer
from realsys.generation.client import Generated
from realsys.reward.messages import Item


@dataclass(frozen=True, slots=True)
class Verdict:
    correct: bool
    reward: float


class Environment(Protocol):
    async def judge(self, prompt: Prompt, answers: Sequence[Generated]) -> list[Verdict]:
        """One verdict per answer. Raises RewardError."""
        ...


class Verifiers(Protocol):
    """The part of VerifierPool that is needed here."""

    async def verify_batch(self, name: str, items: Sequence[Item]) -> list[bool]: ...


class MathEnvironment:
    """Compares the final answer with the reference, through a verifier. An answer that was cut off is wrong."""

    def __init__(self, tokenizer: TextTokenizer, pool: Verifiers, verifier: str, reward: RewardConfig) -> None:
        self._tokenizer, self._pool, self._verifier, self._reward = tokenizer, pool, verifier, reward

    async def judge(self, prompt: Prompt, answers: Sequence[Generated]) -> list[Verdict]:
        """All answers of a group in one trip to the pool."""
        finished = [k for k, answer in enumerate(answers) if answer.finish_reason == "stop"]
        items = [
            Item(prompt.text, self._tokenizer.answer_text(answers[k].tokens.tolist()), prompt.answer) for k in finished
        ]
        correct = [False] * len(answers)
        for k, verdict in zip(finished, await self._pool.verify_batch(self._verifier, items), strict=True):
            correct[k] = verdict
        return [Verdict(right, self._reward.correct if right else self._reward.wrong) for right in correct]
